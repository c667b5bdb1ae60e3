"""Compiled search over swaps of two experts of one layer, on the exact number of places that tokens visit.

A *place* is a rank or a node; one ``Visits`` per kind. The state keeps, for every swap, what the change of visits is made
of, so that a proposal costs a handful of look-ups and only a swap that is made costs time in the tokens it touches:

    enter[q, i]  visits added if expert i entered place q      tokens of i that do not visit q yet
    leave[i]     visits saved if i left its place              tokens of i that go there for i alone
    alone[i, j]  of these, the tokens that hold j too

    change of a swap of i (on p) and j (on q) = enter[q, i] + enter[p, j] - leave[i] - leave[j] + alone[i, j] + alone[j, i]

since a token with both visits what it did before. All are integers in units of 1 / ``unit`` visit: sums of any length stay exact.

Inner functions take arrays, not the tuples that hold them: taking a tuple apart costs more than what they do.

Letters: ``E`` experts, ``K`` experts per token, ``T`` tokens, ``P`` places, ``W`` stretches of tokens that loads are counted in.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cap_hf._compiled import compiled

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
]


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
    """(P, E) int64."""
    leave: np.ndarray
    """(E,) int64."""
    alone: np.ndarray
    """(E, E) int64."""
    attraction: np.ndarray
    """(E, E) int64, symmetric, zero diagonal: what a pair earns by sharing a place; (0, 0) for nothing."""
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
def visits_of(ids: np.ndarray, place: np.ndarray, num_places: int, unit: int, attraction: np.ndarray) -> Visits:
    """``Visits`` of a placement, ``place`` (E,)."""
    num_experts = len(place)
    visited = np.zeros((len(ids), num_places), np.uint8)
    enter = np.zeros((num_places, num_experts), np.int64)
    leave = np.zeros(num_experts, np.int64)
    alone = np.zeros((num_experts, num_experts), np.int64)
    for other in range(len(attraction)):
        for expert in range(num_experts):
            enter[place[other], expert] -= attraction[other, expert]
            alone[other, expert] = attraction[other, expert]
    for expert in range(num_experts):
        leave[expert] = enter[place[expert], expert]
    for token in range(len(ids)):
        for expert in ids[token]:
            if expert >= 0:
                visited[token, place[expert]] += 1
        for other in range(num_places):
            if visited[token, other] == 0:
                add_to_members(enter, ids, token, other, unit)
        for expert in ids[token]:
            if expert >= 0 and visited[token, place[expert]] == 1:
                set_alone(alone, leave, ids, token, np.int64(expert), unit)
    return Visits(place, visited, enter, leave, alone, attraction, unit)


@compiled
def add_to_members(enter: np.ndarray, ids: np.ndarray, token: int, other: int, by: int) -> None:
    """Entering place ``other`` costs ``by`` more for every expert of the token."""
    for slot in range(ids.shape[1]):
        if ids[token, slot] >= 0:
            enter[other, ids[token, slot]] += by


@compiled
def set_alone(alone: np.ndarray, leave: np.ndarray, ids: np.ndarray, token: int, expert: int | np.int64, by: int | np.int64) -> None:
    """Expert is (by = unit) or is no longer (by = -unit) the only one of the token on its place."""
    leave[expert] += by
    for slot in range(ids.shape[1]):
        if ids[token, slot] >= 0:
            alone[expert, ids[token, slot]] += by


@compiled
def set_alone_on(
    place: np.ndarray, alone: np.ndarray, leave: np.ndarray, ids: np.ndarray, token: int, where: int, besides: int, by: int
) -> None:
    """``set_alone`` for the token's experts on place ``where``, one of them left out."""
    for slot in range(ids.shape[1]):
        member = np.int64(ids[token, slot])
        if member >= 0 and member != besides and place[member] == where:
            set_alone(alone, leave, ids, token, member, by)


@compiled
def swap_experts(visits: Visits, tokens: Tokens, i: int, j: int) -> None:
    """Swap experts i and j of different places, in place."""
    place, visited, enter, leave, alone, attraction, unit = visits
    ids, first, of_expert, touched = tokens
    for at in range(first[j], first[j + 1]):
        touched[of_expert[at]] = 1
    for at in range(first[i], first[i + 1]):
        token = of_expert[at]
        if touched[token]:  # holds both: visits stay, but each is now alone where the other was
            touched[token] = 0
            change = np.int64(visited[token, place[j]] == 1) - np.int64(visited[token, place[i]] == 1)
            if change != 0:
                set_alone(alone, leave, ids, token, i, change * unit)
                set_alone(alone, leave, ids, token, j, -change * unit)
        else:
            move_token(place, visited, enter, leave, alone, unit, ids, token, i, place[j])
    for at in range(first[j], first[j + 1]):
        token = of_expert[at]
        if touched[token]:
            touched[token] = 0
            move_token(place, visited, enter, leave, alone, unit, ids, token, j, place[i])
    if len(attraction):
        swap_attraction(place, enter, leave, attraction, i, j)
    place[i], place[j] = place[j], place[i]


@compiled
def move_token(
    place: np.ndarray,
    visited: np.ndarray,
    enter: np.ndarray,
    leave: np.ndarray,
    alone: np.ndarray,
    unit: int,
    ids: np.ndarray,
    token: int,
    expert: int,
    q: int,
) -> None:
    """Account for one token when its expert goes to place q."""
    p = place[expert]
    here, there = visited[token, p], visited[token, q]
    if here == 1:  # the token does not come to p any more
        add_to_members(enter, ids, token, p, unit)
        if there > 0:
            set_alone(alone, leave, ids, token, expert, -unit)
    elif here == 2:  # one is left on p
        set_alone_on(place, alone, leave, ids, token, p, expert, unit)
    if there == 0:
        add_to_members(enter, ids, token, q, -unit)
        if here > 1:
            set_alone(alone, leave, ids, token, expert, unit)
    elif there == 1:
        set_alone_on(place, alone, leave, ids, token, q, expert, -unit)
    visited[token, p] = here - 1
    visited[token, q] = there + 1


