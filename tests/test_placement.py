"""Greedy, baselines and spectrum: worked examples, properties, and real traces of the paper's two models.

Letters: ``L`` layers, ``E`` experts, ``K`` experts per token, ``R`` ranks, ``N`` nodes, ``T`` tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cap_hf.placement
from cap_hf.layout import ExpertLayout, rank_capacities
from cap_hf.metrics import communication_cost, jaccard, rank_loads
from cap_hf.placement import PlacementSpectrum, Placer
from cap_hf.placement.baselines import random, sequential
from cap_hf.placement.greedy import greedy_groups, greedy_layer, greedy_layers, groups_to_nodes
from cap_hf.placement.spectrum import adjusted_spectrum, balancing_trajectory, pick_states
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace

SEEDS = st.integers(0, 2**32 - 1)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def weights(num_vertices: int, edges: dict[tuple[int, int], float]) -> np.ndarray:
    """Symmetric (E, E) matrix with these entries."""
    p = np.zeros((num_vertices, num_vertices))
    for (i, j), weight in edges.items():
        p[i, j] = p[j, i] = weight
    return p


def random_weights(num_vertices: int, seed: int) -> np.ndarray:
    """Symmetric positive integers so large that no two sums are equal, and exact in float64."""
    upper = np.triu(rng(seed).integers(1, 2**40, (num_vertices, num_vertices)), 1)
    return (upper + upper.T).astype(np.float64)


def random_trace(seed: int, num_layers: int, num_tokens: int, num_experts: int, top_k: int) -> RoutingTrace:
    """Tokens prefer some experts and come in topics, as real ones do; one slot in ten is pruned."""
    draw = rng(seed)
    taste = (
        draw.normal(size=(num_layers, 1, num_experts))
        + 2 * draw.normal(size=(num_layers, 3, num_experts))[:, draw.integers(3, size=num_tokens)]
    )
    ids = np.argsort(-(taste + draw.gumbel(size=taste.shape)), axis=2)[:, :, :top_k]
    return RoutingTrace(np.where(draw.random(ids.shape) < 0.1, -1, ids), num_experts)


# --- greedy, stage 1 -------------------------------------------------------------------------------------------------


def test_greedy_worked_by_hand() -> None:
    p = weights(6, {(0, 3): 6, (0, 1): 5, (0, 2): 1, (1, 3): 8, (1, 2): 2, (3, 4): 4, (4, 5): 3, (3, 5): 1, (2, 5): 2})
    # Degrees 12 15 5 19 7 6: expert 3 seeds group 0, expert 1 group 1, though 1-3 is the heaviest edge.
    # Group 0 {3} sees 0:6 4:4 5:1 and takes 0. Group 1 {1} would rather have 0 (5); of the free ones it takes 2 (2).
    # Group 0 {3, 0} sees 4:4 5:1 and takes 4. Group 1 takes what is left, 5.
    assert greedy_groups(p, np.array([3, 3]), rng()).tolist() == [0, 1, 1, 0, 0, 1]


def test_greedy_sums_over_all_members_of_the_group() -> None:
    # Seeds 0 and 2 take 1 and 3. Then 4 is tied to {0, 1} by 3 + 3 and 5 by 5, though 5 is closer to the seed.
    p = weights(6, {(0, 1): 20, (0, 4): 3, (1, 4): 3, (0, 5): 5, (2, 3): 25})
    assert greedy_groups(p, np.array([3, 3]), rng()).tolist() == [0, 0, 1, 1, 0, 1]


def test_greedy_ties_go_to_the_lowest_id() -> None:
    equal = np.ones((6, 6)) - np.eye(6)
    assert greedy_groups(equal, np.array([3, 3]), rng()).tolist() == [0, 1, 0, 1, 0, 1]
    assert greedy_groups(equal, np.array([4, 2]), rng()).tolist() == [0, 1, 0, 1, 0, 0]  # the full group is skipped


def test_greedy_ties_do_not_depend_on_the_order_of_addition() -> None:
    # Experts 5 and 6 are tied to {0, 1, 2} by 0.1, 0.2 and 0.3 in opposite orders, and the floating-point sums differ.
    assert (0.1 + 0.2) + 0.3 > (0.3 + 0.2) + 0.1
    ties = {(0, 5): 0.3, (1, 5): 0.2, (2, 5): 0.1, (0, 6): 0.1, (1, 6): 0.2, (2, 6): 0.3}
    p = weights(8, ties | {(0, 1): 9, (0, 2): 9, (3, 4): 8, (4, 7): 8})
    assert greedy_groups(p, np.array([4, 4]), rng()).tolist() == [0, 0, 0, 1, 1, 0, 1, 1]


def test_greedy_chooses_at_random_only_where_nothing_is_co_activated() -> None:
    nothing = np.zeros((12, 12))
    results = {tuple(greedy_groups(nothing, np.full(3, 4), rng(seed))) for seed in range(8)}
    assert len(results) > 1
    assert all(groups[:3] == (0, 1, 2) for groups in results)  # the seeds are a tie, not a random choice
    assert greedy_groups(nothing, np.full(3, 4), rng(5)).tolist() == greedy_groups(nothing, np.full(3, 4), rng(5)).tolist()
    layers = greedy_layers(np.zeros((4, 12, 12)), Topology(3), seed=1)
    assert len({tuple(layer) for layer in layers.tolist()}) == 4
    assert (layers == greedy_layers(np.zeros((4, 12, 12)), Topology(3), seed=1)).all()
    assert (layers != greedy_layers(np.zeros((4, 12, 12)), Topology(3), seed=2)).any()
    unused = rng()
    greedy_groups(np.ones((12, 12)), np.full(3, 4), unused)
    assert unused.random() == rng().random()


@pytest.mark.parametrize("seed", range(4))
def test_greedy_recovers_two_clusters(seed: int) -> None:
    cluster = np.array([0, 1, *rng(seed).permutation([0] * 5 + [1] * 5)])  # degrees are equal, so 0 and 1 are the seeds
    members = [np.flatnonzero(cluster == side) for side in (0, 1)]
    tokens = [[side[i], side[j], side[k]] for side in members for i in range(6) for j in range(i) for k in range(j)]
    layout = Placer(Topology(2)).place(RoutingTrace([tokens], 12))
    assert layout.expert_to_rank[0].tolist() == cluster.tolist()
    assert layout.metrics(RoutingTrace([tokens], 12)).devices_per_token == 1.0


@given(SEEDS, st.integers(1, 24), st.integers(0, 40))
@settings(deadline=None)
def test_greedy_fills_every_group_exactly(seed: int, num_groups: int, spare: int) -> None:
    num_experts = num_groups + spare
    sparse = random_weights(num_experts, seed) * (rng(seed).random((num_experts, 1)) < 0.5)  # half of the experts unused
    capacities = rank_capacities(num_experts, num_groups)
    groups = greedy_groups(sparse * sparse.T, capacities, rng(seed))
    assert np.bincount(groups, minlength=num_groups).tolist() == capacities.tolist()
    assert groups.tolist() == greedy_groups(sparse * sparse.T, capacities, rng(seed)).tolist()


@given(SEEDS, st.integers(1, 6), st.integers(2, 20))  # two experts alone always have equal degrees
@settings(deadline=None)
def test_greedy_follows_experts_that_are_renumbered(seed: int, num_groups: int, spare: int) -> None:
    num_experts = num_groups + spare
    p, order = random_weights(num_experts, seed), rng(seed).permutation(num_experts)
    capacities = rank_capacities(num_experts, num_groups)
    renumbered = greedy_groups(p[np.ix_(order, order)], capacities, rng())
    assert renumbered.tolist() == greedy_groups(p, capacities, rng())[order].tolist()


@pytest.mark.parametrize(
    ("p", "capacities", "message"),
    [
        (np.ones((2, 3)), [1, 1], r"\(2, 3\).*square"),
        (np.ones((4, 4)), [3, 2], r"\[3, 2\].*sum to 4"),
        (np.ones((4, 4)), [4, 0], r"\[4, 0\].*1 or more"),
        (np.full((4, 4), -0.5), [2, 2], r"-0\.5.*0 or more"),
        (np.full((4, 4), np.nan), [2, 2], "nan.*finite"),
    ],
)
def test_greedy_refuses_malformed_input(p: np.ndarray, capacities: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        greedy_groups(p, np.array(capacities), rng())


# --- greedy, stage 2 -------------------------------------------------------------------------------------------------


def test_node_stage_worked_by_hand() -> None:
    inside = {(0, 1): 100, (2, 3): 100, (4, 5): 100, (6, 7): 100}
    p = weights(8, inside | {(0, 4): 30, (2, 6): 25, (0, 2): 10})
    # Degrees 140 100 135 100 130 100 125 100: groups {0,1} {2,3} {4,5} {6,7} in that order. Between groups: 0-2 30, 1-3 25,
    # 0-1 10, so degrees 40 35 30 25: groups 0 and 1 seed the nodes, group 0 takes 2, group 1 takes 3.
    groups = greedy_groups(p, np.full(4, 2), rng())
    assert groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert groups_to_nodes(p, groups, 2, rng()).tolist() == [0, 1, 0, 1]
    # Node 0 has ranks 0 and 1 for groups 0 and 2; node 1 has ranks 2 and 3 for groups 1 and 3.
    assert greedy_layer(p, Topology(4, 2, 5.0), rng()).tolist() == [0, 0, 2, 2, 1, 1, 3, 3]
    assert greedy_layer(p, Topology(4), rng()).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]  # one node: the groups are the ranks


@given(SEEDS, st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
@settings(deadline=None)
def test_node_stage_keeps_the_groups(seed: int, num_nodes: int, ranks_per_node: int, spare: int) -> None:
    topology = Topology(num_nodes * ranks_per_node, ranks_per_node, 3.0)
    p = random_weights(topology.num_ranks + spare, seed)
    groups = greedy_groups(p, rank_capacities(len(p), topology.num_ranks), rng(seed))
    ranks = greedy_layer(p, topology, rng(seed))
    assert len(set(zip(groups.tolist(), ranks.tolist(), strict=True))) == topology.num_ranks  # one rank per group, one group per rank
    nodes = groups_to_nodes(p, groups, num_nodes, rng(seed))
    assert topology.rank_to_node[ranks].tolist() == nodes[groups].tolist()
    for node in range(num_nodes):  # inside a node, ranks take the groups in seed order
        inside = nodes[groups] == node
        assert np.argsort(ranks[inside], kind="stable").tolist() == np.argsort(groups[inside], kind="stable").tolist()


def test_node_stage_refuses_unequal_nodes() -> None:
    with pytest.raises(ValueError, match="3 groups for 2 nodes.*divide 3"):
        groups_to_nodes(np.ones((3, 3)), np.arange(3), 2, rng())


# --- capacities and baselines ----------------------------------------------------------------------------------------


def test_uneven_60_experts_on_8_ranks() -> None:
    assert rank_capacities(60, 8).tolist() == [8, 8, 8, 8, 7, 7, 7, 7]
    trace = random_trace(0, 2, 300, 60, 4)
    for method in cap_hf.placement.placer.METHODS:
        assert Placer(Topology(8), method).place(trace).experts_per_rank().tolist() == [[8, 8, 8, 8, 7, 7, 7, 7]] * 2
        for layout in Placer(Topology(8, 4, 5.0), method).spectrum(trace, 4):
            assert np.sort(layout.experts_per_rank()).tolist() == [[7, 7, 7, 7, 8, 8, 8, 8]] * 2


def test_sequential_is_contiguous_in_id_order() -> None:
    assert sequential(2, 7, 3).tolist() == [[0, 0, 0, 1, 1, 2, 2]] * 2


def test_random_differs_between_layers_and_seeds_and_repeats() -> None:
    layers = random(4, 32, 4, seed=1)
    assert (np.sort(layers) == sequential(4, 32, 4)).all()
    assert len({tuple(layer) for layer in layers.tolist()}) == 4
    assert (layers == random(4, 32, 4, seed=1)).all() and (layers != random(4, 32, 4, seed=2)).any()


@pytest.mark.parametrize("num_ranks", [0, 5])
def test_more_ranks_than_experts_is_refused(num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"4 experts per layer for {num_ranks} ranks.*1 to 4"):
        rank_capacities(4, num_ranks)


# --- adjustment ------------------------------------------------------------------------------------------------------


def test_adjustment_worked_by_hand() -> None:
    p = weights(4, {(0, 1): 0.5, (2, 3): 0.2, (0, 3): 0.1})
    # Loads 16 and 4. Swapping 0 and 2, or 1 and 3, splits 0-1 and 2-3 and joins 0-3: C + 0.6, and 9 and 11 are left.
    # Swapping 0 and 3, or 1 and 2, costs 0.7. The first of the two cheapest is made; then no swap lowers 11.
    way = balancing_trajectory(p, np.array([10, 6, 3, 1]), np.array([0, 0, 1, 1]), Topology(2).cost_matrix)
    assert way.expert_to_rank.tolist() == [[0, 0, 1, 1], [1, 0, 0, 1]]
    assert way.peak_load.tolist() == [16, 11]
    assert way.added_cost == pytest.approx([0, 0.6])


def test_adjustment_among_equal_costs_takes_the_largest_relief() -> None:
    # Nothing is co-activated, so every swap costs 0. Loads 14 and 4: 0 for 3 makes both 9, 0 for 2 would leave 11.
    way = balancing_trajectory(np.zeros((4, 4)), np.array([6, 8, 3, 1]), np.array([0, 0, 1, 1]), Topology(2).cost_matrix)
    assert way.expert_to_rank.tolist() == [[0, 0, 1, 1], [1, 0, 1, 0]]
    assert way.peak_load.tolist() == [14, 9]


def test_adjustment_prices_nodes() -> None:
    # Rank 0 must give load away, which splits 0-1 (p 0.5). With rank 2, in the other node, it can bring 1 and 4 together
    # (p 0.2), by swapping 0 and 4 or 1 and 5: while nodes cost nothing extra, that is the cheapest, at 0.5 - 0.2.
    p = weights(8, {(0, 1): 0.5, (1, 4): 0.2})
    loads, start = np.array([8, 4, 2, 2, 2, 2, 2, 2]), np.array([0, 0, 1, 1, 2, 2, 3, 3])
    near = balancing_trajectory(p, loads, start, Topology(4, 2, 1.0).cost_matrix)
    assert near.expert_to_rank[1].tolist() == [2, 0, 1, 1, 0, 2, 3, 3]
    assert near.added_cost[1] == pytest.approx(0.3)
    # At cost 5 it would be 2.5 - 1.0. A swap inside the node costs 0.5 and leaves 1 and 4 as far apart as before.
    far = balancing_trajectory(p, loads, start, Topology(4, 2, 5.0).cost_matrix)
    assert far.expert_to_rank[1, 4:].tolist() == [2, 2, 3, 3]
    assert far.added_cost[1] == pytest.approx(0.5)


def test_adjustment_stops_at_balance_and_without_load() -> None:
    start = np.array([0, 0, 1, 1])
    for loads in ([5, 5, 6, 4], [0, 0, 0, 0]):
        way = balancing_trajectory(np.ones((4, 4)) - np.eye(4), np.array(loads), start, Topology(2).cost_matrix)
        assert way.expert_to_rank.tolist() == [start.tolist()]


@given(SEEDS, st.sampled_from([Topology(4), Topology(4, 2, 5.0), Topology(6, 2, 2.0)]))
@settings(max_examples=30, deadline=None)
def test_adjustment_bookkeeping_equals_a_recount(seed: int, topology: Topology) -> None:
    trace = random_trace(seed, 1, 60, 20, 3)
    p, loads = jaccard(trace)[0], trace.expert_loads()[0]
    way = balancing_trajectory(p, loads, random(1, 20, topology.num_ranks, seed)[0], topology.cost_matrix)
    for before, after in zip(way.expert_to_rank, way.expert_to_rank[1:], strict=False):
        assert (before != after).sum() == 2
    cost = communication_cost(np.stack([p] * len(way.peak_load)), way.expert_to_rank, topology)
    assert way.added_cost == pytest.approx(cost - cost[0])
    peaks = [np.bincount(ranks, weights=loads).max() for ranks in way.expert_to_rank]
    assert way.peak_load.tolist() == peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    ("added_cost", "num_placements", "states"),
    [
        ([0, -1, 1, 2, 5], 1, [0]),
        ([0, -1, 1, 2, 5], 2, [0, 4]),
        ([0, -1, 1, 2, 5], 4, [0, 1, 2, 4]),  # aims 8, 6, 4: from the cheapest state's peak down
        ([0, 3, 1, 2, 5], 4, [0, 2, 2, 4]),  # aims 8, 6, 4, the start being cheapest; state 2 is cheaper than 1 and balanced more
        ([0, 0, 0, 0, 0], 3, [0, 4, 4]),
    ],
)
def test_snapshots_worked_by_hand(added_cost: list[float], num_placements: int, states: list[int]) -> None:
    assert pick_states(np.array([10.0, 8, 6, 5, 4]), np.array(added_cost), num_placements).tolist() == states


# --- spectrum --------------------------------------------------------------------------------------------------------


@given(
    SEEDS,
    st.sampled_from([method for method in cap_hf.placement.placer.METHODS if method != "connectivity"]),
    st.sampled_from([Topology(1), Topology(3), Topology(4, 2, 5.0), Topology(6, 2, 1.5)]),
    st.integers(1, 12),
)
@settings(max_examples=40, deadline=None)
def test_spectrum_trades_cost_for_balance(seed: int, method: str, topology: Topology, num_placements: int) -> None:
    trace = random_trace(seed, 2, 50, 20, 3)
    placer = Placer(topology, method, seed=seed)
    spectrum = placer.spectrum(trace, num_placements)
    assert len(spectrum) == num_placements and spectrum[0] == placer.place(trace)
    assert spectrum == placer.spectrum(trace, num_placements)
    metrics = [layout.metrics(trace) for layout in spectrum]
    imbalance = np.array([m.load_imbalance_by_layer for m in metrics])
    cost = np.array([m.communication_cost_by_layer for m in metrics])
    assert (np.diff(imbalance, axis=0) <= 0).all()
    assert (np.diff(cost[1:], axis=0) >= -1e-8).all()
    for layout in spectrum:
        assert (np.sort(layout.experts_per_rank()) == np.sort(rank_capacities(20, topology.num_ranks))).all()
        assert rank_loads(trace, layout.expert_to_rank, topology.num_ranks).sum() == (trace.expert_ids >= 0).sum()


def test_spectrum_ends_where_no_longer_one_would() -> None:
    trace = random_trace(3, 2, 400, 32, 4)
    placer = Placer(Topology(4), "greedy")
    ends = {n: placer.spectrum(trace, n)[n - 1] for n in (2, 5, 30)}
    assert ends[2] == ends[5] == ends[30]
    assert ends[2].metrics(trace).load_imbalance < 1.02 < placer.place(trace).metrics(trace).load_imbalance


def test_spectrum_is_a_sequence_of_layouts() -> None:
    spectrum = Placer(Topology(2, 1, 2.0)).spectrum(random_trace(0, 1, 40, 6, 2), 3)
    assert list(spectrum) == [spectrum[0], spectrum[1], spectrum[2]] and spectrum[-1] == spectrum[2]
    assert repr(spectrum) == f"PlacementSpectrum([{spectrum[0]!r}, {spectrum[1]!r}, {spectrum[2]!r}])"
    with pytest.raises(IndexError):
        spectrum[3]
    with pytest.raises(TypeError):
        spectrum[0] = spectrum[1]  # type: ignore[index]


def test_spectrum_round_trip(tmp_path: Path) -> None:
    trace = RoutingTrace(random_trace(1, 2, 40, 8, 2).expert_ids, 8, layer_ids=[3, 7])
    spectrum = Placer(Topology(4, 2, 5.0)).spectrum(trace, 3)
    spectrum.save(tmp_path / "spectrum.json")
    loaded = PlacementSpectrum.load(tmp_path / "spectrum.json")
    assert loaded == spectrum and hash(loaded) == hash(spectrum)
    assert loaded[2].topology == Topology(4, 2, 5.0) and loaded[2].layer_ids.tolist() == [3, 7]


def test_spectrum_refuses_what_is_no_spectrum(tmp_path: Path) -> None:
    layout = ExpertLayout([[0, 1]], Topology(2))
    with pytest.raises(ValueError, match="0 layouts.*1 or more"):
        PlacementSpectrum([])
    for other in (ExpertLayout([[0, 1, 1]], Topology(2)), ExpertLayout([[0, 1]], Topology(2, 1)), ExpertLayout([[0, 1]], Topology(2), [4])):
        with pytest.raises(ValueError, match="layout 1 has .* layout 0 "):
            PlacementSpectrum([layout, other])
    path = tmp_path / "file.json"
    layout.save(path)
    with pytest.raises(ValueError, match="cap_hf.layout.*cap_hf.spectrum"):
        PlacementSpectrum.load(path)
    PlacementSpectrum([layout]).save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"layouts": {}}))
    with pytest.raises(ValueError, match="layouts of type dict, not a list"):
        PlacementSpectrum.load(path)
    del content["layouts"][0]["expert_to_rank"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="layout 0,.*lacks a valid"):
        PlacementSpectrum.load(path)


def test_adjusted_spectrum_refuses_bad_arguments() -> None:
    trace, layout = random_trace(0, 1, 20, 4, 2), ExpertLayout([[0, 0, 1, 1]], Topology(2))
    with pytest.raises(ValueError, match="num_placements is 0.*1 or more"):
        adjusted_spectrum(layout, trace, 0)
    with pytest.raises(ValueError, match="1 layers of 6 experts, the layout 1 of 4"):
        adjusted_spectrum(layout, random_trace(0, 1, 20, 6, 2), 2)


# --- placer ----------------------------------------------------------------------------------------------------------


def test_placer_is_its_constructor_call() -> None:
    placer = Placer(Topology(4), seed=3)
    assert repr(placer) == (
        "Placer(topology=Topology(num_ranks=4, ranks_per_node=4, inter_node_cost=1.0), method='connectivity', seed=3, "
        "num_starts=2, time_limit_s=None, progress=False)"
    )
    assert cap_hf.placement.__all__ == ["Placer", "PlacementSpectrum"]


def test_placer_carries_layer_ids_and_leaves_the_trace() -> None:
    trace = RoutingTrace(random_trace(0, 3, 40, 8, 2).expert_ids, 8, layer_ids=[1, 2, 5])
    same = RoutingTrace(trace.expert_ids, 8, layer_ids=[1, 2, 5])
    for method in cap_hf.placement.placer.METHODS:
        assert Placer(Topology(4), method).spectrum(trace, 2)[1].layer_ids.tolist() == [1, 2, 5]
    assert trace == same


def test_placer_places_layers_alone() -> None:
    trace = random_trace(0, 3, 80, 16, 2)
    together = greedy_layers(jaccard(trace), Topology(4))
    assert together[0].tolist() == greedy_layers(jaccard(trace)[:1], Topology(4))[0].tolist()
    assert together[2].tolist() == greedy_layer(jaccard(trace)[2], Topology(4), rng()).tolist()  # no zero sums, so no random turn


def test_placer_refuses_bad_arguments() -> None:
    with pytest.raises(ValueError, match="'metis'.*connectivity, greedy, eplb, sequential, random"):
        Placer(Topology(2), "metis")
    with pytest.raises(ValueError, match="seed is -1.*0 or more"):
        Placer(Topology(2), seed=-1)
    for method in cap_hf.placement.placer.METHODS:
        with pytest.raises(ValueError, match="4 experts per layer for 8 ranks.*1 to 4 ranks"):
            Placer(Topology(8), method).place(random_trace(0, 1, 20, 4, 2))
    with pytest.raises(ValueError, match="num_placements is -1"):
        Placer(Topology(2)).spectrum(random_trace(0, 1, 20, 4, 2), -1)


# --- real traces -----------------------------------------------------------------------------------------------------


def qwen3(data_dir: Path, name: str) -> RoutingTrace:
    return RoutingTrace(np.load(data_dir / "traces" / "qwen3_30b_a3b" / f"{name}_prefill_topk.npz")["topk_ids"], 128)


def deepseek_halves(data_dir: Path, name: str) -> tuple[RoutingTrace, RoutingTrace]:
    with np.load(data_dir / "traces" / "deepseek_v2_lite" / f"esft_{name}_topk.npz") as arrays:
        trace = RoutingTrace(arrays["topk_ids"], 64, layer_ids=arrays["layers"])
    middle = trace.num_tokens // 2
    return trace.select_tokens(slice(0, middle)), trace.select_tokens(slice(middle, None))


def test_real_qwen3_on_other_text(data_dir: Path) -> None:
    learned_on, scored_on = qwen3(data_dir, "ep_states"), qwen3(data_dir, "token_distri_8")
    default = Placer(Topology(8), "sequential").place(learned_on).metrics(scored_on)
    assert 5.33 <= default.devices_per_token <= 5.37  # the paper's Default: 5.33-5.35
    greedy = Placer(Topology(8), "greedy").place(learned_on).metrics(scored_on)
    assert greedy.devices_per_token == pytest.approx(4.16, abs=0.02)
    assert greedy.load_imbalance == pytest.approx(1.90, abs=0.05)


@pytest.mark.parametrize(("name", "devices", "imbalance"), [("intent", 3.46, 1.375), ("summary", 3.66, 1.42)])
def test_real_deepseek_on_held_out_tokens(data_dir: Path, name: str, devices: float, imbalance: float) -> None:
    learned_on, scored_on = deepseek_halves(data_dir, name)
    default = Placer(Topology(8), "sequential").place(learned_on).metrics(scored_on)
    assert default.devices_per_token == pytest.approx(4.56, abs=0.02)
    greedy = Placer(Topology(8), "greedy").place(learned_on).metrics(scored_on)
    assert greedy.devices_per_token == pytest.approx(devices, abs=0.02)
    assert greedy.load_imbalance == pytest.approx(imbalance, abs=0.03)


def test_real_spectrum_balances_held_out_tokens(data_dir: Path) -> None:
    learned_on, scored_on = deepseek_halves(data_dir, "intent")
    spectrum = Placer(Topology(8), "greedy").spectrum(learned_on)
    held_out = [layout.metrics(scored_on) for layout in spectrum]
    assert [round(m.load_imbalance, 2) for m in (held_out[0], held_out[1], held_out[7])] == pytest.approx([1.38, 1.12, 1.03], abs=0.02)
    assert max(m.devices_per_token for m in held_out) < 3.7  # Default: 4.56


def test_real_node_stage_keeps_tokens_in_their_node(data_dir: Path) -> None:
    learned_on, scored_on = deepseek_halves(data_dir, "intent")
    spectrum = Placer(Topology(8, 4, 5.0), "greedy").spectrum(learned_on, 2)
    default = Placer(Topology(8, 4, 5.0), "sequential").place(learned_on).metrics(scored_on)
    assert spectrum[0].metrics(scored_on).nodes_per_token < 0.92 * default.nodes_per_token
    assert spectrum[1].metrics(scored_on).nodes_per_token < 0.92 * default.nodes_per_token
