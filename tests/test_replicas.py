"""Copies of experts: the value type, routing rule by rule, and the search for copies against brute force.

Letters: ``L`` layers, ``E`` experts, ``K`` experts per token, ``R`` ranks, ``N`` nodes, ``T`` tokens, ``S`` slots per rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cap_hf._files import format_of
from cap_hf.layout import ExpertLayout
from cap_hf.metrics import visits_per_token
from cap_hf.placement import Placer
from cap_hf.placement.baselines import random
from cap_hf.placement.replicas import LOAD_WEIGHT, add_replicas, copies_of_layer
from cap_hf.placement.routing import expected_savings, layer_tokens, route_layer, route_tokens, source_ranks
from cap_hf.replicated import ReplicatedLayout, nearest_copy_cost
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace

SEEDS = st.integers(0, 2**32 - 1)
TOPOLOGIES = st.sampled_from([Topology(1), Topology(3), Topology(4, 2, 5.0), Topology(6, 2, 1.5), Topology(4, 1, 2.0)])


def random_trace(seed: int, num_layers: int, num_tokens: int, num_experts: int, top_k: int) -> RoutingTrace:
    """Tokens prefer some experts, come in topics and in requests of 5; one slot in ten is pruned."""
    draw = np.random.default_rng(seed)
    taste = (
        draw.normal(size=(num_layers, 1, num_experts)) + 2 * draw.normal(size=(num_layers, 3, num_experts))[:, np.arange(num_tokens) % 3]
    )
    ids = np.argsort(-(taste + draw.gumbel(size=taste.shape)), axis=2)[:, :, :top_k]
    lengths = [min(5, num_tokens - start) for start in range(0, num_tokens, 5)]
    return RoutingTrace(np.where(draw.random(ids.shape) < 0.1, -1, ids), num_experts, request_lengths=lengths)


def random_hosts(seed: int, num_layers: int, num_experts: int, num_ranks: int) -> np.ndarray:
    """About a third of the experts with copies, (L, E, R)."""
    draw = np.random.default_rng(seed)
    hosts = draw.random((num_layers, num_experts, num_ranks)) < 0.15
    home = draw.integers(num_ranks, size=(num_layers, num_experts, 1))
    np.put_along_axis(hosts, home, True, axis=2)
    return hosts


def hosts_on(*ranks: list[int], num_ranks: int) -> np.ndarray:
    """One layer, (1, E, R): expert i on ``ranks[i]``."""
    hosts = np.zeros((1, len(ranks), num_ranks), dtype=bool)
    for expert, holding in enumerate(ranks):
        hosts[0, expert, holding] = True
    return hosts


def routed(ids: list[list[int]], hosts: np.ndarray, topology: Topology, source_rank: list[int] | None = None) -> list[list[int]]:
    """One layer's ranks."""
    return route_tokens(np.array([ids]), hosts, topology, np.array(source_rank or [0] * len(ids)))[0].tolist()


def reference_route(ids: np.ndarray, hosts: np.ndarray, topology: Topology, source_rank: np.ndarray) -> np.ndarray:
    """One layer, (T, K), as the module's docstring says it, with no thought of speed."""
    ranks, node = np.full(ids.shape, -1), topology.rank_to_node
    loads = [0] * topology.num_ranks
    for token, row in enumerate(ids):
        slots = sorted(np.flatnonzero(row >= 0), key=lambda slot, row=row: (hosts[row[slot]].sum(), row[slot]))
        while slots:
            slot, *slots = slots
            visited = set(ranks[token][ranks[token] >= 0].tolist())
            nodes = {int(node[rank]) for rank in visited}
            keys = []
            for rank in np.flatnonzero(hosts[row[slot]]).tolist():
                own = node[rank] == node[source_rank[token]]
                rule = 1 if rank in visited else 2 if own else 3 if int(node[rank]) in nodes else 4
                served = 0 if rule == 1 else sum(hosts[row[other], rank] for other in slots)
                keys.append((rule, -served, loads[rank], rank))
            ranks[token, slot] = min(keys)[-1]
            loads[ranks[token, slot]] += 1
    return ranks


