"""Which of a token's experts, or whole destination ranks, matter too little to pay for.

Letters: ``T`` tokens, ``K`` experts per token, ``E`` experts per layer, ``R`` ranks, ``D`` = K places for a token's distinct
ranks, ``S`` = 2**D subsets of them. Shapes are suffixes: ``share_TK``.

A share is a gate score over the token's own sum, so raw scores that do not sum to 1 mean the same as normalised ones.
Shares are 30-bit integers, so that their sums do not depend on the order in which a device adds them up. The work of a
token depends on ``K``, not on ``R`` or ``E``. Tensors on a CPU take compiled loops, for a model's layer decides about a few
tokens at a time and a dozen tensor operations cost more than the decision; others take the tensor operations below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from cap_hf.topology import Topology

__all__ = ["MAX_EXACT_TOP_K", "SHARE_TOLERANCE", "prune_devices", "prune_experts"]

MAX_EXACT_TOP_K = 12
"""Largest K of the exact solver: it tries 2**K subsets per token."""

SHARE_TOLERANCE = 1e-6
"""Shares and share-per-cost ratios nearer than this are equal; above the rounding of float32, below any useful threshold."""

_ONE = 1 << 30  # a share of 1
_TOLERANCE = int(SHARE_TOLERANCE * _ONE)
_COST_TOLERANCE = 1e-5  # relative; costs are float32 sums of at most MAX_EXACT_TOP_K terms
_CHUNK_BYTES = 16 << 20  # of the exact solver's memory; more is not faster
_BYTES_PER_SUBSET = 20  # of one token: two sums, their masked copies, a mask


def prune_experts(expert_weights: torch.Tensor, threshold: float) -> torch.Tensor:
    """Drop each token's lowest-scored experts while their summed share stays below ``threshold``.

    Reaching ``threshold`` (within 1e-6) is not below it. The best expert always stays; of equal scores the earlier slot
    stays longer. A slot that is pruned already must weigh 0. A token whose scores do not sum to a positive finite number keeps everything.

    Args:
        expert_weights: (T, K) non-negative gate scores of any floating type and scale.
        threshold: p in [0, 1); 0 keeps everything.

    Returns:
        (T, K) bool, True where the expert stays.

    Raises:
        ValueError: a threshold outside [0, 1) or scores that are not (T, K).
    """
    _check_threshold(threshold)
    if expert_weights.ndim != 2:
        raise ValueError(f"expert_weights has shape {tuple(expert_weights.shape)}; it must be (tokens, experts per token)")
    if threshold == 0:
        return torch.ones_like(expert_weights, dtype=torch.bool)
    weight_TK = expert_weights.detach().float()
    least = math.ceil((threshold - SHARE_TOLERANCE) * _ONE)
    if _runs_compiled(weight_TK):
        from cap_hf._pruning_loops import keep_experts  # compiled code loads lazily

        keep_TK = torch.empty(weight_TK.shape, dtype=torch.bool)
        keep_experts(weight_TK.contiguous().numpy(), least, _ONE, keep_TK.numpy())
        return keep_TK
    share_TK, is_scored_T1 = _shares(weight_TK)
    order_TK = torch.sort(weight_TK, dim=1, descending=True, stable=True).indices  # stable: the earlier of equals is the better
    sorted_TK = share_TK.gather(1, order_TK)
    before_TK = sorted_TK.cumsum(1) - sorted_TK
    tail_TK = sorted_TK.sum(1, keepdim=True) - before_TK  # what is dropped if this slot is the best one to go
    stays_TK = tail_TK >= least
    stays_TK[:, :1] = True
    return torch.zeros_like(stays_TK).scatter(1, order_TK, stays_TK) | ~is_scored_T1


def prune_devices(
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    expert_to_rank: torch.Tensor,
    source_rank: torch.Tensor,
    topology: Topology,
    threshold: float,
    solver: str = "greedy",
    hierarchical: bool = False,
) -> torch.Tensor:
    """Drop whole ranks of each token so that the rest, with a share of at least ``1 - threshold``, costs little to reach.

    The token's own rank costs nothing and always stays. "greedy" adds ranks by falling share per cost until the kept share
    reaches ``1 - threshold``; ratios within 1e-6 of the next are tied, and ties go to the cheaper, then the lower rank.
    "exact" finds the cheapest set; equal costs go to the larger kept share, then to the cheaper and lower ranks. Both
    compare shares within 1e-6 and never drop all of a token's score. A token whose scores do not sum to a positive finite
    number keeps everything.

    Args:
        expert_ids: (T, K) integers in [0, E), or -1 for a slot that is pruned already: it counts nothing and stays out.
        expert_weights: (T, K) non-negative gate scores of any floating type and scale.
        expert_to_rank: (E,) integers in [0, R).
        source_rank: (T,) integers in [0, R), the rank that holds the token.
        topology: gives the cost of a row from the token's rank to every other.
        threshold: p in [0, 1); 0 keeps everything.
        solver: "greedy" or "exact" (K at most 12).
        hierarchical: rows enter a node once and are fanned out inside: once a token pays for a rank of another node, each
            further rank of that node costs it 1. The greedy then weighs every step by what it adds to the cost.

    Returns:
        (T, K) bool, True where the expert stays; all slots of a rank agree.

    Raises:
        ValueError: a threshold outside [0, 1), an unknown solver, K too large for the exact one, shapes that do not fit; on
            a CPU also values out of range, which elsewhere would cost a synchronisation per call.
    """
    _check_threshold(threshold)
    _check_shapes(expert_ids, expert_weights, expert_to_rank, source_rank)
    _check_solver(solver, expert_ids.shape[1])
    if threshold == 0 or topology.num_ranks == 1:
        return expert_ids >= 0
    weight_TK = expert_weights.detach().float()
    expert_to_rank, source_rank = expert_to_rank.long(), source_rank.long()
    # a token with a score keeps one: at least one unit, however near to 1 the threshold is
    needed = max(math.ceil((1 - threshold - SHARE_TOLERANCE) * _ONE), 1)
    # where nodes cost no more, sharing the way to one saves nothing
    ranks_per_node = topology.ranks_per_node if hierarchical and topology.inter_node_cost > 1 else 0
    order_RR, cost_R = _cost_tables(topology, expert_ids.device)
    if _runs_compiled(expert_ids):
        from cap_hf._pruning_loops import keep_devices  # compiled code loads lazily

        keep_TK = torch.empty(expert_ids.shape, dtype=torch.bool)
        given = (expert_ids.long(), weight_TK, expert_to_rank, source_rank, order_RR, cost_R)
        options = (ranks_per_node, needed, _ONE, _TOLERANCE, _COST_TOLERANCE, solver == "exact")
        wrong = keep_devices(*(each.contiguous().numpy() for each in given), *options, keep_TK.numpy())
        if wrong >= 0:
            raise ValueError(_out_of_range(wrong, expert_ids, expert_to_rank, source_rank, topology))
        return keep_TK
    # without its weight, a pruned slot does no harm at the rank of expert 0
    is_real_TK = expert_ids >= 0
    share_TK, is_scored_T1 = _shares(torch.where(is_real_TK, weight_TK, 0))
    pair_TK = source_rank[:, None] * topology.num_ranks + expert_to_rank[expert_ids.clamp(min=0).long()]
    stops = _stops(order_RR.take(pair_TK), share_TK, cost_R, ranks_per_node)
    if solver == "exact":
        keep_TD = _exact_in_chunks(stops, needed)
    else:
        keep_TD = _greedy_by_node(stops, needed) if ranks_per_node else _greedy(stops, needed)
    return (keep_TD.gather(1, stops.stop_TK) | ~is_scored_T1) & is_real_TK


def _runs_compiled(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


@lru_cache(maxsize=32)
def _cost_tables(topology: Topology, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Place of rank j seen from rank i, by cost, then rank: (R, R) int32, 0 for i itself; and cost by place, (R,) float32.

    Nodes are equally large, so cost by place is the same from every rank.
    """
    cost_RR = torch.tensor(topology.cost_matrix)
    places_RR = cost_RR.argsort(dim=1, stable=True)
    return places_RR.argsort(dim=1).to(device, torch.int32), cost_RR[0].sort().values.to(device, torch.float32)


