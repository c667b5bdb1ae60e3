"""The experts hook: what runs in place of an MoE block's experts once a model is wrapped.

Letters: ``T`` tokens of this rank, ``K`` experts per token, ``E`` experts per layer, ``R`` ranks, ``H`` hidden size,
``V`` rows worked on here, ``P`` (token, expert) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from cap_hf.config import CAPConfig
from cap_hf.layout import ExpertLayout
from cap_hf.parallel.dispatch import Dispatcher, GroupDispatcher
from cap_hf.parallel.groups import ExpertGroup
from cap_hf.pruning import MAX_EXACT_TOP_K, prune_devices, prune_experts

__all__ = ["HOOK_NAME", "ExpertsRuntime", "RoutingObserver", "check_pruning", "connect_layer", "run_without_tokens"]

HOOK_NAME = "cap"  # under which the hook is registered with Transformers


class RoutingObserver(Protocol):
    """Something that wants to see every routing decision, the recorder for one."""

    def observe(self, layer: int, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> None:
        """One layer's decisions after pruning: ids (T, K) with -1 for pruned, weights (T, K)."""


@dataclass
class ExpertsRuntime:
    """State that all MoE layers of one model share."""

    group: ExpertGroup
    config: CAPConfig
    layout: ExpertLayout
    observers: list[Any] = field(default_factory=list)
    source_rank: torch.Tensor | None = None
    """(T,) rank that each token of the running forward belongs to, where one process plays several; else None."""
    joined: bool = False
    """Ranks may run different numbers of forwards now, and vote before each."""
    in_forward: bool = False
    """A forward of the whole model is under way; with ``joined``, one that was voted for."""
    layers_run: int = 0
    """MoE layers of the running forward that have dispatched."""
    in_exchange: bool = False
    """Between the first and the last collective of a layer: where this is left set, the ranks are out of step for good."""
    dispatcher: Dispatcher = field(init=False)

    def __post_init__(self) -> None:
        self.dispatcher = GroupDispatcher(self.group) if self.group.size > 1 else Dispatcher()

    @property
    def is_virtual(self) -> bool:
        """One process plays all ranks of the layout: same pruning and sums, nothing sent."""
        return self.group.size == 1 and self.layout.num_ranks > 1

    def sources(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Rank each token belongs to, (T,)."""
        if self.source_rank is None:
            return torch.full((num_tokens,), self.group.rank, device=device)
        if len(self.source_rank) != num_tokens:
            raise ValueError(
                f"{num_tokens} tokens in an MoE layer, {len(self.source_rank)} in this forward; call the wrapped model as a whole"
            )
        return self.source_rank.to(device)


def check_pruning(config: CAPConfig, top_k: int) -> None:
    """ValueError for a rule that cannot run on a model with ``top_k`` experts per token."""
    if config.pruning == "device" and config.prune_solver == "exact" and top_k > MAX_EXACT_TOP_K:
        raise ValueError(
            f"prune_solver is 'exact' and the model uses {top_k} experts per token, at most {MAX_EXACT_TOP_K} work; use 'greedy'"
        )


def connect_layer(module: Any, shared: ExpertsRuntime, layer: int) -> None:
    """Tell an experts module its place: MoE layer number ``layer``, and where each expert is, as buffers that follow the module."""
    layout, device = shared.layout, next(module.parameters()).device
    slots = torch.arange(layout.num_experts)  # one process that plays all ranks holds every expert, in id order
    if not shared.is_virtual:
        for rank in range(layout.num_ranks):
            hosted = torch.from_numpy(layout.experts_of(layer, rank))
            slots[hosted] = torch.arange(len(hosted))
    module.register_buffer("cap_expert_to_slot", slots.to(device), persistent=False)
    module.register_buffer("cap_expert_to_rank", torch.tensor(layout.expert_to_rank[layer], device=device), persistent=False)
    module.cap_runtime, module.cap_layer = shared, layer


def run_without_tokens(module: Any, top_k: int) -> None:
    """Take part in one MoE layer's collectives without tokens of one's own, for the sake of ranks that have some."""
    weight = next(module.parameters())
    with torch.no_grad():
        hidden = weight.new_zeros((0, module.hidden_dim))
        ids = torch.zeros((0, top_k), dtype=torch.long, device=weight.device)
        module(hidden, ids, torch.zeros((0, top_k), device=weight.device))


def _keep(module: Any, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor | None:
    """Pairs that survive pruning, (T, K) bool; None when all do."""
    shared: ExpertsRuntime = module.cap_runtime
    config = shared.config
    if config.prune_threshold == 0:
        return None
    if config.pruning == "expert":
        return prune_experts(weights_TK, config.prune_threshold)
    source, topology = shared.sources(len(ids_TK), ids_TK.device), shared.layout.topology
    return prune_devices(ids_TK, weights_TK, module.cap_expert_to_rank, source, topology, config.prune_threshold, config.prune_solver)


def _renormalized(weights_TK: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Scale the surviving weights of each token back to the sum they had before pruning."""
    kept = torch.where(keep, weights_TK, 0).sum(dim=-1, keepdim=True)
    scale = torch.where(kept > 0, weights_TK.sum(dim=-1, keepdim=True) / kept, torch.ones_like(kept))
    return weights_TK * scale


def _run_local_experts(
    module: Any, rows_VH: torch.Tensor, row_P: torch.Tensor, slot_P: torch.Tensor, weight_P: torch.Tensor
) -> torch.Tensor:
    """Weighted sum of each row's experts, (V, H), by Transformers' grouped kernel with one expert per entry."""
    out_VH = torch.zeros_like(rows_VH, dtype=torch.float32)  # sums of half-precision outputs are kept exact until the end
    if len(row_P) == 0:
        return out_VH.to(rows_VH.dtype) + 0 * rows_VH  # keeps the graph connected where a rank has no work
    slot_P, order = torch.sort(slot_P, stable=True)  # by expert, as the kernel wants them
    row_P, weight_P = row_P[order], weight_P[order]
    result_PH = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, rows_VH[row_P], slot_P[:, None], weight_P[:, None])
    return out_VH.index_add(0, row_P, result_PH.float()).to(rows_VH.dtype)


