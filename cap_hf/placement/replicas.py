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
from cap_hf.placement.connectivity import over_layers
from cap_hf.placement.routing import (
    LayerTokens,
    Routing,
    check_source,
    excess_load,
    expected_savings,
    layer_tokens,
    route_layer,
    source_ranks,
)
from cap_hf.replicated import ReplicatedLayout
from cap_hf.trace import RoutingTrace

__all__ = ["LOAD_WEIGHT", "AddedCopy", "add_replicas", "copies_of_layer"]

# Against 0, on held-out tokens of DeepSeek-V2-Lite: at most 1 % more devices per token over the greedy placement, 3 % over a
# connectivity one, for a third to two thirds less load over the mean on the busiest rank.
LOAD_WEIGHT = 0.5
SHORTLIST = 4  # candidates that are routed for each copy
ROUNDING = 1e-6  # visits; differences below this are rounding


class AddedCopy(NamedTuple):
    """A copy, and the cost that it saved when it was added, in visits."""

    expert: int
    rank: int
    saved: float


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