def reference_cost(
    ids: np.ndarray, hosts: np.ndarray, topology: Topology, source_rank: np.ndarray, load_weight: float
) -> tuple[float, float]:
    """(visits, cost) of one layer, summed over tokens, after ``reference_route``."""
    ranks = reference_route(ids, hosts, topology, source_rank)
    itself = np.arange(topology.num_ranks)[None]
    visits = float(visits_per_token(ranks[None], itself, topology)[0]) * len(ids)
    loads = np.bincount(ranks[ranks >= 0], minlength=topology.num_ranks)
    excess = np.maximum(loads / max(loads.mean(), 1e-300) - 1, 0)
    return visits, visits + load_weight * len(ids) * float((excess**2).sum())


# --- routing, rule by rule -------------------------------------------------------------------------------------------


def test_a_copy_on_a_rank_that_is_visited_anyway() -> None:
    hosts = hosts_on([2], [0, 2], [1], num_ranks=3)
    assert routed([[1, 0]], hosts, Topology(3)) == [[2, 2]]  # 0 sends the token to rank 2, where 1 has a copy
    assert routed([[1, 2]], hosts, Topology(3)) == [[0, 1]]  # no copy of 1 is on rank 1: the lowest of two empty ranks
    # On visited ranks the load decides, even against the token's own node and rank.
    hosts = hosts_on([0], [2], [0, 2], num_ranks=4)
    assert routed([[0, 1, 2], [0, 1, 2], [0, 1, 2]], hosts, Topology(4, 2, 5.0)) == [[0, 2, 0], [0, 2, 2], [0, 2, 0]]


def test_else_a_copy_on_the_tokens_own_node() -> None:
    hosts, topology = hosts_on([1, 2], [3], num_ranks=4), Topology(4, 2, 5.0)
    assert routed([[0], [0], [0], [0]], hosts, topology, [0, 1, 2, 3]) == [[1], [1], [2], [2]]
    assert routed([[0, 1]], hosts, topology, [0]) == [[1, 3]]  # before a node that the token visits anyway
    assert routed([[0]], hosts, Topology(4, 1, 5.0), [0]) == [[1]]  # no copy there: any


def test_else_a_copy_on_a_node_that_is_visited_anyway() -> None:
    hosts, topology = hosts_on([1, 4], [5], num_ranks=6), Topology(6, 2, 5.0)
    assert routed([[0, 1], [0, -1]], hosts, topology, [2, 2]) == [[4, 5], [1, -1]]


def test_else_the_least_loaded_then_the_lowest_rank() -> None:
    hosts = hosts_on([0, 1, 2], [0], num_ranks=3)
    assert routed([[0, -1], [0, -1], [0, -1], [0, -1]], hosts, Topology(3)) == [[0, -1], [1, -1], [2, -1], [0, -1]]
    assert routed([[1, -1], [1, -1], [0, -1], [0, -1], [0, -1]], hosts, Topology(3))[2:] == [[1, -1], [2, -1], [1, -1]]


def test_among_equal_ranks_the_one_that_serves_most_of_what_is_left() -> None:
    hosts = hosts_on([0, 1], [1, 2], [0, 1], num_ranks=3)
    assert routed([[0, 1, 2]], hosts, Topology(3)) == [[1, 1, 1]]  # rank 0 is lower, but holds 2 only
    loaded = hosts_on([0, 1], [0, 2, 1], [1], num_ranks=3)
    assert routed([[2, -1], [2, -1], [0, 1]], loaded, Topology(3)) == [[1, -1], [1, -1], [0, 0]]  # equal service: the load


def test_experts_with_few_copies_choose_first() -> None:
    hosts = hosts_on([0, 1, 2], [1, 2], [2], num_ranks=3)
    assert routed([[0, 1, 2]], hosts, Topology(3)) == [[2, 2, 2]]
    assert routed([[0, 1, -1]], hosts, Topology(3)) == [[1, 1, -1]]