@compiled
def swap_attraction(place: np.ndarray, enter: np.ndarray, leave: np.ndarray, attraction: np.ndarray, i: int, j: int) -> None:
    """What the pairs add to ``enter`` and ``leave`` when i and j swap; their places still stand as they were."""
    p, q = place[i], place[j]
    for expert in range(len(place)):
        gained = attraction[i, expert] - attraction[j, expert]  # place q gains i for j, place p the reverse
        enter[q, expert] -= gained
        enter[p, expert] += gained
        if expert in (i, j):
            continue
        if place[expert] == p:
            leave[expert] += gained
            leave[i] += attraction[i, expert]
            leave[j] -= attraction[j, expert]
        elif place[expert] == q:
            leave[expert] -= gained
            leave[i] -= attraction[i, expert]
            leave[j] += attraction[j, expert]


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
    ranks = visits_of(ids, expert_to_rank, num_ranks, units[0], attraction)
    nodes = visits_of(ids, expert_to_node, num_places[1], units[1], np.zeros((0, 0), np.int64))
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
def apart_change(place: np.ndarray, enter: np.ndarray, leave: np.ndarray, i: int, j: int) -> int:
    """What swapping i and j would add to the cost if no token held both and they did not attract: never too much."""
    return enter[place[j], i] + enter[place[i], j] - leave[i] - leave[j]


@compiled
def excess(load: float, mean_load: float) -> float:
    """The square of a load's relative excess over the mean."""
    over = load / mean_load - 1.0
    return over * over if over > 0.0 else 0.0


@compiled
def load_change(place: np.ndarray, loads: np.ndarray, rank_loads: np.ndarray, mean_load: float, i: int, j: int) -> float:
    """What swapping i and j adds to the excess, summed over ranks and stretches."""
    p, q = place[i], place[j]
    change = 0.0
    for stretch in range(loads.shape[1]):
        here, there = rank_loads[p, stretch], rank_loads[q, stretch]
        moved = loads[i, stretch] - loads[j, stretch]
        change += excess(here - moved, mean_load) - excess(here, mean_load)
        change += excess(there + moved, mean_load) - excess(there, mean_load)
    return change


@compiled
def change_within(
    place: np.ndarray,
    enter: np.ndarray,
    leave: np.ndarray,
    alone: np.ndarray,
    node: np.ndarray,
    node_enter: np.ndarray,
    node_leave: np.ndarray,
    node_alone: np.ndarray,
    penalty: tuple[np.ndarray, np.ndarray, float, float],
    i: int,
    j: int,
    bound: float,
) -> float:
    """What swapping i and j of different ranks adds to the cost, or, where that is above ``bound``, any value above it."""
    loads, rank_loads, mean_load, load_weight = penalty
    other_node = node[i] != node[j]
    change = float(apart_change(place, enter, leave, i, j))
    if other_node:
        change += apart_change(node, node_enter, node_leave, i, j)
    if load_weight > 0.0:
        change += load_weight * load_change(place, loads, rank_loads, mean_load, i, j)
    if change <= bound:  # most are not, and these two are far away in memory
        change += alone[i, j] + alone[j, i]
        if other_node:
            change += node_alone[i, j] + node_alone[j, i]
    return change


@compiled
def full_change(state: State, i: int, j: int) -> float:
    """What swapping i and j of different ranks adds to the cost."""
    place, _, enter, leave, alone, _, _ = state.ranks
    node, _, node_enter, node_leave, node_alone, _, _ = state.nodes
    penalty = (state.loads, state.rank_loads, state.mean_load, state.load_weight)
    return change_within(place, enter, leave, alone, node, node_enter, node_leave, node_alone, penalty, i, j, np.inf)


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
    place, _, enter, leave, alone, _, _ = state.ranks
    node, _, node_enter, node_leave, node_alone, _, _ = state.nodes
    penalty = (state.loads, state.rank_loads, state.mean_load, state.load_weight)
    cooling = (cold / hot) ** (1.0 / max(1, num_proposals))
    temperature = hot
    made = 0
    for _ in range(num_proposals):
        temperature *= cooling
        i, j = np.random.randint(len(place)), np.random.randint(len(place))
        if place[i] == place[j]:
            continue
        bound = -temperature * np.log(1.0 - np.random.random())  # met with probability exp(-change / temperature)
        if change_within(place, enter, leave, alone, node, node_enter, node_leave, node_alone, penalty, i, j, bound) <= bound:
            make_swap(state, i, j)
            made += 1
    return made


@compiled
def descend(state: State, slack: float) -> int:
    """Make every swap that saves more than ``slack``, in place, until none is left; returns the swaps made."""
    place, _, enter, leave, alone, _, _ = state.ranks
    node, _, node_enter, node_leave, node_alone, _, _ = state.nodes
    penalty = (state.loads, state.rank_loads, state.mean_load, state.load_weight)
    made, last_made = 0, -1
    while made != last_made:
        last_made = made
        for i in range(len(place)):
            for j in range(i + 1, len(place)):
                if place[i] == place[j]:
                    continue
                if change_within(place, enter, leave, alone, node, node_enter, node_leave, node_alone, penalty, i, j, -slack) < -slack:
                    make_swap(state, i, j)
                    made += 1
    return made
