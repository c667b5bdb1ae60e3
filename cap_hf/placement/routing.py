"""Which copy of an expert a token uses, where experts have several, and what one more copy would save.

Layer by layer, tokens in order. A token's experts choose in turn, fewest copies first, equal numbers by id; so those with one
copy lay down which ranks the token visits anyway. Each takes

1. a copy on a rank that the token visits anyway;
2. else one on the token's own node;
3. else one on a node that the token visits anyway;
4. else any.

Among several: the rank that holds most of the token's experts still to choose (not in 1; it saves 1 to 2 % of the devices per
token at 2 and 4 slots per rank), then the rank with fewest (token, expert) pairs so far, then the lowest rank. The pairs are
counted over all tokens of the layer, in order; ranks that count only their own tokens will choose a little differently.

All that is compiled for copies stands here: code kept on disk does not notice when what it calls in another file changes.

Letters: ``L`` layers, ``E`` experts per layer, ``K`` experts per token, ``R`` ranks, ``N`` nodes, ``T`` tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cap_hf._compiled import compiled
from cap_hf.placement.connectivity import over_layers
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace

__all__ = [
    "LayerTokens",
    "Routing",
    "check_source",
    "excess_load",
    "expected_savings",
    "layer_tokens",
    "route_layer",
    "route_tokens",
    "source_ranks",
]

VISITED, OWN_NODE, VISITED_NODE, ANY = 1, 2, 3, 4  # the rules above


class LayerTokens(NamedTuple):
    """One layer's tokens and the machine they are on."""

    ids: np.ndarray
    """(T, K) int32, -1 = pruned."""
    source_node: np.ndarray
    """(T,) int64 node that each token is on."""
    rank_to_node: np.ndarray
    """(R,) int64."""
    node_cost: float
    """What visiting a node costs beside visiting its ranks."""


class Copies(NamedTuple):
    """One layer's experts by the ranks that hold them."""

    hosts: np.ndarray
    """(E, R) bool."""
    ranks: np.ndarray
    """(E, R) int64, each row beginning with the ranks that hold the expert, ascending."""
    num: np.ndarray
    """(E,) int64 how many these are."""


class Progress(NamedTuple):
    """How far the routing of a layer has come, and where the token in hand has gone."""

    routed: np.ndarray
    """(T, K) int64."""
    loads: np.ndarray
    """(R,) int64 (token, expert) pairs so far."""
    on_rank: np.ndarray
    """(R,) int64 experts of the token on each rank."""
    on_node: np.ndarray
    """(R,) int64 experts of the token on each node, N <= R of them."""
    waiting: np.ndarray
    """(K,) int64 slots of the token that have yet to choose, in their order."""


class Routing(NamedTuple):
    """Where one layer's tokens go."""

    rank: np.ndarray
    """(T, K) int64, -1 = pruned."""
    loads: np.ndarray
    """(R,) int64 (token, expert) pairs."""
    visits: float
    """Visits to ranks, and ``node_cost`` for each visit to a node, summed over tokens."""


@compiled
def list_copies(hosts: np.ndarray) -> Copies:
    """``Copies`` of hosts (E, R)."""
    ranks, num = np.zeros(hosts.shape, np.int64), np.zeros(len(hosts), np.int64)
    for expert in range(len(hosts)):
        holding = np.flatnonzero(hosts[expert])
        num[expert] = len(holding)
        ranks[expert, : len(holding)] = holding
    return Copies(hosts, ranks, num)


@compiled
def rule_of(on_rank: int, on_node: int, own_node: bool) -> int:
    """Rule by which a token would take a copy, having so many other experts on the copy's rank and on its node."""
    if on_rank > 0:
        return VISITED
    if own_node:
        return OWN_NODE
    return VISITED_NODE if on_node > 0 else ANY


@compiled
def start(tokens: LayerTokens, routed: np.ndarray) -> Progress:
    """``Progress`` before the first token, results going to ``routed`` (T, K)."""
    num_ranks = len(tokens.rank_to_node)
    loads, on_rank, on_node = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    return Progress(routed, loads, on_rank, on_node, np.zeros(tokens.ids.shape[1], np.int64))


@compiled
def insert_turn(tokens: LayerTokens, copies: Copies, now: Progress, token: int, slot: int, num_waiting: int) -> None:
    """Put a slot among the ``num_waiting`` that wait, behind those with fewer copies or as many and a lower id."""
    ids, num, waiting = tokens.ids, copies.num, now.waiting
    place, expert = num_waiting, ids[token, slot]
    while place > 0:
        before = ids[token, waiting[place - 1]]
        if (num[before], before) < (num[expert], expert):
            break
        waiting[place] = waiting[place - 1]
        place -= 1
    waiting[place] = slot