@given(SEEDS, TOPOLOGIES, st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_routing_equals_the_reference(seed: int, topology: Topology, top_k: int) -> None:
    trace = random_trace(seed, 2, 40, 9, top_k)
    hosts = random_hosts(seed, 2, 9, topology.num_ranks)
    sources = np.random.default_rng(seed).integers(topology.num_ranks, size=40)
    ranks = route_tokens(trace.expert_ids, hosts, topology, sources)
    for layer in range(2):
        assert ranks[layer].tolist() == reference_route(trace.expert_ids[layer], hosts[layer], topology, sources).tolist()
        counted = route_layer(layer_tokens(trace.expert_ids, topology, sources)[layer], hosts[layer])
        visits, _ = reference_cost(trace.expert_ids[layer], hosts[layer], topology, sources, 0.0)
        assert counted.visits == pytest.approx(visits)
        assert counted.loads.tolist() == [(ranks[layer] == rank).sum() for rank in range(topology.num_ranks)]
    kept = trace.expert_ids >= 0
    layer = np.nonzero(kept)[0]
    assert hosts[layer, trace.expert_ids[kept], ranks[kept]].all() and (ranks[~kept] == -1).all()


@given(SEEDS, TOPOLOGIES)
@settings(max_examples=30, deadline=None)
def test_without_copies_routing_and_metrics_are_the_layouts(seed: int, topology: Topology) -> None:
    trace = random_trace(seed, 2, 50, 10, 3)
    layout = ExpertLayout(random(2, 10, topology.num_ranks, seed), topology, [4, 7])
    replicated = ReplicatedLayout.from_layout(layout)
    ranks = route_tokens(trace.expert_ids, replicated.hosts, topology, source_ranks(trace, topology.num_ranks))
    expected = [np.append(row, -1)[ids] for row, ids in zip(layout.expert_to_rank, trace.expert_ids, strict=True)]
    assert ranks.tolist() == np.stack(expected).tolist()
    measured, wanted = replicated.metrics(trace), layout.metrics(trace)
    for name, value in vars(wanted).items():
        assert np.array_equal(getattr(measured, name), value), name


def test_source_ranks_deal_out_requests() -> None:
    trace = RoutingTrace(np.zeros((1, 6, 1), int), 1, request_lengths=[2, 0, 1, 3])
    assert source_ranks(trace, 2).tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": np.ones((1, 3, 4), bool)}, r"hosts \(1, 3, 4\), the topology 2 ranks"),
        ({"hosts": np.ones((2, 3, 2), bool)}, r"ids has shape \(1, 4, 2\), hosts \(2, 3, 2\)"),
        ({"ids": np.full((1, 4, 2), 3)}, "run from 3 to 3.*-1 .* to 2"),
        ({"ids": np.full((1, 4, 2), -2)}, "run from -2"),
        ({"hosts": hosts_on([0], [], [1], num_ranks=2)}, "no rank holds expert 1 of layer 0.*1 rank or more"),
        ({"source_rank": np.zeros(3, int)}, r"source_rank has shape \(3,\).*4 integers"),
        ({"source_rank": np.zeros(4)}, "float64; it must be 4 integers"),
        ({"source_rank": np.array([0, 0, 2, 0])}, r"source_rank\[2\] is 2.*0 to 1"),
    ],
)
def test_routing_refuses_malformed_input(arguments: dict[str, np.ndarray], message: str) -> None:
    good = {"ids": np.zeros((1, 4, 2), int), "hosts": np.ones((1, 3, 2), bool), "source_rank": np.zeros(4, int)}
    with pytest.raises(ValueError, match=message):
        route_tokens(topology=Topology(2), **(good | arguments))


# --- the search for copies -------------------------------------------------------------------------------------------


