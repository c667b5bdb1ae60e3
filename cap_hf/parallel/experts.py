"""The experts hook: what runs in place of an MoE block's experts once a model is wrapped.

Letters: ``T`` tokens of this rank, ``K`` experts per token, ``E`` experts per layer, ``R`` ranks, ``H`` hidden size,
``V`` rows worked on here, ``P`` (token, expert) pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from cap_hf.config import CAPConfig
from cap_hf.layout import ExpertLayout
from cap_hf.parallel.dispatch import Bounds, Hop, Work, entry_ranks, run_flat, run_hierarchical
from cap_hf.parallel.groups import ExpertGroup, limited_group, node_group
from cap_hf.pruning import MAX_EXACT_TOP_K, prune_devices, prune_experts
from cap_hf.topology import Topology

__all__ = ["HOOK_NAME", "ExpertsRuntime", "RoutingObserver", "check_pruning", "connect_layer", "run_without_tokens"]

HOOK_NAME = "cap"  # under which the hook is registered with Transformers
MAX_BOUNDED_TOKENS = 1 << 17
"""Tokens of all ranks in a forward above which sizes are exchanged, rather than room kept for the most that can come."""
SMALL_FORWARD_BYTES = 1 << 16
"""Hidden states per rank below which going through a node's ranks takes longer than the bytes it saves, on links from 0.1 to
10 Gbit/s: it doubles the number of collectives."""


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
    num_tokens: list[int] | None = None
    """(R,) tokens of every rank in the running forward, agreed on before it; None where sizes must be exchanged instead."""
    joined: bool = False
    """Ranks may run different numbers of forwards now, and vote before each."""
    in_forward: bool = False
    """A forward of the whole model is under way; with ``joined``, one that was voted for."""
    layers_run: int = 0
    """MoE layers of the running forward that have dispatched."""
    in_exchange: bool = False
    """Between the first and the last collective of a layer: where this is left set, the ranks are out of step for good."""
    lane: ExpertGroup = field(init=False)
    """The group under the forward's time limit."""
    hop: Hop = field(init=False)
    node_hop: Hop | None = field(init=False)
    """Among the ranks of this node, where rows enter a node once; else None."""

    def __post_init__(self) -> None:
        self.configure(self.layout, self.config)

    def configure(self, layout: ExpertLayout, config: CAPConfig) -> None:
        """Run with this layout and these options from now on; every rank calls it, with the same.

        Raises:
            ValueError: on every rank, for options of the exchange that differ between ranks.
        """
        topology, wire_dtype = layout.topology, config.wire_dtype and getattr(torch, config.wire_dtype)
        self.group.require_equal(f"{config.dispatch}, {config.wire_dtype}, {config.timeout_s:g} s", "dispatch, wire_dtype or timeout_s")
        self.layout, self.config, self.lane = layout, config, limited_group(self.group, config.timeout_s)
        self.hop = Hop(self.lane, wire_dtype)
        in_nodes = self.group.size > 1 and is_hierarchical(config, topology)
        self.node_hop = Hop(node_group(self.lane, topology.ranks_per_node), wire_dtype) if in_nodes else None

    def agree(self, has_forward: bool, num_tokens: int) -> int:
        """Tell every rank what this one is about to run; returns how many have a forward to run."""
        plan = torch.tensor([has_forward, num_tokens, torch.is_grad_enabled()], dtype=torch.int64)
        gathered, interrupt = self.lane.all_gather_unless_interrupted(plan)
        plans = gathered.tolist()
        self.num_tokens = None if any(grad for _, _, grad in plans) else [tokens for _, tokens, _ in plans]
        if interrupt is not None:
            raise interrupt
        return sum(voted for voted, _, _ in plans)

    def hop_in_node(self, row_bytes: int) -> Hop | None:
        """The hop inside the node for this forward, whose rows take ``row_bytes`` each; None where rows go straight to their ranks."""
        small = SMALL_FORWARD_BYTES * self.group.size
        if self.config.dispatch == "auto" and self.num_tokens is not None and sum(self.num_tokens) * row_bytes < small:
            return None
        return self.node_hop

    def bounds(self, top_k: int, node_hop: Hop | None) -> tuple[Bounds | None, Bounds | None]:
        """The most rows that a layer of this forward moves, among all ranks and inside the node; None where that is unknown."""
        if self.num_tokens is None or sum(self.num_tokens) > MAX_BOUNDED_TOKENS:
            return None, None
        me, tokens = self.group.rank, self.num_tokens
        if node_hop is None:
            passes = [rank != me for rank in range(self.group.size)]
        else:
            nodes = self.layout.topology.rank_to_node
            passes = [bool(nodes[rank] != nodes[me]) for rank in range(self.group.size)]
        outer = Bounds([n * other for n, other in zip(tokens, passes, strict=True)], [tokens[me] * other for other in passes], top_k)
        if node_hop is None:
            return outer, None
        start = me // node_hop.group.size * node_hop.group.size
        inside = tokens[start : start + node_hop.group.size]
        most = [n + sum(tokens) - sum(inside) for n in inside]
        others = [rank != node_hop.group.rank for rank in range(len(most))]
        own = most[node_hop.group.rank]
        return outer, Bounds([n * other for n, other in zip(most, others, strict=True)], [own * other for other in others], top_k)

    @contextmanager
    def exchange(self, layer: int) -> Iterator[None]:
        """Around the collectives of MoE layer number ``layer``; a failure leaves ``in_exchange`` set."""
        self.layers_run, self.in_exchange = self.layers_run + 1, True
        self.lane.progress.where = f"MoE layer {layer} (decoder layer {self.layout.layer_ids[layer]})"
        yield
        self.in_exchange = False

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