def cap_experts_forward(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Runs in place of ``experts.forward``: prune, dispatch, compute, combine.

    Args:
        self: the Transformers experts module, cut to this rank's experts.
        hidden_states: (T, H).
        top_k_index: (T, K) expert ids.
        top_k_weights: (T, K) gate scores.
    """
    shared: ExpertsRuntime = self.cap_runtime
    if shared.joined and not shared.in_forward:
        raise ValueError("a part of the model was called inside joined, where only whole forwards are voted for; call the wrapped model")
    with torch.no_grad():
        keep = _keep(self, top_k_index, top_k_weights)
    if keep is not None and shared.config.renormalize:
        top_k_weights = _renormalized(top_k_weights, keep)
    for observer in shared.observers:
        observer.observe(self.cap_layer, top_k_index if keep is None else torch.where(keep, top_k_index, -1), top_k_weights)
    shared.group.traffic.token_visits += len(hidden_states)
    if keep is None and shared.group.size == 1:
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
    num_ranks = shared.layout.num_ranks
    rank_TK = self.cap_expert_to_rank[top_k_index]
    if keep is not None:
        rank_TK = torch.where(keep, rank_TK, num_ranks)
    slot_TK = self.cap_expert_to_slot[top_k_index]
    shared.layers_run, shared.in_exchange = shared.layers_run + 1, True
    work = shared.dispatcher.dispatch(hidden_states, rank_TK, slot_TK, top_k_weights, num_ranks)
    result_VH = _run_local_experts(self, work.rows_VH, work.row_of_pair_P, work.slot_P, work.weight_P)
    out_TH = shared.dispatcher.combine(result_VH, work)
    shared.in_exchange = False
    return out_TH


ExpertsInterface.register(HOOK_NAME, cap_experts_forward)