def test_first_copies_worked_by_hand() -> None:
    # Experts 0, 1 on rank 0, 2, 3 on rank 1. Six tokens {0, 2}, two {1, 3}, one {0, 1}, one {2}.
    ids = [[0, 2]] * 6 + [[1, 3]] * 2 + [[0, 1], [2, -1]]
    tokens, hosts = layer_tokens(np.array([ids]), Topology(2), np.zeros(10, int))[0], hosts_on([0], [0], [1], [1], num_ranks=2)[0]
    # Visits 17. A copy of 0 on rank 1 keeps six tokens there, and so does one of 2 on rank 0; the lower id is taken, though 3 is not.
    # After it one slot is left, on rank 0: 3 there saves the two tokens {1, 3}; 2 there nothing, since 0 meets it on rank 1.
    copies = copies_of_layer(tokens, hosts, 1, 0.0)
    assert [(copy.expert, copy.rank, copy.saved) for copy in copies] == [(0, 1, 6.0), (3, 0, 2.0)]
    assert hosts.sum() == 4  # left as it was


def test_a_copy_that_only_balances_is_found() -> None:
    ids = np.array([[[0]] * 30 + [[1]] * 10])
    tokens, hosts = layer_tokens(ids, Topology(2), np.zeros(40, int))[0], hosts_on([0], [1], num_ranks=2)[0]
    # Loads 30 and 10, the busiest at 1.5 of the mean. With a copy of 0 on rank 1 its tokens take turns; the ten of expert 1 follow
    # and leave 15 and 25, the busiest at 1.25. With one of 1 on rank 0 too, all is even.
    saved = [40 * (0.5**2 - 0.25**2), 40 * 0.25**2]
    assert [tuple(copy) for copy in copies_of_layer(tokens, hosts, 1, 1.0)] == [(0, 1, saved[0]), (1, 0, saved[1])]
    assert copies_of_layer(tokens, hosts, 1, 0.0) == []


@given(SEEDS, TOPOLOGIES)
@settings(max_examples=30, deadline=None)
def test_expected_visits_are_exact_for_the_first_copy(seed: int, topology: Topology) -> None:
    trace = random_trace(seed, 1, 30, 7, 3)
    ids, sources = trace.expert_ids[0], source_ranks(trace, topology.num_ranks)
    hosts = ReplicatedLayout.from_layout(ExpertLayout(random(1, 7, topology.num_ranks, seed), topology)).hosts[0].copy()
    tokens = layer_tokens(trace.expert_ids, topology, sources)[0]
    expected = expected_savings(tokens, route_layer(tokens, hosts), hosts, 0.0)
    before, _ = reference_cost(ids, hosts, topology, sources, 0.0)
    for expert, rank in np.argwhere(~hosts):
        hosts[expert, rank] = True
        after, _ = reference_cost(ids, hosts, topology, sources, 0.0)
        hosts[expert, rank] = False
        assert expected[expert, rank] == pytest.approx(before - after)


@given(SEEDS, TOPOLOGIES, st.sampled_from([0.0, 0.5, 4.0]), st.integers(1, 2), st.sampled_from([1, 4, 10**6]))
@settings(max_examples=40, deadline=None)
def test_copies_save_what_brute_force_says(seed: int, topology: Topology, load_weight: float, slots: int, shortlist: int) -> None:
    trace = random_trace(seed, 1, 24, 7, 3)
    ids, sources = trace.expert_ids[0], source_ranks(trace, topology.num_ranks)
    hosts = ReplicatedLayout.from_layout(ExpertLayout(random(1, 7, topology.num_ranks, seed), topology)).hosts[0].copy()
    tokens = layer_tokens(trace.expert_ids, topology, sources)[0]
    copies = copies_of_layer(tokens, hosts, slots, load_weight, shortlist)
    room = np.full(topology.num_ranks, slots)
    visits, cost = reference_cost(ids, hosts, topology, sources, load_weight)
    for copy in copies:
        savings = {}
        expected = expected_savings(tokens, route_layer(tokens, hosts), hosts, load_weight)
        for expert, rank in np.argwhere(~hosts & (room > 0) & (expected > 0)).tolist():
            hosts[expert, rank] = True
            new_visits, new_cost = reference_cost(ids, hosts, topology, sources, load_weight)
            hosts[expert, rank] = False
            if new_visits < visits + 1e-6:
                savings[expert, rank] = cost - new_cost
        assert copy.saved == pytest.approx(savings[copy.expert, copy.rank]) and copy.saved > 0
        if shortlist > 7 * topology.num_ranks:
            assert copy.saved == pytest.approx(max(savings.values()))
        hosts[copy.expert, copy.rank] = True
        room[copy.rank] -= 1
        assert room[copy.rank] >= 0
        visits, cost = reference_cost(ids, hosts, topology, sources, load_weight)


