"""Which of a token's experts, or whole destination ranks, matter too little to pay for.

Letters: ``T`` tokens, ``K`` experts per token, ``E`` experts per layer, ``R`` ranks, ``N`` nodes, ``S`` subsets of a token's
slots. Shapes are suffixes: ``share_TK``.

A share is a gate score over the token's own sum, so raw scores that do not sum to 1 mean the same as normalised ones.
Shares are 30-bit integers: their sums are exact in any order, so two slots of one rank can never be judged differently,
on any device. Rules: method section 3. The work of a token depends on ``K`` only, not on ``R`` or ``E``.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from cap_hf.topology import Topology

__all__ = ["MAX_EXACT_TOP_K", "SHARE_TOLERANCE", "prune_devices", "prune_experts"]

MAX_EXACT_TOP_K = 12
"""Largest K of the exact solver: it tries 2**K subsets per token."""

SHARE_TOLERANCE = 1e-6
"""Shares and share-per-cost ratios nearer than this are equal; above the rounding of float32, below any useful threshold."""

_ONE = 1 << 30  # a share of 1
_COST_TOLERANCE = 1e-5  # relative; costs are float32 sums of at most MAX_EXACT_TOP_K terms
_CHUNK_BYTES = 64 << 20  # memory of the exact solver
_BYTES_PER_SUBSET = 20  # of one token: two sums, their masked copies, two masks


def prune_experts(expert_weights: torch.Tensor, threshold: float) -> torch.Tensor:
    """Drop each token's lowest-scored experts while their summed share stays below ``threshold``.

    Reaching ``threshold`` (within 1e-6) is not below it. The best expert always stays; of equal scores the earlier slot
    stays longer. A token whose scores do not sum to a positive finite number keeps everything.

    Args:
        expert_weights: (T, K) non-negative gate scores of any floating type and scale.
        threshold: p in [0, 1); 0 keeps everything.

    Returns:
        (T, K) bool, True where the expert stays.

    Raises:
        ValueError: a threshold outside [0, 1) or scores that are not (T, K).
    """
    _check_threshold(threshold)
    _check_pairs("expert_weights", expert_weights)
    if threshold == 0:
        return torch.ones_like(expert_weights, dtype=torch.bool)
    share_TK, is_scored_T1 = _shares(expert_weights.detach().float())
    # best first; unstable sorts would let equal scores change places
    order_TK = torch.sort(expert_weights.detach().float(), dim=1, descending=True, stable=True).indices
    sorted_TK = share_TK.gather(1, order_TK)
    before_TK = sorted_TK.cumsum(1) - sorted_TK
    tail_TK = sorted_TK.sum(1, keepdim=True) - before_TK  # what is dropped if this slot is the best one to go
    stays_TK = tail_TK >= math.ceil((threshold - SHARE_TOLERANCE) * _ONE)
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
) -> torch.Tensor:
    """Drop whole ranks of each token so that the rest, with a share of at least ``1 - threshold``, costs little to reach.

    The token's own rank costs nothing and always stays. "greedy" adds ranks by falling share per cost until the kept share
    reaches ``1 - threshold``; ratios within 1e-6 (also through others in between) are ties, which go to the cheaper, then
    the lower rank. "exact" finds the cheapest set; equal costs go to the larger kept share, then to the earlier slots.
    Both compare shares within 1e-6 and never drop all of a token's score. A token whose scores do not sum to a positive
    finite number keeps everything.

    Args:
        expert_ids: (T, K) integers in [0, E), or -1 for a slot that is pruned already: it counts nothing and stays out.
        expert_weights: (T, K) non-negative gate scores of any floating type and scale.
        expert_to_rank: (E,) integers in [0, R).
        source_rank: (T,) integers in [0, R), the rank that holds the token.
        topology: gives the cost of a row from the token's rank to every other.
        threshold: p in [0, 1); 0 keeps everything.
        solver: "greedy" or "exact" (K at most 12).

    Returns:
        (T, K) bool, True where the expert stays; all slots of a rank agree.

    Raises:
        ValueError: a threshold outside [0, 1), an unknown solver, K too large for the exact one, or shapes that do not fit.
    """
    _check_threshold(threshold)
    _check_devices(expert_ids, expert_weights, source_rank, solver)
    is_real_TK = expert_ids >= 0
    if threshold == 0 or topology.num_ranks == 1:
        return is_real_TK
    # without a pruned slot's weight, the rank that its clamped id points to is harmless
    weight_TK = torch.where(is_real_TK, expert_weights.detach().float(), 0)
    share_TK, is_scored_T1 = _shares(weight_TK)
    cost_RR, order_RR = _cost_tables(topology, expert_ids.device)
    pair_TK = source_rank[:, None] * topology.num_ranks + expert_to_rank[expert_ids.clamp(min=0)]
    order_TK, cost_TK = order_RR.take(pair_TK.long()), cost_RR.take(pair_TK.long())
    # a token with a score keeps one: at least one unit, however near to 1 the threshold is
    needed = max(math.ceil((1 - threshold - SHARE_TOLERANCE) * _ONE), 1)
    if solver == "greedy":
        keep_TK = _greedy(share_TK, order_TK, cost_TK, topology.num_ranks, needed)
    else:
        keep_TK = _exact_in_chunks(share_TK, order_TK, cost_TK, needed)
    return (keep_TK | ~is_scored_T1) & is_real_TK


@lru_cache(maxsize=32)
def _cost_tables(topology: Topology, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """From rank i to rank j, (R, R): the cost, float32, and j's place by cost, then rank, int32: 0 for i itself."""
    cost_RR = torch.from_numpy(topology.cost_matrix)
    order_RR = cost_RR.argsort(dim=1, stable=True).argsort(dim=1)
    return cost_RR.to(device, torch.float32), order_RR.to(device, torch.int32)