@compiled
def best_rank(tokens: LayerTokens, copies: Copies, now: Progress, token: int, turn: int, num_waiting: int) -> int:
    """Rank for the slot ``now.waiting[turn]``, by the module's rules."""
    expert = tokens.ids[token, now.waiting[turn]]
    best, best_rule, best_served = -1, ANY + 1, 0
    for rank in copies.ranks[expert, : copies.num[expert]]:
        node = tokens.rank_to_node[rank]
        rule, served = rule_of(now.on_rank[rank], now.on_node[node], node == tokens.source_node[token]), 0
        if VISITED < rule <= best_rule:
            for later in range(turn + 1, num_waiting):
                served += copies.hosts[tokens.ids[token, now.waiting[later]], rank]
        if rule != best_rule:
            better = rule < best_rule
        elif served != best_served:
            better = served > best_served
        else:
            better = now.loads[rank] < now.loads[best]
        if better:
            best, best_rule, best_served = rank, rule, served
    return best


@compiled
def send(tokens: LayerTokens, now: Progress, token: int, slot: int, rank: int) -> float:
    """Route one slot; returns what it adds to the visits."""
    node = tokens.rank_to_node[rank]
    now.routed[token, slot] = rank
    now.loads[rank] += 1
    now.on_rank[rank] += 1
    now.on_node[node] += 1
    return (now.on_rank[rank] == 1) + tokens.node_cost * (now.on_node[node] == 1)


@compiled
def route_layer(tokens: LayerTokens, hosts: np.ndarray) -> Routing:
    """``Routing`` by the module's rules; ``hosts`` (E, R) bool says which ranks hold which experts."""
    ids, copies = tokens.ids, list_copies(hosts)
    now, visits = start(tokens, np.full(ids.shape, -1, np.int64)), 0.0
    for token in range(len(ids)):
        now.on_rank[:], now.on_node[:], num_waiting = 0, 0, 0
        for slot in range(ids.shape[1]):
            expert = ids[token, slot]
            if expert >= 0 and copies.num[expert] == 1:
                visits += send(tokens, now, token, slot, copies.ranks[expert, 0])
            elif expert >= 0:
                insert_turn(tokens, copies, now, token, slot, num_waiting)
                num_waiting += 1
        for turn in range(num_waiting):
            rank = best_rank(tokens, copies, now, token, turn, num_waiting)
            visits += send(tokens, now, token, now.waiting[turn], rank)
    return Routing(now.routed, now.loads, visits)


class Changes(NamedTuple):
    """What tokens would do about one more copy of one expert, all others staying where they are."""

    saved: np.ndarray
    """(E, R) float64 visits saved by a copy of the expert on the rank."""
    drawn: np.ndarray
    """(E, R, R) int64 pairs that would go to it, by the rank that they leave."""
    free: np.ndarray
    """(E, R, R) int64 pairs that would choose between it and the rank they are on by load."""


@compiled
def foresee(tokens: LayerTokens, hosts: np.ndarray, now: Progress, token: int, slot: int, changes: Changes) -> None:
    """Add to ``changes`` what one (token, expert) pair would do about a copy on every other rank, all else staying as it is now."""
    expert, here, own_node = tokens.ids[token, slot], now.routed[token, slot], tokens.source_node[token]
    rank_to_node, on_rank, on_node, hosted = tokens.rank_to_node, now.on_rank, now.on_node, hosts[expert]
    saved, drawn, free = changes.saved[expert], changes.drawn[expert], changes.free[expert]
    node = rank_to_node[here]
    present = rule_of(on_rank[here] - 1, on_node[node] - 1, node == own_node)
    for there in range(len(on_rank)):
        if hosted[there]:
            continue
        other = rank_to_node[there]
        rule = rule_of(on_rank[there], on_node[other] - (other == node), other == own_node)
        if rule == present:
            free[there, here] += 1
        elif rule < present:
            drawn[there, here] += 1
            saved[there] += (rule == VISITED) + tokens.node_cost * ((on_node[node] == 1) - (on_node[other] == 0))


@compiled
def excess_load(loads: np.ndarray) -> float:
    """Sum over ranks of max(0, load / mean - 1)^2; 0 without any load."""
    mean = max(loads.mean(), 1e-300)
    excess = 0.0
    for load in loads:
        excess += max(0.0, load / mean - 1.0) ** 2
    return excess