@given(SEEDS, TOPOLOGIES, st.integers(0, 3), st.sampled_from([0.0, LOAD_WEIGHT, 5.0]))
@settings(max_examples=40, deadline=None)
def test_added_copies_fill_slots_and_never_add_visits(seed: int, topology: Topology, slots: int, load_weight: float) -> None:
    trace = random_trace(seed, 2, 60, 13, 4)
    layout = ExpertLayout(random(2, 13, topology.num_ranks, seed), topology, [2, 5])
    slots = min(slots, 13 - int(layout.experts_per_rank().max()))
    home, grown = ReplicatedLayout.from_layout(layout), add_replicas(trace, layout, slots, load_weight)
    assert grown.layer_ids.tolist() == [2, 5] and grown.topology == topology
    assert grown.slots_per_rank == home.slots_per_rank + slots
    assert (grown.slot_to_expert[:, :, : home.slots_per_rank] == home.slot_to_expert).all()
    assert (grown.hosts.sum(axis=1) == (grown.slot_to_expert >= 0).sum(axis=2)).all()  # no rank holds an expert twice
    assert grown == add_replicas(trace, layout, slots, load_weight)
    before, after = home.metrics(trace), grown.metrics(trace)
    node_cost = topology.inter_node_cost if topology.num_nodes > 1 else 0.0
    visits = [m.devices_per_token_by_layer + node_cost * m.nodes_per_token_by_layer for m in (before, after)]
    assert (visits[1] <= visits[0] + 1e-9).all()
    assert (after.communication_cost_by_layer <= before.communication_cost_by_layer).all()
    if slots == 0:
        assert grown == home


def test_layers_are_grown_alone_and_the_source_matters() -> None:
    trace, topology = random_trace(1, 3, 200, 12, 3), Topology(4, 2, 5.0)
    layout = ExpertLayout(random(3, 12, 4, 0), topology)
    grown = add_replicas(trace, layout, 2)
    middle = RoutingTrace(trace.expert_ids[1:2], 12, request_lengths=trace.request_lengths)
    assert (
        add_replicas(middle, ExpertLayout(layout.expert_to_rank[1:2], topology), 2).slot_to_expert[0].tolist()
        == grown.slot_to_expert[1].tolist()
    )
    assert add_replicas(trace, layout, 2, source_rank=source_ranks(trace, 4)) == grown
    assert add_replicas(trace, layout, 2, source_rank=np.zeros(200, int)) != grown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots_per_rank": -1}, "slots_per_rank is -1.*0 to 3"),
        ({"slots_per_rank": 4}, "slots_per_rank is 4.*0 to 3, the experts"),
        ({"slots_per_rank": 1.5}, "slots_per_rank is 1.5; it must be an integer"),
        ({"load_weight": -0.5}, r"load_weight is -0\.5.*0 or more"),
        ({"load_weight": float("nan")}, "load_weight is nan.*finite"),
        ({"trace": random_trace(0, 1, 20, 6, 2)}, "1 layers of 6 experts, the layout 1 of 5"),
        ({"source_rank": np.zeros(7, int)}, r"source_rank has shape \(7,\)"),
    ],
)
def test_adding_refuses_bad_arguments(arguments: dict[str, object], message: str) -> None:
    good = {"trace": random_trace(0, 1, 20, 5, 2), "layout": ExpertLayout([[0, 0, 1, 1, 2]], Topology(3)), "slots_per_rank": 1}
    with pytest.raises(ValueError, match=message):
        add_replicas(**(good | arguments))  # type: ignore[arg-type]


def test_a_trace_without_any_pair_gets_no_copy() -> None:
    trace, layout = RoutingTrace(np.full((1, 4, 2), -1), 4), ExpertLayout([[0, 0, 1, 1]], Topology(2))
    grown = add_replicas(trace, layout, 2)
    assert grown.slot_to_expert.tolist() == [[[0, 1, -1, -1], [2, 3, -1, -1]]]
    assert (grown.metrics(trace).devices_per_token, grown.metrics(trace).load_imbalance) == (0.0, 1.0)


