"""Compiled search over swaps of two experts of one layer, on the exact number of places that tokens visit.

A *place* is a rank or a node; one ``Visits`` per kind. The state keeps, for every swap, what the change of visits is made
of, so that a proposal costs a handful of look-ups and only a swap that is made costs time in the tokens it touches:

    enter[i, q]  visits added if expert i entered place q      tokens of i that do not visit q yet
    leave[i]     visits saved if i left its place              tokens of i that go there for i alone
    alone[i, j]  of these, the tokens that hold j too

    change of a swap of i (on p) and j (on q) = enter[i, q] + enter[j, p] - leave[i] - leave[j] + alone[i, j] + alone[j, i]

since a token with both visits what it did before. All are integers in units of 1 / ``unit`` visit: sums of any length stay exact.

Letters: ``E`` experts, ``K`` experts per token, ``T`` tokens, ``P`` places, ``W`` stretches of tokens that loads are counted in.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

__all__ = [
    "State",
    "Tokens",
    "Visits",
    "anneal",
    "count_pairs",
    "count_visits",
    "descend",
    "full_change",
    "make_swap",
    "state_of",
    "total_cost",
]

compiled = njit(cache=True, nogil=True)


class Tokens(NamedTuple):
    """One layer's routing, by token and by expert."""

    ids: np.ndarray
    """(T, K) int16, -1 = pruned."""
    first: np.ndarray
    """(E + 1,) where each expert's tokens begin in ``of_expert``."""
    of_expert: np.ndarray
    """(pairs,) int64 tokens of expert 0, of expert 1, ..."""
    touched: np.ndarray
    """(T,) uint8 scratch, zero between calls."""


class Visits(NamedTuple):
    """Visits to one kind of place, and what swaps change (see the module)."""

    place: np.ndarray
    """(E,) int64 place of each expert."""
    visited: np.ndarray
    """(T, P) uint8 experts that each token has on each place."""
    enter: np.ndarray
    """(E, P) int64."""
    leave: np.ndarray
    """(E,) int64."""
    alone: np.ndarray
    """(E, E) int64."""
    attraction: np.ndarray
    """(E, E) int64, symmetric, zero diagonal: what a pair earns by sharing a place."""
    unit: int
    """What a visit costs."""


class State(NamedTuple):
    """A placement of one layer and all that its swaps are judged by."""

    tokens: Tokens
    ranks: Visits
    nodes: Visits
    loads: np.ndarray
    """(E, W) float64 tokens of each expert, in each of W equal stretches of the tokens."""
    rank_loads: np.ndarray
    """(R, W) float64 tokens of each rank's experts."""
    mean_load: float
    load_weight: float
    """What the square of a rank's relative excess load in a stretch costs."""


@compiled
def index_tokens(ids: np.ndarray, num_experts: int) -> Tokens:
    """``Tokens`` of ids (T, K)."""
    first = np.zeros(num_experts + 1, np.int64)
    for token in range(len(ids)):
        for expert in ids[token]:
            if expert >= 0:
                first[expert + 1] += 1
    for expert in range(num_experts):
        first[expert + 1] += first[expert]
    end = first[:-1].copy()
    of_expert = np.empty(first[-1], np.int64)
    for token in range(len(ids)):
        for expert in ids[token]:
            if expert >= 0:
                of_expert[end[expert]] = token
                end[expert] += 1
    return Tokens(ids, first, of_expert, np.zeros(len(ids), np.uint8))