def _shares(weight_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares in units of 1 / _ONE, (T, K) int32, and which tokens have any, (T, 1) bool; the others' shares are 0."""
    total_T1 = weight_TK.sum(dim=1, keepdim=True)
    is_scored_T1 = (total_T1 > 0) & total_T1.isfinite()
    share_TK = torch.where(is_scored_T1, weight_TK / total_T1, 0)
    return (share_TK * _ONE).round().to(torch.int32), is_scored_T1


def _rank_shares(share_TK: torch.Tensor, order_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which slots i, j share a rank, (K, K, T) bool, and the share of each slot's rank, (K, T) int32."""
    order_KT, share_KT = order_TK.T.contiguous(), share_TK.T.contiguous()  # tokens last: long contiguous rows
    same_KKT = order_KT[:, None] == order_KT[None]
    return same_KKT, torch.where(same_KKT, share_KT[:, None], 0).sum(dim=0, dtype=torch.int32)


def _greedy(share_TK: torch.Tensor, order_TK: torch.Tensor, cost_TK: torch.Tensor, num_ranks: int, needed: int) -> torch.Tensor:
    """Keep ranks by share per cost until ``needed`` is reached, (T, K) bool."""
    rank_share_TK = _rank_shares(share_TK, order_TK)[1].T
    ratio_TK = torch.where(order_TK == 0, torch.iinfo(torch.int32).max, (rank_share_TK / cost_TK.clamp(min=1)).to(torch.int32))
    # first by ratio, then by (group of tied ratios, cost, rank); slots of one rank stay side by side
    sorted_TK, by_ratio_TK = ratio_TK.sort(dim=1, descending=True)
    is_gap_TK = sorted_TK[:, :-1] - sorted_TK[:, 1:] > int(SHARE_TOLERANCE * _ONE)
    key_TK = order_TK.gather(1, by_ratio_TK)
    key_TK[:, 1:] += num_ranks * is_gap_TK.cumsum(dim=1, dtype=torch.int32)
    key_TK, by_key_TK = key_TK.sort(dim=1)
    slot_TK = by_ratio_TK.gather(1, by_key_TK)
    rank_share_TK = rank_share_TK.gather(1, slot_TK)
    counted_TK = rank_share_TK.clone()
    counted_TK[:, 1:] *= key_TK[:, 1:] != key_TK[:, :-1]  # a rank counts once, at its first slot
    before_TK = counted_TK.cumsum(dim=1) - rank_share_TK  # share of the ranks ahead, the same for all slots of a rank
    return torch.zeros_like(is_first := before_TK < needed).scatter(1, slot_TK, is_first)


def _exact_in_chunks(share_TK: torch.Tensor, order_TK: torch.Tensor, cost_TK: torch.Tensor, needed: int) -> torch.Tensor:
    """``_exact`` over as many tokens at a time as fit into _CHUNK_BYTES."""
    size = max(_CHUNK_BYTES // (_BYTES_PER_SUBSET << share_TK.shape[1]), 1)
    chunks = zip(share_TK.split(size), order_TK.split(size), cost_TK.split(size), strict=True)
    return torch.cat([_exact(*chunk, needed) for chunk in chunks])


def _exact(share_TK: torch.Tensor, order_TK: torch.Tensor, cost_TK: torch.Tensor, needed: int) -> torch.Tensor:
    """Cheapest set of ranks whose share is ``needed`` or more, (T, K) bool, by trying every subset."""
    top_k, device = share_TK.shape[1], share_TK.device
    same_KKT, rank_share_KT = _rank_shares(share_TK, order_TK)
    is_own_KT = order_TK.T == 0
    is_earlier_KK1 = torch.ones(top_k, top_k, dtype=torch.bool, device=device).triu(1)[:, :, None]
    # a remote rank is one item, at its first slot; other slots are items that cost and weigh nothing
    is_item_KT = ~is_own_KT & ~(same_KKT & is_earlier_KK1).any(dim=0)
    own_T = torch.where(is_own_KT, share_TK.T, 0).sum(dim=0, dtype=torch.int32)
    share_ST = own_T + _subset_sums(torch.where(is_item_KT, rank_share_KT, 0))
    cost_ST = torch.where(share_ST >= needed, _subset_sums(torch.where(is_item_KT, cost_TK.T, 0)), math.inf)
    is_cheapest_ST = cost_ST <= cost_ST.amin(dim=0) * (1 + _COST_TOLERANCE)
    best_T = torch.where(is_cheapest_ST, share_ST, -1).argmax(dim=0)  # the first of equals
    bits_KT = (best_T >> torch.arange(top_k, device=device)[:, None]) & 1
    chosen_KT = (bits_KT == 1) & is_item_KT
    return (is_own_KT | (same_KKT & chosen_KT[:, None]).any(dim=0)).T


def _subset_sums(value_KT: torch.Tensor) -> torch.Tensor:
    """Sums over all subsets of K values, (S, T) with S = 2**K; subset s holds value k if bit k of s is set."""
    sums_ST = torch.zeros_like(value_KT[:1])
    for value_T in value_KT:
        sums_ST = torch.cat([sums_ST, sums_ST + value_T])
    return sums_ST


def _check_threshold(threshold: float) -> None:
    if math.isnan(threshold) or not 0 <= threshold < 1:
        raise ValueError(f"threshold is {threshold}; it must be in [0, 1): 0 prunes nothing, 1 would drop every expert")


def _check_pairs(name: str, values: torch.Tensor) -> None:
    if values.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(values.shape)}; it must be (tokens, experts per token)")


def _check_devices(expert_ids: torch.Tensor, expert_weights: torch.Tensor, source_rank: torch.Tensor, solver: str) -> None:
    _check_pairs("expert_ids", expert_ids)
    if expert_weights.shape != expert_ids.shape:
        raise ValueError(f"expert_weights has shape {tuple(expert_weights.shape)}; it must equal that of expert_ids, {tuple(expert_ids.shape)}")
    if source_rank.shape != expert_ids.shape[:1]:
        raise ValueError(f"source_rank has shape {tuple(source_rank.shape)}; it must hold one rank for each of {len(expert_ids)} tokens")
    if solver not in ("greedy", "exact"):
        raise ValueError(f"unknown solver {solver!r}; choose one of greedy, exact")
    top_k = expert_ids.shape[1]
    if solver == "exact" and top_k > MAX_EXACT_TOP_K:
        raise ValueError(f"{top_k} experts per token; the exact solver takes at most {MAX_EXACT_TOP_K} (2**K subsets): use solver='greedy'")