# --- the value type --------------------------------------------------------------------------------------------------


def test_slots_of_a_layout() -> None:
    layout = ExpertLayout([[1, 0, 1, 1, 2], [2, 2, 1, 0, 0]], Topology(3), [1, 9])
    replicated = ReplicatedLayout.from_layout(layout)
    assert replicated.slot_to_expert.tolist() == [[[1, -1, -1], [0, 2, 3], [4, -1, -1]], [[3, 4, -1], [2, -1, -1], [0, 1, -1]]]
    assert (replicated.num_layers, replicated.num_experts, replicated.num_ranks, replicated.slots_per_rank) == (2, 5, 3, 3)
    assert replicated.layer_ids.tolist() == [1, 9] and (replicated.num_copies == 1).all()


def test_a_rank_may_hold_an_expert_twice() -> None:
    once, twice = ReplicatedLayout([[[0, 1], [1, 2]]], Topology(2)), ReplicatedLayout([[[0, 1, 0], [1, 2, -1]]], Topology(2))
    assert once.hosts.tolist() == twice.hosts.tolist() == [[[True, False], [True, True], [False, True]]]
    assert twice.num_copies.tolist() == [[1, 2, 1]]
    trace = random_trace(0, 1, 30, 3, 2)
    assert twice.metrics(trace).devices_per_token == once.metrics(trace).devices_per_token and once != twice


def test_metrics_worked_by_hand() -> None:
    layout = ReplicatedLayout([[[0, 2], [1, 2], [3, -1], [4, 0]]], Topology(4, 2, 5.0))
    trace = RoutingTrace([[[0, 2, -1], [1, 2, 3], [4, 0, 2], [3, -1, -1]]], 5, request_lengths=[1, 1, 1, 1])
    # Sources 0, 1, 2, 3. Token 0: both on rank 0. Token 1: 1 on rank 1, 3 on rank 2, 2 on rank 1. Token 2: 4 on rank 3, 0 there
    # too, 2 on node 0, rank 0 (two pairs each, lowest). Token 3: rank 2.
    metrics = layout.metrics(trace)
    assert metrics.devices_per_token == (1 + 2 + 2 + 1) / 4
    assert metrics.nodes_per_token == (1 + 2 + 2 + 1) / 4
    assert metrics.load_imbalance == 3 / (9 / 4)
    # Pairs by Jaccard: 0-2 2/3, 1-2 1/3, 1-3 1/2, 2-3 1/4, 0-4 1/2, 2-4 1/3; only 1-3, 2-3 and 2-4 have no copies on one rank.
    assert metrics.communication_cost == pytest.approx(5 * (1 / 2 + 1 / 4 + 1 / 3))
    assert layout.metrics(trace, np.full(4, 2)).devices_per_token == metrics.devices_per_token + 0.25  # token 0: 0 on rank 3, 2 on 0


def test_cost_takes_the_nearest_copies() -> None:
    p = np.zeros((1, 3, 3))
    p[0, 0, 1] = p[0, 1, 0] = 1.0
    p[0, 1, 2] = p[0, 2, 1] = 0.25
    topology = Topology(4, 2, 5.0)
    for zero, cost in (([3], 5.0), ([3, 1], 1.0), ([3, 1, 0], 0.0)):
        assert nearest_copy_cost(p, hosts_on(zero, [0], [1], num_ranks=4), topology).tolist() == [cost + 0.25]