class SharedAhead:
    """Runs an MoE block's shared experts while rows travel, and gives the block the result when it asks for it.

    Stands in for ``module.forward``. A block that asks with another input than was expected gets what it asked for.
    """

    def __init__(self, module: Any) -> None:
        self.forward: Any = module.forward
        self.given: torch.Tensor | None = None
        self.result: torch.Tensor | None = None
        module.forward = self

    def run(self, hidden_TH: torch.Tensor) -> None:
        """Compute ahead for these rows; without any there is nothing to ask for."""
        if len(hidden_TH):
            self.given, self.result = hidden_TH, self.forward(hidden_TH)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        given, result = self.given, self.result
        self.given = self.result = None
        if given is None or result is None or given.data_ptr() != hidden.data_ptr() or given.numel() != hidden.numel():
            return self.forward(hidden)
        return result.view(hidden.shape)


def connect_layer(module: Any, shared: ExpertsRuntime, layer: int, follower: Any = None) -> None:
    """Tell an experts module its place: MoE layer number ``layer``, and where each expert is, as buffers that follow the module.

    ``follower`` is the module of the shared experts that the block runs next on the same rows.
    """
    layout, device = shared.layout, next(module.parameters()).device
    slots = torch.arange(layout.num_experts)  # one process that plays all ranks holds every expert, in id order
    if not shared.is_virtual:
        for rank in range(layout.num_ranks):
            hosted = torch.from_numpy(layout.experts_of(layer, rank))
            slots[hosted] = torch.arange(len(hosted))
    module.register_buffer("cap_expert_to_slot", slots.to(device), persistent=False)
    module.register_buffer("cap_expert_to_rank", torch.tensor(layout.expert_to_rank[layer], device=device), persistent=False)
    module.cap_runtime, module.cap_layer = shared, layer
    module.cap_shared_ahead = None
    if follower is not None and shared.group.size > 1:
        module.cap_shared_ahead = follower.forward if isinstance(follower.forward, SharedAhead) else SharedAhead(follower)


def run_without_tokens(module: Any, hidden_size: int, top_k: int) -> None:
    """Take part in one MoE layer's collectives without tokens of one's own, for the sake of ranks that have some."""
    weight = next(module.parameters())
    with torch.no_grad():
        hidden = weight.new_zeros((0, hidden_size))
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
    return prune_devices(
        ids_TK,
        weights_TK,
        module.cap_expert_to_rank,
        source,
        topology,
        config.prune_threshold,
        config.prune_solver,
        hierarchical=is_hierarchical(config, topology),  # whatever way a small forward takes: batches do not change results
    )


