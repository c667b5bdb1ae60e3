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
from cap_hf.pruning import prune_devices, prune_experts

__all__ = ["HOOK_NAME", "ExpertsRuntime", "LayerRuntime", "RoutingObserver"]

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
    observer: RoutingObserver | None = None
    routed: torch.Tensor | None = None
    """(T,) bool: tokens whose experts run in this forward; None for all. Finished sequences are left out."""
    source_rank: torch.Tensor | None = None
    """(T,) rank that each token belongs to, where one process plays several ranks; None: this process's own."""
    dispatcher: Dispatcher = field(init=False)

    def __post_init__(self) -> None:
        self.dispatcher = GroupDispatcher(self.group) if self.group.size > 1 else Dispatcher()

    @property
    def is_virtual(self) -> bool:
        """One process plays all ranks of the layout: same pruning and sums, nothing sent."""
        return self.group.size == 1 and self.layout.num_ranks > 1

    def sources(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Rank each token belongs to, (T,)."""
        if self.source_rank is not None and len(self.source_rank) == num_tokens:
            return self.source_rank.to(device)
        return torch.full((num_tokens,), self.group.rank, device=device)


class LayerRuntime:
    """One MoE layer's share of the runtime: where its experts are. ``layer`` counts MoE layers from 0."""

    def __init__(self, shared: ExpertsRuntime, layer: int, device: torch.device) -> None:
        self.shared, self.layer = shared, layer
        layout = shared.layout
        slots = torch.zeros(layout.num_experts, dtype=torch.long)
        for rank in range(layout.num_ranks):
            hosted = torch.from_numpy(layout.experts_of(layer, rank))
            # one process that plays all ranks holds every expert, in id order
            slots[hosted] = hosted if shared.is_virtual else torch.arange(len(hosted))
        self.expert_to_slot = slots.to(device)
        self.expert_to_rank = torch.tensor(layout.expert_to_rank[layer], device=device)

    def keep(self, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor | None:
        """Pairs that survive pruning, (T, K) bool; None when all do."""
        config, routed = self.shared.config, self.shared.routed
        keep = None
        if config.prune_threshold > 0 and config.pruning == "expert":
            keep = prune_experts(weights_TK, config.prune_threshold)
        elif config.prune_threshold > 0 and config.pruning == "device":
            source = self.shared.sources(len(ids_TK), ids_TK.device)
            topology = self.shared.layout.topology
            keep = prune_devices(ids_TK, weights_TK, self.expert_to_rank, source, topology, config.prune_threshold, config.prune_solver)
        if routed is not None and len(routed) == len(ids_TK):
            mask = routed[:, None].expand_as(ids_TK)
            keep = mask if keep is None else keep & mask
        return keep


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
    runtime: LayerRuntime = self.cap_runtime
    shared = runtime.shared
    with torch.no_grad():
        keep = runtime.keep(top_k_index, top_k_weights)
    if keep is not None and shared.config.renormalize:
        top_k_weights = _renormalized(top_k_weights, keep)
    if shared.observer is not None:
        kept_ids = top_k_index if keep is None else torch.where(keep, top_k_index, -1)
        shared.observer.observe(runtime.layer, kept_ids, top_k_weights)
    shared.group.traffic.token_visits += len(hidden_states)
    if keep is None and shared.group.size == 1:
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
    num_ranks = shared.layout.num_ranks
    rank_TK = runtime.expert_to_rank[top_k_index]
    if keep is not None:
        rank_TK = torch.where(keep, rank_TK, num_ranks)
    work = shared.dispatcher.dispatch(hidden_states, rank_TK, runtime.expert_to_slot[top_k_index], top_k_weights, num_ranks)
    result_VH = _run_local_experts(self, work.rows_VH, work.row_of_pair_P, work.slot_P, work.weight_P)
    return shared.dispatcher.combine(result_VH, work)


ExpertsInterface.register(HOOK_NAME, cap_experts_forward)