@given(SEEDS, st.sampled_from([Topology(4), Topology(4, 2, 5.0), Topology(6, 3, 2.0)]))
@settings(max_examples=30, deadline=None)
def test_ranks_of_a_node_are_alike(seed: int, topology: Topology) -> None:
    draw = np.random.default_rng(seed)
    trace, num_ranks = random_trace(seed, 2, 50, 12, 3), topology.num_ranks
    homes = random(2, 12, num_ranks, seed)
    slots = ReplicatedLayout.from_layout(ExpertLayout(homes, topology)).slot_to_expert
    if topology.num_nodes > 1:  # one copy per node at most, so that no choice falls to the lowest rank but between visited ones
        far = (homes[:, 0] + topology.ranks_per_node) % num_ranks
        slots = np.pad(slots, ((0, 0), (0, 0), (0, 1)), constant_values=-1)
        slots[np.arange(2), far, -1] = 0
    order = np.concatenate([draw.permutation(topology.ranks_per_node) + first for first in range(0, num_ranks, topology.ranks_per_node)])
    sources = draw.integers(num_ranks, size=50)
    metrics = ReplicatedLayout(slots, topology).metrics(trace, sources)
    permuted = ReplicatedLayout(slots[:, order], topology).metrics(trace, np.argsort(order)[sources])
    for name in ("devices_per_token_by_layer", "nodes_per_token_by_layer", "communication_cost_by_layer"):
        assert np.array_equal(getattr(permuted, name), getattr(metrics, name)), name
    if topology.num_nodes == 1:
        assert np.array_equal(permuted.load_imbalance_by_layer, metrics.load_imbalance_by_layer)


def test_round_trip(tmp_path: Path) -> None:
    layout = ReplicatedLayout([[[0, 1], [1, -1]], [[1, 0], [0, 1]]], Topology(2, 1, 3.0), [3, 8])
    layout.save(tmp_path / "layout.json")
    loaded = ReplicatedLayout.load(tmp_path / "layout.json")
    assert loaded == layout and hash(loaded) == hash(layout) and loaded.slot_to_expert.tolist() == layout.slot_to_expert.tolist()
    assert format_of(tmp_path / "layout.json") == "replicated_layout"
    others = [
        ReplicatedLayout([[[0, 1], [-1, 1]], [[1, 0], [0, 1]]], Topology(2, 1, 3.0), [3, 8]),
        ReplicatedLayout(layout.slot_to_expert, Topology(2), [3, 8]),
        ReplicatedLayout(layout.slot_to_expert, Topology(2, 1, 3.0)),
    ]
    assert len({layout.fingerprint, *(other.fingerprint for other in others)}) == 4 and all(layout != other for other in others)
    assert repr(layout) == f"ReplicatedLayout(slot_to_expert=<2x2x2>, topology={layout.topology!r}, fingerprint={layout.fingerprint!r})"
    assert layout != ExpertLayout([[0, 1], [1, 0]], Topology(2, 1, 3.0), [3, 8])