def _renormalized(weights_TK: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Scale the surviving weights of each token back to the sum they had before pruning."""
    kept = torch.where(keep, weights_TK, 0).sum(dim=-1, keepdim=True)
    scale = torch.where(kept > 0, weights_TK.sum(dim=-1, keepdim=True) / kept, torch.ones_like(kept))
    return weights_TK * scale


def is_hierarchical(config: CAPConfig, topology: Topology) -> bool:
    """Whether a token's row enters a node once and is fanned out there; "auto" does so where that can save anything."""
    return config.dispatch == "hierarchical" or config.dispatch == "auto" and 1 < topology.num_nodes < topology.num_ranks


def _run_local_experts(module: Any, work: Work) -> torch.Tensor:
    """Weighted sum of each row's experts, (V, H), by Transformers' grouped kernel with one expert per entry."""
    rows_VH = work.rows_VH
    out_VH = torch.zeros_like(rows_VH, dtype=torch.float32)  # sums of half-precision outputs are kept exact until the end
    if len(work.row_P) == 0:
        return out_VH.to(rows_VH.dtype) + 0 * rows_VH  # keeps the graph connected where a rank has no work
    slot_P = module.cap_expert_to_slot[work.expert_P]
    result_PH = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, rows_VH[work.row_P], slot_P[:, None], work.weight_P[:, None])
    return out_VH.index_add(0, work.row_P, result_PH.float()).to(rows_VH.dtype)


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
    if shared.group.size == 1:
        return _run_here(self, hidden_states, top_k_index, top_k_weights, keep)
    return _run_on_ranks(self, hidden_states, top_k_index, top_k_weights, keep)


def _run_here(
    module: Any, hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, keep_TK: torch.Tensor | None
) -> torch.Tensor:
    """All experts are on this rank."""
    if keep_TK is None:
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_TH, ids_TK, weights_TK)
    row_P, slot_P = keep_TK.nonzero(as_tuple=True)
    return _run_local_experts(module, Work(hidden_TH, row_P, ids_TK[row_P, slot_P], weights_TK[row_P, slot_P]))


def _run_on_ranks(
    module: Any, hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, keep_TK: torch.Tensor | None
) -> torch.Tensor:
    """Every rank of the group runs this layer now."""
    shared: ExpertsRuntime = module.cap_runtime
    num_ranks, ranks_per_node = shared.layout.num_ranks, shared.layout.topology.ranks_per_node
    rank_TK = module.cap_expert_to_rank[ids_TK]
    if keep_TK is not None:
        rank_TK = torch.where(keep_TK, rank_TK, num_ranks)
    token_P = torch.arange(len(ids_TK), device=ids_TK.device).repeat_interleave(ids_TK.shape[1])
    work = Work(hidden_TH, token_P, ids_TK.flatten(), weights_TK.flatten())
    compute = partial(_run_local_experts, module)
    node_hop = shared.hop_in_node(hidden_TH.shape[1] * (shared.config.wire_dtype and 2 or hidden_TH.element_size()))
    bounds, node_bounds = shared.bounds(ids_TK.shape[1], node_hop)
    ahead = module.cap_shared_ahead
    meanwhile = partial(ahead.run, hidden_TH) if ahead is not None and not torch.is_grad_enabled() else None
    with shared.exchange(module.cap_layer):
        if node_hop is None:
            return run_flat(shared.hop, work, rank_TK.flatten(), bounds, compute, meanwhile)
        entry_P = entry_ranks(rank_TK, shared.group.rank, num_ranks, ranks_per_node).flatten()
        place_of_expert = module.cap_expert_to_rank % ranks_per_node
        return run_hierarchical(shared.hop, node_hop, work, entry_P, place_of_expert, (bounds, node_bounds), compute, meanwhile)


ExpertsInterface.register(HOOK_NAME, cap_experts_forward)