def _shares(weight_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares in units of 1 / _ONE, (T, K) int32, and which tokens have any, (T, 1) bool; the others' shares are 0."""
    total_T1 = weight_TK.sum(dim=1, keepdim=True)
    is_scored_T1 = (total_T1 > 0) & total_T1.isfinite()
    share_TK = torch.where(is_scored_T1, weight_TK / total_T1, 0)
    return (share_TK * _ONE).round().to(torch.int32), is_scored_T1


@dataclass(frozen=True)
class _Stops:
    """Distinct ranks of each token, by cost, then rank; D = K, the entries beyond a token's last rank cost and weigh 0."""

    stop_TK: torch.Tensor
    """Stop of each slot, int64."""
    share_TD: torch.Tensor
    """Share of each rank, int32."""
    cost_TD: torch.Tensor
    """Cost of each rank, float32; 0 for the own one."""
    node_TD: torch.Tensor | None
    """Node of each rank, counted from the own one; None where the way to a node is not shared."""

    def split(self, size: int) -> list[_Stops]:
        """``size`` tokens at a time."""
        nodes = [None] * max(-(-len(self.stop_TK) // size), 1) if self.node_TD is None else self.node_TD.split(size)
        parts = (each.split(size) for each in (self.stop_TK, self.share_TD, self.cost_TD))
        return [_Stops(*part) for part in zip(*parts, nodes, strict=True)]


def _stops(order_TK: torch.Tensor, share_TK: torch.Tensor, cost_R: torch.Tensor, ranks_per_node: int) -> _Stops:
    """Sum slots into ranks: ``order_TK`` is the place of each slot's rank by cost, then rank; ``cost_R`` the cost by place."""
    sorted_TK, slot_TK = order_TK.sort(dim=1)
    sorted_stop_TK = torch.zeros_like(slot_TK)
    sorted_stop_TK[:, 1:] = (sorted_TK[:, 1:] != sorted_TK[:, :-1]).cumsum(dim=1)
    stop_TK = torch.empty_like(slot_TK).scatter_(1, slot_TK, sorted_stop_TK)
    share_TD = torch.zeros_like(share_TK).scatter_add_(1, stop_TK, share_TK)
    cost_TD = cost_R.new_zeros(order_TK.shape).scatter_(1, sorted_stop_TK, cost_R[sorted_TK])
    node_TD = None
    if ranks_per_node:  # by cost, the own node's ranks come first, then node by node
        node_TD = torch.zeros_like(order_TK).scatter_(1, sorted_stop_TK, sorted_TK // ranks_per_node)
    return _Stops(stop_TK, share_TD, cost_TD, node_TD)


def _ratios(share_TD: torch.Tensor, cost_TD: torch.Tensor) -> torch.Tensor:
    """Share per cost, int32; larger than any other where the cost is 0."""
    return torch.where(cost_TD == 0, torch.iinfo(torch.int32).max, (share_TD / cost_TD.clamp(min=1)).to(torch.int32))


def _greedy(stops: _Stops, needed: int) -> torch.Tensor:
    """Keep ranks by share per cost until ``needed`` is reached, (T, D) bool."""
    num_stops = stops.share_TD.shape[1]
    # first by ratio, then by (group of tied ratios, stop): stops are in the order that settles ties
    sorted_TD, key_TD = _ratios(stops.share_TD, stops.cost_TD).sort(dim=1, descending=True)
    is_gap_TD = sorted_TD[:, :-1] - sorted_TD[:, 1:] > _TOLERANCE
    key_TD[:, 1:] += num_stops * is_gap_TD.cumsum(dim=1)
    stop_TD = key_TD.sort(dim=1).values % num_stops
    share_TD = stops.share_TD.gather(1, stop_TD)
    ahead_TD = share_TD.cumsum(dim=1) - share_TD
    return torch.empty_like(stop_TD, dtype=torch.bool).scatter_(1, stop_TD, ahead_TD < needed)


def _greedy_by_node(stops: _Stops, needed: int) -> torch.Tensor:
    """As ``_greedy``, one rank at a time: once it is kept, the others of its node cost at most 1."""
    assert stops.node_TD is not None
    share_TD, cost_TD, node_TD = stops.share_TD, stops.cost_TD, stops.node_TD
    keep_TD, number_D = cost_TD == 0, torch.arange(share_TD.shape[1], device=share_TD.device)
    for _ in number_D:
        is_short_T1 = torch.where(keep_TD, share_TD, 0).sum(dim=1, keepdim=True) < needed
        ratio_TD = torch.where(keep_TD, -2 * _TOLERANCE, _ratios(share_TD, cost_TD))
        sorted_TD = ratio_TD.sort(dim=1, descending=True).values
        is_gap_TD = torch.zeros_like(keep_TD)
        is_gap_TD[:, 1:] = sorted_TD[:, :-1] - sorted_TD[:, 1:] > _TOLERANCE
        low_T1 = torch.where(is_gap_TD.cumsum(dim=1) == 0, sorted_TD, sorted_TD[:, :1]).amin(dim=1, keepdim=True)
        tied_cost_TD = torch.where(~keep_TD & (ratio_TD >= low_T1), cost_TD, math.inf)
        is_cheapest_TD = tied_cost_TD == tied_cost_TD.amin(dim=1, keepdim=True)
        first_T1 = torch.where(is_cheapest_TD, number_D, len(number_D)).amin(dim=1, keepdim=True)
        is_next_TD = (number_D == first_T1) & is_short_T1
        is_paid_TD = (node_TD == node_TD.gather(1, first_T1)) & is_short_T1
        keep_TD, cost_TD = keep_TD | is_next_TD, torch.where(is_paid_TD, cost_TD.clamp(max=1), cost_TD)
    return keep_TD


def _exact_in_chunks(stops: _Stops, needed: int) -> torch.Tensor:
    """``_exact`` over as many tokens at a time as fit into _CHUNK_BYTES, (T, D) bool."""
    size = max(_CHUNK_BYTES // (_BYTES_PER_SUBSET << stops.share_TD.shape[1]), 1)
    return torch.cat([_exact(chunk, needed) for chunk in stops.split(size)])


def _exact(stops: _Stops, needed: int) -> torch.Tensor:
    """Cheapest set of ranks with a share of ``needed`` or more, (T, D) bool, by trying every subset."""
    share_ST, cost_ST = _subset_sums(stops.share_TD), _subset_costs(stops)
    cost_ST = torch.where(share_ST >= needed, cost_ST, math.inf)
    is_cheapest_ST = cost_ST <= cost_ST.amin(dim=0) * (1 + _COST_TOLERANCE)
    share_ST = torch.where(is_cheapest_ST, share_ST, -_ONE)
    # the first of equals, as argmax would say at ten times the price
    subset_S1 = torch.arange(len(share_ST), device=share_ST.device, dtype=torch.int32)[:, None]
    best_T = torch.where(share_ST >= share_ST.amax(dim=0) - _TOLERANCE, subset_S1, len(share_ST)).amin(dim=0)
    is_chosen_TD = (best_T[:, None] >> torch.arange(stops.share_TD.shape[1], device=best_T.device)) & 1 == 1
    return is_chosen_TD | (stops.cost_TD == 0)


def _subset_sums(value_TD: torch.Tensor) -> torch.Tensor:
    """Sums over all subsets of D values, (S, T) with S = 2**D; subset s holds value d if bit d of s is set."""
    num_tokens, num_values = value_TD.shape
    sums_ST = value_TD.new_zeros(1 << num_values, num_tokens)
    for d in range(num_values):
        torch.add(sums_ST[: 1 << d], value_TD[:, d], out=sums_ST[1 << d : 2 << d])
    return sums_ST


def _subset_costs(stops: _Stops) -> torch.Tensor:
    """Cost of all subsets of D stops, (S, T); with nodes, one that holds a lower stop of the same node adds at most 1."""
    cost_TD, node_TD = stops.cost_TD, stops.node_TD
    if node_TD is None:
        return _subset_sums(cost_TD)
    num_tokens, num_stops = cost_TD.shape
    costs_ST = cost_TD.new_zeros(1 << num_stops, num_tokens)
    subset_S1 = torch.arange(len(costs_ST), device=cost_TD.device)[:, None]
    for d in range(num_stops):
        near_T = ((node_TD[:, :d] == node_TD[:, d : d + 1]) << torch.arange(d, device=cost_TD.device)).sum(dim=1)
        added_ST = torch.where(subset_S1[: 1 << d] & near_T > 0, cost_TD[:, d].clamp(max=1), cost_TD[:, d])
        torch.add(costs_ST[: 1 << d], added_ST, out=costs_ST[1 << d : 2 << d])
    return costs_ST


def _out_of_range(token: int, expert_ids: torch.Tensor, expert_to_rank: torch.Tensor, source_rank: torch.Tensor, topology: Topology) -> str:
    """What is wrong with a token that the compiled loop stopped at."""
    source, highest = int(source_rank[token]), int(expert_ids[token].max())
    if not 0 <= source < topology.num_ranks:
        return f"source_rank of token {token} is {source}; it must be in [0, {topology.num_ranks})"
    if highest >= len(expert_to_rank):
        return f"expert_ids of token {token} hold {highest}; they must be below {len(expert_to_rank)}, the length of expert_to_rank"
    ranks = expert_to_rank.tolist()
    wrong = next(rank for rank in ranks if not 0 <= rank < topology.num_ranks)
    return f"expert_to_rank of expert {ranks.index(wrong)} is {wrong}; it must be in [0, {topology.num_ranks})"


def _check_threshold(threshold: float) -> None:
    if math.isnan(threshold) or not 0 <= threshold < 1:
        raise ValueError(f"threshold is {threshold}; it must be in [0, 1): 0 prunes nothing, 1 would drop every expert")


def _check_shapes(expert_ids: torch.Tensor, expert_weights: torch.Tensor, expert_to_rank: torch.Tensor, source_rank: torch.Tensor) -> None:
    ids, weights, ranks, sources = expert_ids.shape, expert_weights.shape, expert_to_rank.shape, source_rank.shape
    if len(ids) != 2:
        raise ValueError(f"expert_ids has shape {tuple(ids)}; it must be (tokens, experts per token)")
    if weights != ids:
        raise ValueError(f"expert_weights has shape {tuple(weights)}; it must equal that of expert_ids, {tuple(ids)}")
    if len(ranks) != 1:
        raise ValueError(f"expert_to_rank has shape {tuple(ranks)}; it must be (experts,): pass one layer of the layout")
    if sources != ids[:1]:
        raise ValueError(f"source_rank has shape {tuple(sources)}; it must hold the rank of each token, {tuple(ids[:1])}")


def _check_solver(solver: str, top_k: int) -> None:
    if solver not in ("greedy", "exact"):
        raise ValueError(f"unknown solver {solver!r}; choose one of greedy, exact")
    if solver == "exact" and top_k > MAX_EXACT_TOP_K:
        raise ValueError(f"{top_k} experts per token; the exact solver tries 2**K sets, K at most {MAX_EXACT_TOP_K}: use 'greedy'")