def test_values_are_locked_and_not_shared() -> None:
    slots = np.array([[[0, 1], [1, -1]]])
    layout = ReplicatedLayout(slots, Topology(2))
    slots[:] = 0
    assert layout.slot_to_expert.tolist() == [[[0, 1], [1, -1]]]
    for array in (layout.slot_to_expert, layout.hosts, layout.layer_ids):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize(
    ("slots", "arguments", "message"),
    [
        ([[0, 1], [1, 0]], {}, r"shape \(2, 2\).*\(layers, ranks, slots\)"),
        ([[[0.0], [1.0]]], {}, "type float64; it must be integers"),
        ([[[0], [1], [1]]], {}, "3 ranks, the topology 2"),
        ([[[0, 1], [-2, 1]]], {}, r"slot_to_expert\[0, 1, 0\] is -2.*0 to 1"),
        ([[[0, 1], [2, 1]]], {"num_experts": 2}, r"slot_to_expert\[0, 1, 0\] is 2.*0 to 1: check num_experts"),
        ([[[-1], [-1]]], {}, r"\[0, 0, 0\] is -1"),
        ([[[0, 1], [3, 1]]], {}, "expert 2 of layer 0 has no slot.*4 experts"),
        ([[[0], [1]], [[0], [0]]], {}, "expert 1 of layer 1 has no slot"),
        ([[[0], [1]]], {"num_experts": 3}, "expert 2 of layer 0 has no slot"),
        ([[[0], [1]]], {"layer_ids": [1, 2]}, "layer_ids has 2 entries.*1 layers"),
    ],
)
def test_malformed_slots_are_refused(slots: list[object], arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplicatedLayout(slots, Topology(2), **arguments)


def test_foreign_files_and_traces_are_refused(tmp_path: Path) -> None:
    path, layout = tmp_path / "file.json", ReplicatedLayout([[[0, 1], [1, -1]]], Topology(2))
    ExpertLayout([[0, 1]], Topology(2)).save(path)
    with pytest.raises(ValueError, match="holds format 'cap_hf.layout', not 'cap_hf.replicated_layout'"):
        ReplicatedLayout.load(path)
    layout.save(path)
    with pytest.raises(ValueError, match="holds format 'cap_hf.replicated_layout', not 'cap_hf.layout'"):
        ExpertLayout.load(path)
    content = json.loads(path.read_text())
    for name, value in (("slot_to_expert", [[[0], [0]]]), ("num_experts", 7), ("topology", {"num_racks": 2}), ("layer_ids", "x")):
        path.write_text(json.dumps(content | {name: value}))
        with pytest.raises(ValueError, match="file.json.*save"):
            ReplicatedLayout.load(path)
    path.write_text(json.dumps(content)[:-9])
    with pytest.raises(ValueError, match="truncated or not JSON"):
        ReplicatedLayout.load(path)
    with pytest.raises(ValueError, match="1 layers of 5 experts, the layout 1 of 2"):
        layout.metrics(random_trace(0, 1, 20, 5, 2))


def test_the_value_type_loads_no_compiler() -> None:
    code = "import sys, cap_hf.replicated as r; assert 'numba' not in sys.modules; r.ReplicatedLayout([[[0]]], r.Topology(1))"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- size and real traces --------------------------------------------------------------------------------------------


def test_a_layer_of_a_large_model_takes_well_below_two_seconds() -> None:
    trace = random_trace(0, 1, 8000, 128, 8)
    layout = ExpertLayout.sequential(1, 128, Topology(8))
    add_replicas(trace.select_tokens(slice(0, 50)), layout, 1)  # compiles
    start = time.process_time()
    grown = add_replicas(trace, layout, 4)
    assert time.process_time() - start < 2.0
    assert (grown.slot_to_expert >= 0).all()


def deepseek_halves(data_dir: Path, name: str) -> tuple[RoutingTrace, RoutingTrace]:
    with np.load(data_dir / "traces" / "deepseek_v2_lite" / f"esft_{name}_topk.npz") as arrays:
        trace = RoutingTrace(arrays["topk_ids"], 64, layer_ids=arrays["layers"], request_lengths=arrays["seq_lens"])
    middle = trace.num_tokens // 2
    return trace.select_tokens(slice(0, middle)), trace.select_tokens(slice(middle, None))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("intent", {0: (3.458, 1.375), 1: (2.918, 1.209), 2: (2.612, 1.144)}), ("summary", {0: (3.656, 1.421), 2: (2.885, 1.132)})],
)
def test_real_copies_improve_both_axes_on_held_out_tokens(data_dir: Path, name: str, expected: dict[int, tuple[float, float]]) -> None:
    learned_on, scored_on = deepseek_halves(data_dir, name)
    layout = Placer(Topology(8), "greedy").place(learned_on)
    for slots, (devices, imbalance) in expected.items():
        metrics = add_replicas(learned_on, layout, slots).metrics(scored_on)
        assert metrics.devices_per_token == pytest.approx(devices, abs=0.02)
        assert metrics.load_imbalance == pytest.approx(imbalance, abs=0.03)


def test_real_copies_keep_tokens_in_their_node(data_dir: Path) -> None:
    learned_on, scored_on = deepseek_halves(data_dir, "intent")
    layout = Placer(Topology(8, 4, 5.0), "greedy").place(learned_on)
    before, after = layout.metrics(scored_on), add_replicas(learned_on, layout, 2).metrics(scored_on)
    assert before.nodes_per_token == pytest.approx(1.773, abs=0.02) and after.nodes_per_token == pytest.approx(1.503, abs=0.02)
    assert after.devices_per_token == pytest.approx(2.785, abs=0.02)
