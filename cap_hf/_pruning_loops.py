"""The pruning rules as compiled loops over tokens, for CPUs; ``cap_hf.pruning`` states them and has them as tensor operations.

Letters: ``T`` tokens, ``K`` experts per token, ``E`` experts per layer, ``R`` ranks, ``D`` distinct ranks of a token ("stops",
by cost, then rank). Shares are integers in units of 1 / ``one``. Functions are compiled for one set of types each: ids and
ranks int64, scores float32, places int32, costs float32, all contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cap_hf._compiled import compiled

__all__ = ["keep_devices", "keep_experts"]


@compiled
def keep_experts(weight_TK: np.ndarray, least: int, one: int, keep_TK: np.ndarray) -> None:
    """``prune_experts`` into ``keep_TK``: slots stay from where the share of a slot and all worse ones is ``least`` or more."""
    top_k = weight_TK.shape[1]
    slots = np.empty(top_k, np.int64)
    for t in range(len(weight_TK)):
        total = _total(weight_TK[t])
        if not total > 0 or total == np.inf:
            keep_TK[t] = True
            continue
        keep_TK[t] = False
        for k in range(top_k):  # insertion by score; the earlier of equals is the better
            at = k
            while at > 0 and weight_TK[t, slots[at - 1]] < weight_TK[t, k]:
                slots[at] = slots[at - 1]
                at -= 1
            slots[at] = k
        tail = 0
        for at in range(top_k - 1, -1, -1):
            tail += _share(weight_TK[t, slots[at]], total, one)
            keep_TK[t, slots[at]] = tail >= least or at == 0


@compiled
def keep_devices(
    id_TK: np.ndarray,
    weight_TK: np.ndarray,
    rank_E: np.ndarray,
    source_T: np.ndarray,
    place_RR: np.ndarray,
    cost_R: np.ndarray,
    ranks_per_node: int,
    needed: int,
    one: int,
    tolerance: int,
    cost_tolerance: float,
    exact: bool,
    keep_TK: np.ndarray,
) -> int:
    """``prune_devices`` into ``keep_TK``; returns the first token with an id, rank or source out of range, or -1.

    ``ranks_per_node`` is 0 where a rank costs the same whatever else is visited.
    """
    top_k, num_ranks = id_TK.shape[1], len(cost_R)
    stop_K, place_D, share_D, ratio_D = (
        np.empty(top_k, np.int64),
        np.empty(top_k, np.int64),
        np.empty(top_k, np.int64),
        np.empty(top_k, np.int64),
    )
    cost_D, node_D, kept_D = np.empty(top_k, np.float32), np.empty(top_k, np.int64), np.empty(top_k, np.bool_)
    size = 1 << top_k if exact else 0
    share_S, cost_S = np.empty(size, np.int64), np.empty(size, np.float32)
    for t in range(len(id_TK)):
        source = source_T[t]
        if source < 0 or source >= num_ranks:
            return t
        total = np.float32(0)
        num_stops = 0
        for k in range(top_k):
            expert = id_TK[t, k]
            if expert < 0:
                continue
            if expert >= len(rank_E) or rank_E[expert] < 0 or rank_E[expert] >= num_ranks:
                return t
            total += weight_TK[t, k]
            place = place_RR[source, rank_E[expert]]
            stop_K[k] = place
            at = num_stops
            while at > 0 and place_D[at - 1] > place:
                at -= 1
            if at > 0 and place_D[at - 1] == place:
                continue
            for d in range(num_stops, at, -1):
                place_D[d] = place_D[d - 1]
            place_D[at] = place
            num_stops += 1
        if not total > 0 or total == np.inf:
            for k in range(top_k):
                keep_TK[t, k] = id_TK[t, k] >= 0
            continue
        for d in range(num_stops):
            share_D[d], cost_D[d], kept_D[d] = 0, cost_R[place_D[d]], False
            node_D[d] = place_D[d] // ranks_per_node if ranks_per_node else d
        for k in range(top_k):
            if id_TK[t, k] >= 0:
                d = 0
                while place_D[d] != stop_K[k]:
                    d += 1
                stop_K[k] = d
                share_D[d] += _share(weight_TK[t, k], total, one)
        if exact:
            _exact(share_D, cost_D, node_D, num_stops, needed, tolerance, cost_tolerance, share_S, cost_S, kept_D)
        else:
            _greedy(share_D, cost_D, node_D, num_stops, needed, tolerance, ranks_per_node > 0, ratio_D, kept_D)
        for k in range(top_k):
            keep_TK[t, k] = id_TK[t, k] >= 0 and kept_D[stop_K[k]]
    return -1


@compiled
def _total(weight_K: np.ndarray) -> Any:
    total = np.float32(0)
    for weight in weight_K:
        total += weight
    return total


@compiled
def _share(weight: Any, total: Any, one: int) -> Any:
    return np.int64(np.rint(weight / total * np.float32(one)))


@compiled
def _greedy(
    share_D: np.ndarray,
    cost_D: np.ndarray,
    node_D: np.ndarray,
    num_stops: int,
    needed: int,
    tolerance: int,
    by_node: bool,
    ratio_D: np.ndarray,
    kept_D: np.ndarray,
) -> None:
    """Keep stops by share per cost; ratios within ``tolerance`` of the next are tied. Kept ones have a ratio of -1."""
    kept = 0
    for d in range(num_stops):
        ratio_D[d] = -1 if cost_D[d] == 0 else _ratio(share_D[d], cost_D[d])
        kept_D[d] = cost_D[d] == 0
        kept += share_D[d] * kept_D[d]
    while kept < needed:
        low = np.int64(-1)
        for d in range(num_stops):
            low = max(low, ratio_D[d])
        if low < 0:
            return  # all stops are kept
        grows = True
        while grows:  # down the chain of ties
            grows = False
            for d in range(num_stops):
                if max(low - tolerance, 0) <= ratio_D[d] < low:
                    low, grows = ratio_D[d], True
        while kept < needed:
            best = -1
            for d in range(num_stops):
                if ratio_D[d] >= low and (best < 0 or cost_D[d] < cost_D[best]):
                    best = d
            if best < 0:
                break
            kept_D[best], ratio_D[best] = True, -1
            kept += share_D[best]
            if by_node:
                for d in range(num_stops):
                    if node_D[d] == node_D[best] and not kept_D[d]:
                        cost_D[d] = min(cost_D[d], np.float32(1))
                        ratio_D[d] = _ratio(share_D[d], cost_D[d])
                break


@compiled
def _ratio(share: Any, cost: Any) -> Any:
    return np.int64(np.float32(share) / cost)


@compiled
def _exact(
    share_D: np.ndarray,
    cost_D: np.ndarray,
    node_D: np.ndarray,
    num_stops: int,
    needed: int,
    tolerance: int,
    cost_tolerance: float,
    share_S: np.ndarray,
    cost_S: np.ndarray,
    kept_D: np.ndarray,
) -> None:
    """The cheapest subset with ``needed``; of equals the larger share, then the first in binary order."""
    share_S[0], cost_S[0] = 0, 0
    cheapest = np.float32(np.inf)
    for d in range(num_stops):
        near = 0  # lower stops of the same node
        for other in range(d):
            near |= (node_D[other] == node_D[d]) << other
        for s in range(1 << d):
            share_S[s | 1 << d] = share_S[s] + share_D[d]
            cost_S[s | 1 << d] = cost_S[s] + (min(cost_D[d], np.float32(1)) if s & near else cost_D[d])
    for s in range(1 << num_stops):
        if share_S[s] >= needed:
            cheapest = min(cheapest, cost_S[s])
    limit = cheapest * np.float32(1 + cost_tolerance)
    most = np.int64(-1)
    for s in range(1 << num_stops):
        if share_S[s] >= needed and cost_S[s] <= limit:
            most = max(most, share_S[s])
    for s in range(1 << num_stops):
        if share_S[s] >= needed and cost_S[s] <= limit and share_S[s] >= most - tolerance:
            for d in range(num_stops):
                kept_D[d] = s >> d & 1 == 1 or cost_D[d] == 0
            return
