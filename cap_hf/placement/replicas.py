"""Copies of experts in redundant slots: which to add where. How tokens choose among them: ``cap_hf.placement.routing``.

Copies are added one at a time. One is worth what routing all tokens again shows, in

    cost = ranks visited + inter_node_cost * nodes visited (with several nodes)
         + load_weight * T * sum over ranks of max(0, load / mean load - 1)^2

which counts the token's own rank and node like any other, as the metrics do. An estimate from the present routing ranks the
candidates; the first ``SHORTLIST`` are routed, and the best of them is added if it saves cost and tokens visit no more than
before. The estimate is blind to other experts that then choose differently, so a copy outside the list can be better:
16 candidates instead of 4 save 0.5 % of the devices per token and take three times as long.

Letters: ``L`` layers, ``E`` experts per layer, ``K`` experts per token, ``R`` ranks, ``N`` nodes, ``T`` tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cap_hf.layout import ExpertLayout
from cap_hf.placement._compiled import compiled
from cap_hf.placement.connectivity import over_layers
from cap_hf.placement.routing import (
    VISITED,
    LayerTokens,
    Progress,
    Routing,
    check_source,
    layer_tokens,
    route_layer,
    rule_of,
    source_ranks,
    start,
)
from cap_hf.replicated import ReplicatedLayout
from cap_hf.trace import RoutingTrace

__all__ = ["LOAD_WEIGHT", "AddedCopy", "add_replicas", "copies_of_layer", "expected_savings"]

# Against 0, on held-out tokens of DeepSeek-V2-Lite: at most 1 % more devices per token over the greedy placement, 3 % over a
# connectivity one, for a third to two thirds less load over the mean on the busiest rank.
LOAD_WEIGHT = 0.5
SHORTLIST = 4  # candidates that are routed for each copy
ROUNDING = 1e-6  # visits; differences below this are rounding


class Changes(NamedTuple):
    """What tokens would do about one more copy of one expert, all others staying where they are."""

    saved: np.ndarray
    """(E, R) float64 visits saved by a copy of the expert on the rank."""
    drawn: np.ndarray
    """(E, R, R) int64 pairs that would go to it, by the rank that they leave."""
    free: np.ndarray
    """(E, R, R) int64 pairs that would choose between it and the rank they are on by load."""


class AddedCopy(NamedTuple):
    """A copy, and the cost that it saved when it was added, in visits."""

    expert: int
    rank: int
    saved: float


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


def copies_of_layer(
    tokens: LayerTokens, hosts: np.ndarray, slots_per_rank: int, load_weight: float, shortlist: int = SHORTLIST
) -> list[AddedCopy]:
    """Copies for one layer in the order in which they were found, each worth its place (see the module).

    Args:
        tokens: what the copies serve.
        hosts: (E, R) bool, which ranks hold which experts, left as it is.
        slots_per_rank: copies that each rank has room for.
        load_weight: of the load penalty.
        shortlist: candidates that are routed for each copy.
    """
    hosts, room = np.array(hosts, dtype=bool), np.full(hosts.shape[1], slots_per_rank)
    routing, added = route_layer(tokens, hosts), list[AddedCopy]()
    while room.any():
        expected = expected_savings(tokens, routing, hosts, load_weight)
        expected[hosts | (room == 0)] = -np.inf
        found = _best_copy(tokens, hosts, routing, load_weight, expected, shortlist)
        if found is None:
            break
        copy, routing = found
        hosts[copy.expert, copy.rank] = True
        room[copy.rank] -= 1
        added.append(copy)
    return added


def _best_copy(
    tokens: LayerTokens, hosts: np.ndarray, routing: Routing, load_weight: float, expected: np.ndarray, shortlist: int
) -> tuple[AddedCopy, Routing] | None:
    """The copy of the shortlist that saves most, and the routing with it; the list goes on while it holds none that saves."""
    weight = load_weight * len(tokens.ids)
    present = routing.visits + weight * excess_load(routing.loads)
    best: tuple[AddedCopy, Routing] | None = None
    for number, candidate in enumerate(np.argsort(-expected, axis=None, kind="stable")):
        expert, rank = divmod(int(candidate), hosts.shape[1])
        if expected[expert, rank] <= 0 or (number >= shortlist and best is not None):
            break
        hosts[expert, rank] = True
        changed = route_layer(tokens, hosts)
        hosts[expert, rank] = False
        saved = present - changed.visits - weight * excess_load(changed.loads)
        if changed.visits < routing.visits + ROUNDING and saved > (best[0].saved if best else 0.0) + ROUNDING:
            best = AddedCopy(expert, rank, saved), changed
    return best


def add_replicas(
    trace: RoutingTrace,
    layout: ExpertLayout,
    slots_per_rank: int,
    load_weight: float = LOAD_WEIGHT,
    source_rank: np.ndarray | None = None,
) -> ReplicatedLayout:
    """``layout`` with up to ``slots_per_rank`` copies more on each rank, chosen for the least cost on ``trace`` (see the module).

    The copies are in the last ``slots_per_rank`` slots of each rank, in the order in which they were found; a slot stays empty
    where no copy saves. Equal arguments give equal layouts.

    Args:
        trace: routing of the model that the layout is for.
        layout: where every expert stays.
        slots_per_rank: redundant slots of each rank.
        load_weight: of the load penalty; 0 for the fewest visits.
        source_rank: (T,) rank that each token is on; default: its request's number modulo R.

    Raises:
        ValueError: a trace of another model, a negative number of slots or more than a rank has other experts for, a weight that
            is negative or not finite, malformed source ranks.
    """
    if (trace.num_layers, trace.num_experts) != layout.expert_to_rank.shape:
        raise ValueError(
            f"trace has {trace.num_layers} layers of {trace.num_experts} experts, the layout {layout.num_layers} of {layout.num_experts}; "
            "use a trace of the model that the layout is for"
        )
    room = layout.num_experts - int(layout.experts_per_rank().max())
    if not isinstance(slots_per_rank, int | np.integer) or not 0 <= slots_per_rank <= room:
        raise ValueError(
            f"slots_per_rank is {slots_per_rank}; it must be an integer, 0 to {room}, the experts that the fullest rank does not hold yet"
        )
    if not (math.isfinite(load_weight) and load_weight >= 0):
        raise ValueError(f"load_weight is {load_weight}; it must be finite and 0 or more, 0 for the fewest visits")
    sources = source_ranks(trace, layout.num_ranks) if source_rank is None else np.asarray(source_rank)
    check_source(sources, trace.num_tokens, layout.num_ranks)
    home = ReplicatedLayout.from_layout(layout)
    jobs = zip(layer_tokens(trace.expert_ids, layout.topology, sources), home.hosts, strict=True)
    added = over_layers(lambda job: copies_of_layer(*job, slots_per_rank, float(load_weight)), jobs)
    slots = np.pad(home.slot_to_expert, ((0, 0), (0, 0), (0, slots_per_rank)), constant_values=-1)
    next_slot = np.full(slots.shape[:2], home.slots_per_rank)
    for layer, copies in enumerate(added):
        for copy in copies:
            slots[layer, copy.rank, next_slot[layer, copy.rank]] = copy.expert
            next_slot[layer, copy.rank] += 1
    return ReplicatedLayout(slots, layout.topology, layout.layer_ids, layout.num_experts)