@compiled
def count_pairs(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Tokens that hold both experts, (E, E) int64; the diagonal holds the loads."""
    counts = np.zeros((num_experts, num_experts), np.int64)
    for token in range(len(ids)):
        for expert in ids[token]:
            if expert >= 0:
                for other in ids[token]:
                    if other >= 0:
                        counts[expert, other] += 1
    return counts


@compiled
def count_visits(ids: np.ndarray, place: np.ndarray, num_places: int) -> int:
    """Different places that the experts of each token are on, summed over tokens."""
    seen = np.zeros(num_places, np.int64)  # number of the last token that went there, from 1
    visits = 0
    for token in range(len(ids)):
        for expert in ids[token]:
            if expert >= 0 and seen[place[expert]] != token + 1:
                seen[place[expert]] = token + 1
                visits += 1
    return visits


@compiled
def visits_of(tokens: Tokens, place: np.ndarray, num_places: int, unit: int, attraction: np.ndarray) -> Visits:
    """``Visits`` of a placement, ``place`` (E,)."""
    ids = tokens.ids
    num_experts = len(place)
    count = np.zeros((len(ids), num_places), np.uint8)
    enter = np.zeros((num_experts, num_places), np.int64)
    leave = np.zeros(num_experts, np.int64)
    alone = attraction.copy()
    for expert in range(num_experts):
        for other in range(num_experts):
            enter[expert, place[other]] -= attraction[expert, other]
    for expert in range(num_experts):
        leave[expert] = enter[expert, place[expert]]
    for token in range(len(ids)):
        for expert in ids[token]:
            if expert >= 0:
                count[token, place[expert]] += 1
        for expert in ids[token]:
            if expert < 0:
                continue
            for other in range(num_places):
                if count[token, other] == 0:
                    enter[expert, other] += unit
            if count[token, place[expert]] == 1:
                leave[expert] += unit
                for other in ids[token]:
                    if other >= 0:
                        alone[expert, other] += unit
    return Visits(place, count, enter, leave, alone, attraction, unit)


@compiled
def swap_change(visits: Visits, i: int, j: int) -> int:
    """What swapping experts i and j of different places adds to the cost."""
    p, q = visits.place[i], visits.place[j]
    return visits.enter[i, q] + visits.enter[j, p] - visits.leave[i] - visits.leave[j] + visits.alone[i, j] + visits.alone[j, i]


@compiled
def set_alone(visits: Visits, row: np.ndarray, expert: int | np.int64, by: int) -> None:
    """Expert is (by = unit) or is no longer (by = -unit) the only one of the token ``row`` on its place."""
    visits.leave[expert] += by
    for other in row:
        if other >= 0:
            visits.alone[expert, other] += by


@compiled
def move_token(visits: Visits, row: np.ndarray, count: np.ndarray, expert: int, p: int, q: int) -> None:
    """Account for one token, ids ``row`` (K,), when its expert goes from place p to q."""
    unit = visits.unit
    here, there = count[p], count[q]
    if here == 1:  # the token does not come to p any more
        for member in row:
            if member >= 0:
                visits.enter[member, p] += unit
        if there > 0:
            set_alone(visits, row, expert, -unit)
    elif here == 2:  # one is left on p
        for member in row:
            if member >= 0 and member != expert and visits.place[member] == p:
                set_alone(visits, row, np.int64(member), unit)
    if there == 0:
        for member in row:
            if member >= 0:
                visits.enter[member, q] -= unit
        if here > 1:
            set_alone(visits, row, expert, unit)
    elif there == 1:
        for member in row:
            if member >= 0 and visits.place[member] == q:
                set_alone(visits, row, np.int64(member), -unit)
    count[p] = here - 1
    count[q] = there + 1


@compiled
def swap_experts(visits: Visits, tokens: Tokens, i: int, j: int) -> None:
    """Swap experts i and j of different places, in place."""
    ids, first, of_expert, touched = tokens
    p, q = visits.place[i], visits.place[j]
    mine, theirs = of_expert[first[i] : first[i + 1]], of_expert[first[j] : first[j + 1]]
    for token in theirs:
        touched[token] = 1
    for token in mine:
        if touched[token] == 0:
            move_token(visits, ids[token], visits.visited[token], i, p, q)
        else:  # holds both: counts stay, but each is now alone where the other was
            touched[token] = 2
            before = visits.visited[token, p] == 1
            after = visits.visited[token, q] == 1
            if before != after:
                by = visits.unit if after else -visits.unit
                set_alone(visits, ids[token], i, by)
                set_alone(visits, ids[token], j, -by)
    for token in theirs:
        if touched[token] == 1:
            move_token(visits, ids[token], visits.visited[token], j, q, p)
        touched[token] = 0
    swap_attraction(visits, i, j)
    visits.place[i], visits.place[j] = q, p


@compiled
def swap_attraction(visits: Visits, i: int, j: int) -> None:
    """What the pairs add to ``enter`` and ``leave`` when i and j swap; their places still stand as they were."""
    place, attraction = visits.place, visits.attraction
    p, q = place[i], place[j]
    for expert in range(len(place)):
        gained = attraction[expert, i] - attraction[expert, j]  # place q gains i for j, place p the reverse
        visits.enter[expert, q] -= gained
        visits.enter[expert, p] += gained
        if expert in (i, j):
            continue
        if place[expert] == p:
            visits.leave[expert] += gained
            visits.leave[i] += attraction[i, expert]
            visits.leave[j] -= attraction[j, expert]
        elif place[expert] == q:
            visits.leave[expert] -= gained
            visits.leave[i] -= attraction[i, expert]
            visits.leave[j] += attraction[j, expert]


@compiled
def state_of(
    ids: np.ndarray,
    expert_to_rank: np.ndarray,
    expert_to_node: np.ndarray,
    num_places: tuple[int, int],
    units: tuple[int, int],
    attraction: np.ndarray,
    load_weight: float,
    num_stretches: int,
) -> State:
    """``State`` of a placement for ids (T, K); ``num_places`` and ``units``, the costs of a visit, are of ranks and of nodes."""
    num_experts, num_ranks = len(expert_to_rank), num_places[0]
    tokens = index_tokens(ids, num_experts)
    ranks = visits_of(tokens, expert_to_rank, num_ranks, units[0], attraction)
    nodes = visits_of(tokens, expert_to_node, num_places[1], units[1], np.zeros_like(attraction))
    loads, rank_loads = np.zeros((num_experts, num_stretches)), np.zeros((num_ranks, num_stretches))
    total = 0
    for token in range(len(ids)):
        stretch = token * num_stretches // len(ids)
        for expert in ids[token]:
            if expert >= 0:
                loads[expert, stretch] += 1.0
                rank_loads[expert_to_rank[expert], stretch] += 1.0
                total += 1
    return State(tokens, ranks, nodes, loads, rank_loads, max(total, 1) / (num_ranks * num_stretches), load_weight / num_stretches)


@compiled
def excess(state: State, load: float) -> float:
    """Penalty of one rank's load: the square of its relative excess over the mean, weighted."""
    over = load / state.mean_load - 1.0
    return state.load_weight * over * over if over > 0.0 else 0.0


@compiled
def total_cost(state: State) -> float:
    """Visits to ranks and to nodes, in units, less what attracted pairs earn, plus the penalty of the loads."""
    cost = 0.0
    for visits in (state.ranks, state.nodes):
        cost += float(visits.unit * count_visits(state.tokens.ids, visits.place, visits.visited.shape[1]))
    place, attraction = state.ranks.place, state.ranks.attraction
    for expert in range(len(place)):
        for other in range(expert):
            if place[expert] == place[other]:
                cost -= attraction[expert, other]
    for rank in range(len(state.rank_loads)):
        for load in state.rank_loads[rank]:
            cost += excess(state, load)
    return cost


@compiled
def full_change(state: State, i: int, j: int) -> float:
    """What swapping i and j of different ranks adds to ``total_cost``."""
    ranks, nodes = state.ranks, state.nodes
    change = float(swap_change(ranks, i, j))
    if nodes.place[i] != nodes.place[j]:
        change += swap_change(nodes, i, j)
    if state.load_weight > 0.0:
        here, there = state.rank_loads[ranks.place[i]], state.rank_loads[ranks.place[j]]
        for stretch in range(len(here)):
            moved = state.loads[i, stretch] - state.loads[j, stretch]
            change += excess(state, here[stretch] - moved) - excess(state, here[stretch])
            change += excess(state, there[stretch] + moved) - excess(state, there[stretch])
    return change


@compiled
def make_swap(state: State, i: int, j: int) -> None:
    """Swap i and j of different ranks, in place."""
    here, there = state.rank_loads[state.ranks.place[i]], state.rank_loads[state.ranks.place[j]]
    for stretch in range(len(here)):
        moved = state.loads[i, stretch] - state.loads[j, stretch]
        here[stretch] -= moved
        there[stretch] += moved
    swap_experts(state.ranks, state.tokens, i, j)
    if state.nodes.place[i] != state.nodes.place[j]:
        swap_experts(state.nodes, state.tokens, i, j)


@compiled
def anneal(state: State, num_proposals: int, hot: float, cold: float, seed: int) -> int:
    """Simulated annealing over random swaps, in place, from temperature ``hot`` to ``cold``; returns the swaps made."""
    np.random.seed(seed)
    place = state.ranks.place
    cooling = (cold / hot) ** (1.0 / max(1, num_proposals))
    temperature = hot
    made = 0
    for _ in range(num_proposals):
        temperature *= cooling
        i, j = np.random.randint(len(place)), np.random.randint(len(place))
        if place[i] == place[j]:
            continue
        change = full_change(state, i, j)
        if change <= 0.0 or np.random.random() < np.exp(-change / temperature):
            make_swap(state, i, j)
            made += 1
    return made


@compiled
def descend(state: State, slack: float) -> int:
    """Make the best swap while one saves more than ``slack``, in place; returns the swaps made."""
    place = state.ranks.place
    none = len(place)
    made = 0
    while True:
        best, first, second = -slack, none, none
        for i in range(len(place)):
            for j in range(i + 1, len(place)):
                if place[i] != place[j]:
                    change = full_change(state, i, j)
                    if change < best:
                        best, first, second = change, i, j
        if first == none:
            return made
        make_swap(state, first, second)
        made += 1