@compiled
def expected_savings(tokens: LayerTokens, routing: Routing, hosts: np.ndarray, load_weight: float) -> np.ndarray:
    """Cost that a copy of each expert on each rank would save if no other expert chose differently, (E, R)."""
    num_experts, num_ranks = hosts.shape
    by_rank = (num_experts, num_ranks, num_ranks)
    changes = Changes(np.zeros(hosts.shape), np.zeros(by_rank, np.int64), np.zeros(by_rank, np.int64))
    now = start(tokens, routing.rank)
    for token in range(len(tokens.ids)):
        now.on_rank[:], now.on_node[:] = 0, 0
        for rank in routing.rank[token]:
            if rank >= 0:
                now.on_rank[rank] += 1
                now.on_node[tokens.rank_to_node[rank]] += 1
        for slot in range(tokens.ids.shape[1]):
            if tokens.ids[token, slot] >= 0:
                foresee(tokens, hosts, now, token, slot, changes)
    weight = load_weight * len(tokens.ids)
    for expert in range(num_experts):
        for there in range(num_ranks):
            drawn, free = changes.drawn[expert, there], changes.free[expert, there]
            changes.saved[expert, there] += weight * relief(routing.loads, drawn, free, there)
    return changes.saved


@compiled
def relief(loads: np.ndarray, drawn: np.ndarray, free: np.ndarray, there: int) -> float:
    """Fall of ``excess_load`` when pairs (R,) are drawn from their ranks to ``there`` and free ones level the loads as far as they can."""
    after = (loads - drawn).astype(np.float64)
    after[there] += drawn.sum()
    for here in range(len(loads)):
        moved = min(max(after[here] - after[there], 0.0) / 2.0, free[here])
        after[here] -= moved
        after[there] += moved
    return excess_load(loads) - excess_load(after)


def layer_tokens(ids: np.ndarray, topology: Topology, source_rank: np.ndarray) -> list[LayerTokens]:
    """``LayerTokens`` of each layer of ids (L, T, K), tokens being on ``source_rank`` (T,)."""
    nodes = np.array(topology.rank_to_node)
    node_cost = float(topology.inter_node_cost) if topology.num_nodes > 1 else 0.0
    return [LayerTokens(np.array(layer, dtype=np.int32, order="C"), nodes[source_rank], nodes, node_cost) for layer in ids]


def source_ranks(trace: RoutingTrace, num_ranks: int) -> np.ndarray:
    """Rank of each token, (T,), where nothing else is known: requests are dealt out in turn."""
    return trace.token_to_request % num_ranks


def route_tokens(ids: np.ndarray, hosts: np.ndarray, topology: Topology, source_rank: np.ndarray) -> np.ndarray:
    """Rank that each of a token's experts is computed on, (L, T, K), -1 where the slot is pruned.

    Args:
        ids: (L, T, K) experts of each token, -1 = pruned.
        hosts: (L, E, R) bool, which ranks hold which experts.
        topology: R ranks.
        source_rank: (T,) rank that each token is on.

    Raises:
        ValueError: shapes that do not match, ranks or ids out of range, an expert that no rank holds.
    """
    ids, hosts, source_rank = np.asarray(ids), np.asarray(hosts, dtype=bool), np.asarray(source_rank)
    if ids.ndim != 3 or hosts.ndim != 3 or len(ids) != len(hosts) or hosts.shape[2] != topology.num_ranks:
        raise ValueError(
            f"ids has shape {ids.shape}, hosts {hosts.shape}, the topology {topology.num_ranks} ranks; "
            "give (layers, tokens, experts per token) and (layers, experts, ranks)"
        )
    check_source(source_rank, ids.shape[1], topology.num_ranks)
    if ids.size and not -1 <= ids.min() <= ids.max() < hosts.shape[1]:
        raise ValueError(f"ids run from {ids.min()} to {ids.max()}; they must be -1 (pruned) to {hosts.shape[1] - 1}: route the same model")
    if not hosts.any(axis=2).all():
        layer, expert = (int(i) for i in np.argwhere(~hosts.any(axis=2))[0])
        raise ValueError(f"no rank holds expert {expert} of layer {layer}; every expert needs 1 rank or more: place again")
    jobs = zip(layer_tokens(ids, topology, source_rank), np.array(hosts), strict=True)
    return np.stack([routing.rank for routing in over_layers(lambda job: route_layer(*job), jobs)])


def check_source(source_rank: np.ndarray, num_tokens: int, num_ranks: int) -> None:
    """ValueError unless there is one rank (T,) for every token."""
    if source_rank.shape != (num_tokens,) or not np.issubdtype(source_rank.dtype, np.integer):
        raise ValueError(
            f"source_rank has shape {source_rank.shape} and type {source_rank.dtype}; it must be {num_tokens} integers, one per token"
        )
    outside = (source_rank < 0) | (source_rank >= num_ranks)
    if outside.any():
        token = int(outside.argmax())
        raise ValueError(f"source_rank[{token}] is {source_rank[token]}; it must be 0 to {num_ranks - 1}")
