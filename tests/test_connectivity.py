"""The search on exact traffic, against brute force, exhaustive search and real routing.

Letters: ``L`` layers, ``E`` experts per layer, ``T`` tokens, ``R`` ranks.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cap_hf.placement.connectivity as connectivity
from cap_hf import Placer, RoutingTrace, Topology
from cap_hf.layout import rank_capacities
from cap_hf.metrics import jaccard, visits_per_token
from cap_hf.placement._swaps import full_change, make_swap
from cap_hf.placement.connectivity import REGULARISATIONS, LayerProblem, Regularisation, Search, choose_regularisation, problems_of, refine
from cap_hf.placement.greedy import greedy_layers
from cap_hf.placement.tradeoff import lower_hull, pick_along

SEEDS = st.integers(0, 2**32 - 1)
TOPOLOGIES = st.sampled_from([Topology(3), Topology(4, 2, 2.5), Topology(6, 2, 1.0), Topology(4, 1, 5.0)])


def random_trace(seed: int, num_layers: int, num_tokens: int, num_experts: int, top_k: int, pruned: float = 0.15) -> RoutingTrace:
    """Routing with a few loose clusters, uneven loads and pruned slots."""
    rng = np.random.default_rng(seed)
    scores = rng.gumbel(size=(num_layers, num_tokens, num_experts)) + rng.normal(size=(num_layers, 1, num_experts))
    scores += 2 * (rng.integers(3, size=(num_layers, num_tokens, 1)) == rng.integers(3, size=(num_layers, 1, num_experts)))
    ids = np.argsort(-scores, axis=2)[:, :, :top_k]
    ids[rng.random(ids.shape) < pruned] = -1
    return RoutingTrace(ids, num_experts)


def problem_of(trace: RoutingTrace, topology: Topology, attraction: float = 0.0) -> LayerProblem:
    return problems_of(trace, topology, Regularisation(attraction, 0.0))[0]


def shuffled(num_experts: int, num_ranks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(num_ranks), rank_capacities(num_experts, num_ranks)))


def cost_by_definition(problem: LayerProblem, expert_to_rank: np.ndarray, load_weight: float) -> float:
    """The docstring of the module, spelled out with the public metrics."""
    ids, num_tokens = problem.ids, len(problem.ids)
    cost = visits_per_token(ids[None], expert_to_rank[None], problem.topology)[0]
    loads = np.diag(problem.pair_counts)
    cosine = problem.pair_counts / np.sqrt(np.maximum(np.outer(loads, loads), 1))
    np.fill_diagonal(cosine, 0)
    together = expert_to_rank[:, None] == expert_to_rank[None, :]
    cost -= problem.regularisation.attraction * (cosine * together).sum() / cosine.sum() if cosine.sum() else 0
    stretch = np.arange(num_tokens) * 4 // num_tokens
    ranks = np.append(expert_to_rank, -1)[ids]  # pruned slots are on no rank
    counts = np.array([[(ranks[stretch == s] == rank).sum() for s in range(4)] for rank in range(problem.topology.num_ranks)])
    over = np.maximum(0, counts / max(counts.mean(), 1e-9) - 1)
    return float(cost + load_weight * (over**2).sum() / 4)


# --- gains -----------------------------------------------------------------------------------------------------------


@given(SEEDS, TOPOLOGIES, st.sampled_from([0.0, 1.0, 7.0]), st.sampled_from([0.0, 0.3, 4.0]))
@settings(max_examples=40, deadline=None)
def test_gains_equal_brute_force_after_any_swaps(seed: int, topology: Topology, attraction: float, load_weight: float) -> None:
    problem = problem_of(random_trace(seed, 1, 40, 13, 4), topology, attraction)
    state = problem.state(shuffled(13, topology.num_ranks, seed), load_weight)
    scale = connectivity.UNIT * len(problem.ids)
    rng = np.random.default_rng(seed)
    for _ in range(25):
        i, j = rng.integers(13, size=2)
        ranks = state.ranks.place.copy()
        if ranks[i] == ranks[j]:
            continue
        swapped = ranks.copy()
        swapped[[i, j]] = ranks[[j, i]]
        change = cost_by_definition(problem, swapped, load_weight) - cost_by_definition(problem, ranks, load_weight)
        # attraction is rounded to whole units, one per pair that comes together or apart
        assert full_change(state, i, j) / scale == pytest.approx(change, abs=30 / scale if attraction else 1e-9)
        make_swap(state, i, j)
        assert (state.ranks.place == swapped).all()
    recounted = problem.state(state.ranks.place, load_weight)
    for kept, counted in ((state.ranks, recounted.ranks), (state.nodes, recounted.nodes)):
        assert all(np.array_equal(getattr(kept, name), getattr(counted, name)) for name in ("place", "visited", "enter", "leave"))
    off_diagonal = ~np.eye(13, dtype=bool)
    assert np.array_equal(state.ranks.alone[off_diagonal], recounted.ranks.alone[off_diagonal])
    assert state.rank_loads == pytest.approx(recounted.rank_loads)
    assert problem.cost(state.ranks.place, load_weight) == pytest.approx(cost_by_definition(problem, state.ranks.place, load_weight))


@given(SEEDS, TOPOLOGIES, st.sampled_from([0.0, 2.0]), st.sampled_from([0.0, 1.0]), st.integers(1, 5000))
@settings(max_examples=25, deadline=None)
def test_refining_never_costs_more_and_keeps_capacities(
    seed: int, topology: Topology, attraction: float, load_weight: float, num_tokens: int
) -> None:
    problem = problem_of(random_trace(seed, 1, num_tokens, 14, 3), topology, attraction)
    start = shuffled(14, topology.num_ranks, seed)
    found = refine(problem, start, seed, load_weight, proposals=1)
    assert problem.cost(found, load_weight) <= problem.cost(start, load_weight)
    assert np.bincount(found).tolist() == np.bincount(start).tolist()


@given(SEEDS, st.sampled_from([Topology(4, 2, 3.0), Topology(6, 3, 1.5)]))
@settings(max_examples=15, deadline=None)
def test_permuting_ranks_inside_nodes_changes_nothing(seed: int, topology: Topology) -> None:
    problem = problem_of(random_trace(seed, 1, 80, 12, 3), topology, 1.0)
    rng = np.random.default_rng(seed)
    nodes = np.arange(topology.num_ranks).reshape(topology.num_nodes, -1)
    relabelled = rng.permuted(nodes, axis=1).ravel()
    start = shuffled(12, topology.num_ranks, seed)
    found = refine(problem, start, 3, 0.5)
    assert problem.cost(relabelled[start]) == pytest.approx(problem.cost(start))
    assert (refine(problem, relabelled[start], 3, 0.5) == relabelled[found]).all()


# --- how good --------------------------------------------------------------------------------------------------------


def partitions(num_experts: int, num_ranks: int) -> np.ndarray:
    """Every assignment with the capacities of ``rank_capacities``, once per relabelling of ranks: brute force."""
    base = np.repeat(np.arange(num_ranks), rank_capacities(num_experts, num_ranks))
    return np.array(sorted(set(itertools.permutations(base.tolist()))))


@pytest.mark.parametrize(
    ("num_experts", "topology"),
    [(10, Topology(2)), (9, Topology(3)), (8, Topology(4)), (7, Topology(3)), (8, Topology(4, 2, 3.0)), (8, Topology(4, 2, 1.0))],
)
def test_tiny_layers_reach_the_optimum(num_experts: int, topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectivity, "REGULARISATIONS", (Regularisation(0.0, connectivity.TIE_WEIGHT),))
    trace = random_trace(num_experts, 6, 60, num_experts, 3)
    every = partitions(num_experts, topology.num_ranks)
    found = Placer(topology).place(trace)
    for layer in range(trace.num_layers):
        problem = problems_of(trace, topology, Regularisation(0.0, 0.0))[layer]
        assert problem.visits(found.expert_to_rank[layer]) == pytest.approx(min(problem.visits(ranks) for ranks in every))


@given(SEEDS, TOPOLOGIES)
@settings(max_examples=10, deadline=None)
def test_it_sends_no_more_than_the_greedy(seed: int, topology: Topology) -> None:
    trace = random_trace(seed, 2, 300, 24, 4)
    greedy = greedy_layers(jaccard(trace), topology)
    found = Placer(topology).place(trace)
    # what regularisation may cost is far below what the search gains here
    assert (
        visits_per_token(trace.expert_ids, found.expert_to_rank, topology) <= visits_per_token(trace.expert_ids, greedy, topology)
    ).all()


def test_planted_groups_are_found() -> None:
    groups = np.random.default_rng(0).permutation(64).reshape(8, 8)
    tokens = groups[np.random.default_rng(1).integers(8, size=500)]
    chosen = np.random.default_rng(2).permuted(tokens, axis=1)[:, :4]
    layout = Placer(Topology(8)).place(RoutingTrace(chosen[None], 64))
    assert layout.metrics(RoutingTrace(chosen[None], 64)).devices_per_token == 1.0
    assert all(len(set(layout.expert_to_rank[0][group])) == 1 for group in groups)


def test_nodes_count_once_per_token_and_at_their_price() -> None:
    trace = random_trace(5, 8, 400, 16, 4)
    found = {c: Placer(Topology(4, 2, c)).place(trace) for c in (1.0, 50.0)}
    metrics = {c: layout.metrics(trace) for c, layout in found.items()}
    assert metrics[50.0].nodes_per_token < metrics[1.0].nodes_per_token

    def paid(layout_for: float, price: float) -> float:
        return metrics[layout_for].devices_per_token + price * metrics[layout_for].nodes_per_token

    assert paid(50.0, 50.0) < paid(1.0, 50.0)
    for c, layout in found.items():
        assert visits_per_token(trace.expert_ids, layout.expert_to_rank, layout.topology).mean() == pytest.approx(paid(c, c))


# --- the same everywhere ---------------------------------------------------------------------------------------------


def test_equal_arguments_give_equal_layouts_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(1, 5, 200, 20, 3)
    first = Placer(Topology(4, 2, 2.0), seed=3).spectrum(trace, 4)
    monkeypatch.setattr(connectivity.os, "sched_getaffinity", lambda pid: {0})
    assert Placer(Topology(4, 2, 2.0), seed=3).spectrum(trace, 4) == first
    assert Placer(Topology(4, 2, 2.0), seed=4).spectrum(trace, 4) != first


def test_layers_do_not_disturb_each_other() -> None:
    trace = random_trace(1, 3, 150, 16, 3)
    problems = problems_of(trace, Topology(4), REGULARISATIONS[0])
    together = connectivity.connectivity_layers(problems, Search())
    assert (together[2] == connectivity.connectivity_layers(problems[2:], Search())[0]).all()


@pytest.mark.parametrize("limit", [0.0, 1e-9, 0.05])
def test_out_of_time_the_best_so_far_is_a_valid_layout(limit: float) -> None:
    trace = random_trace(2, 3, 400, 60, 4)
    topology = Topology(8, 4, 2.0)
    placer = Placer(topology, time_limit_s=limit)
    for layout in (placer.place(trace), *placer.spectrum(trace, 3)):
        assert (np.sort(layout.experts_per_rank()) == np.sort(rank_capacities(60, 8))).all()
    if limit < 0.01:
        assert placer.place(trace) == Placer(topology, "greedy").place(trace)


def test_bars_are_shown_on_request_only(capsys: pytest.CaptureFixture[str]) -> None:
    trace = random_trace(2, 2, 50, 12, 3)
    Placer(Topology(3)).spectrum(trace, 2)
    assert capsys.readouterr().err == ""
    Placer(Topology(3), progress=True).spectrum(trace, 2)
    shown = capsys.readouterr().err
    assert "placing, start 2 of 2" in shown and "trading traffic for balance" in shown


def test_an_error_or_interrupt_cancels_what_has_not_begun() -> None:
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.01)
        if item == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        connectivity.over_layers(work, range(1000))
    assert len(begun) < 100


def test_the_search_runs_where_nothing_can_be_cached() -> None:
    code = """
import sys, cap_hf
assert "numba" not in sys.modules  # loaded by those who search
from numba.core import caching
caching.CacheImpl._locator_classes = []
from cap_hf._compiled import compiled
assert compiled(lambda x: x + 1)(2) == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- regularisation --------------------------------------------------------------------------------------------------


def test_regularisation_is_the_one_that_serves_held_out_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in score says which one is best: only a sure advantage moves away from the first."""
    trace = RoutingTrace(random_trace(0, 2, 90, 12, 3).expert_ids, 12, request_lengths=[30, 20, 35, 5])
    calls: list[int] = []

    def scores(advantage: list[float]) -> None:
        calls.clear()

        def visits(ids: np.ndarray, ranks: np.ndarray, topology: Topology) -> np.ndarray:
            calls.append(ids.shape[1])
            fold, choice = divmod(len(calls) - 1, len(REGULARISATIONS))
            return np.full(len(ids), 3.0) - (advantage[fold] if choice == 2 else 0.0)

        monkeypatch.setattr(connectivity, "visits_per_token", visits)

    scores([0.1, 0.1, 0.2])
    assert choose_regularisation(trace, Topology(3), Search()) == REGULARISATIONS[2]
    assert calls == [35] * 3 + [20] * 3 + [35] * 3  # requests 0 and 3, 1, 2 held out in turn, each choice tried
    scores([0.9, -0.2, -0.2])
    assert choose_regularisation(trace, Topology(3), Search()) == REGULARISATIONS[0]


def test_regularisation_is_tried_on_what_was_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request uses experts of its own, so that a token count tells which requests were learned."""
    ids = np.repeat(np.arange(12).reshape(3, 4), [10, 20, 40], axis=0)[None]
    learned: list[set[int]] = []
    refined = connectivity._refine_for_fold

    def spy(problem: LayerProblem, start: np.ndarray, seed: int) -> np.ndarray:
        learned.append(set(problem.ids.ravel().tolist()))
        return refined(problem, start, seed)

    monkeypatch.setattr(connectivity, "_refine_for_fold", spy)
    choose_regularisation(RoutingTrace(ids, 12, request_lengths=[10, 20, 40]), Topology(3), Search())
    everything = set(range(12))
    assert learned[::3] == [everything - set(range(4 * fold, 4 * fold + 4)) for fold in range(3)]


@pytest.mark.parametrize("lengths", [[90], [40, 50], [0, 0, 90], [45, 0, 0, 45]])
def test_without_requests_or_time_the_first_regularisation_stays(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    trace = RoutingTrace(random_trace(0, 2, 90, 12, 3).expert_ids, 12, request_lengths=lengths)
    monkeypatch.setattr(connectivity, "refine", lambda *arguments: pytest.fail("nothing can be held out"))
    assert choose_regularisation(trace, Topology(3), Search()) == REGULARISATIONS[0]
    three = RoutingTrace(trace.expert_ids, 12, request_lengths=[30] * 3)
    assert choose_regularisation(three, Topology(3), Search(deadline=0.0)) == REGULARISATIONS[0]


def test_attraction_decides_where_tokens_do_not() -> None:
    """Tokens of one expert visit one rank anywhere, so that only their pairs, seen in one token each, can speak."""
    ids = np.full((1, 40, 2), -1)
    ids[0, :, 0] = np.arange(40) % 8
    ids[0, :4] = [[0, 5], [1, 4], [2, 7], [3, 6]]
    problem = problem_of(RoutingTrace(ids, 8), Topology(4), 5.0)
    found = refine(problem, np.repeat(np.arange(4), 2), 0)
    assert all(found[i] == found[j] for i, j in ((0, 5), (1, 4), (2, 7), (3, 6)))


# --- the spectrum ----------------------------------------------------------------------------------------------------


@given(SEEDS, st.sampled_from([Topology(1), Topology(3), Topology(4, 2, 5.0), Topology(8, 2, 1.5)]), st.integers(1, 12))
@settings(max_examples=12, deadline=None)
def test_spectrum_is_monotone_and_undominated(seed: int, topology: Topology, num_placements: int) -> None:
    trace = random_trace(seed, 3, 120, 20, 3)
    placer = Placer(topology)
    spectrum = placer.spectrum(trace, num_placements)
    visits = np.array([visits_per_token(trace.expert_ids, layout.expert_to_rank, topology) for layout in spectrum])
    imbalance = np.array([layout.metrics(trace).load_imbalance_by_layer for layout in spectrum])
    assert len(spectrum) == num_placements
    assert (np.diff(visits, axis=0) >= 0).all() and (np.diff(imbalance, axis=0) <= 0).all()
    for before, after in itertools.pairwise(range(num_placements)):
        worse, better = visits[after].mean() > visits[before].mean(), imbalance[after].mean() < imbalance[before].mean()
        assert (worse and better) or spectrum[before] == spectrum[after]
    assert visits[0] == pytest.approx(visits_per_token(trace.expert_ids, placer.place(trace).expert_to_rank, topology))
    for layout in spectrum:
        assert (np.sort(layout.experts_per_rank()) == np.sort(rank_capacities(20, topology.num_ranks))).all()


def test_more_placements_than_there_are_repeat_themselves() -> None:
    trace = random_trace(0, 1, 100, 8, 2)
    spectrum = Placer(Topology(4)).spectrum(trace, 200)
    assert len(spectrum) == 200 and 2 < len({layout.fingerprint for layout in spectrum}) < 200


def test_spectrum_of_tokens_with_one_expert_is_balanced_from_the_start() -> None:
    ids = np.random.default_rng(0).choice(16, size=(1, 2000, 1), p=np.arange(1, 17) / 136)
    spectrum = Placer(Topology(4)).spectrum(RoutingTrace(ids, 16), 3)
    metrics = [layout.metrics(RoutingTrace(ids, 16)) for layout in spectrum]
    assert all(m.devices_per_token == 1.0 and m.load_imbalance < 1.05 for m in metrics)


def test_hull_worked_by_hand() -> None:
    visits = np.array([2.0, 1.9, 2.0, 2.2, 2.4, 2.3, 3.0])
    imbalance = np.array([2.0, 1.0, 1.9, 1.5, 1.2, 1.6, 1.2])
    # 1 sends less than 0 and is out, 2 is 0 at better balance, 5 lies above the line from 3 to 4, 6 costs more than 4
    assert lower_hull(visits, imbalance).tolist() == [2, 3, 4]
    assert lower_hull(np.array([2.0, 2.1, 2.2]), np.array([2.0, 1.9, 1.0])).tolist() == [0, 2]  # 1 above the line from 0 to 2
    assert lower_hull(np.array([2.0]), np.array([1.5])).tolist() == [0]


@pytest.mark.parametrize(
    ("num_placements", "picked"), [(1, [0]), (2, [0, 5]), (3, [0, 3, 5]), (4, [0, 2, 4, 5]), (6, [0, 1, 2, 3, 4, 5]), (7, None)]
)
def test_picks_worked_by_hand(num_placements: int, picked: list[int] | None) -> None:
    values = np.array([10.0, 9.9, 7.0, 5.0, 3.0, 0.0])
    found = pick_along(values, num_placements).tolist()
    assert found == picked if picked else (found[0], found[-1], sorted(found)) == (0, 5, found)


# --- odd input -------------------------------------------------------------------------------------------------------

ODD = {
    "experts never used": np.random.default_rng(0).integers(0, 3, size=(2, 50, 1)) * 2,
    "all tokens on one expert": np.zeros((2, 50, 1), dtype=int),
    "everything pruned": np.full((1, 20, 3), -1),
    "one token": np.array([[[4, 1, 2]]]),
    "one layer without routing": np.stack([np.full((30, 2), -1), np.tile([[0, 1]], (30, 1))]),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("topology", [Topology(1), Topology(4), Topology(4, 2, 3.0), Topology(16)])
def test_odd_traces_get_a_sensible_layout(name: str, topology: Topology) -> None:
    trace = RoutingTrace(ODD[name], 16)
    spectrum = Placer(topology).spectrum(trace, 3)
    for layout in (Placer(topology).place(trace), *spectrum):
        assert (layout.experts_per_rank() == 16 // topology.num_ranks).all()
    if name == "experts never used" and topology.num_ranks == 4:
        assert spectrum[-1].metrics(trace).load_imbalance < 1.8  # three used experts on four ranks: 4/3 is the floor


def test_uneven_60_experts_on_8_ranks_in_two_nodes() -> None:
    trace = random_trace(3, 2, 200, 60, 4)
    for layout in Placer(Topology(8, 4, 3.0)).spectrum(trace, 3):
        assert np.sort(layout.experts_per_rank()).tolist() == [[7, 7, 7, 7, 8, 8, 8, 8]] * 2


def test_64_ranks_of_256_experts() -> None:
    trace = random_trace(3, 1, 300, 256, 8)
    layout = Placer(Topology(64, 8, 4.0), num_starts=1).place(trace)
    assert (layout.experts_per_rank() == 4).all()
    greedy = Placer(Topology(64, 8, 4.0), "greedy").place(trace)
    assert layout.metrics(trace).nodes_per_token < greedy.metrics(trace).nodes_per_token


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_starts": 0}, "num_starts is 0; it must be an integer, 1 or more"),
        ({"num_starts": 1.5}, "num_starts is 1.5"),
        ({"seed": "1"}, "seed is '1'; it must be an integer, 0 or more"),
        ({"time_limit_s": -1.0}, "time_limit_s is -1.0; it must be 0 or more"),
        ({"time_limit_s": float("nan")}, "time_limit_s is nan"),
        ({"time_limit_s": "3"}, "time_limit_s is '3'"),
    ],
)
def test_bad_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placer(Topology(4), **arguments)


@pytest.mark.parametrize("num_placements", [0, -2, 1.5, "2"])
def test_bad_numbers_of_placements_are_refused(num_placements: Any) -> None:
    with pytest.raises(ValueError, match=f"num_placements is {num_placements!r}; it must be an integer, 1 or more"):
        Placer(Topology(4)).spectrum(random_trace(0, 1, 20, 12, 2), num_placements)


@pytest.mark.parametrize("seed", [2**31, 2**63, 2**80, np.int64(2**62)])
def test_large_seeds_are_seeds_too(seed: int) -> None:
    trace = RoutingTrace(random_trace(0, 1, 60, 12, 2).expert_ids, 12, request_lengths=[20] * 3)
    assert Placer(Topology(3), seed=seed).spectrum(trace, 2) == Placer(Topology(3), seed=seed).spectrum(trace, 2)


@pytest.mark.parametrize("call", ["place", "spectrum"])
def test_more_ranks_than_experts_is_refused_before_anything_is_counted(call: str) -> None:
    with pytest.raises(ValueError, match="12 experts per layer for 16 ranks; every rank needs an expert"):
        getattr(Placer(Topology(16)), call)(random_trace(0, 1, 20, 12, 2))


# --- real routing ----------------------------------------------------------------------------------------------------


SAME = 5e-3  # devices per token: what one proposal that a CPU rounds differently can change; on one machine nothing does


def real(data_dir: Path, name: str, num_experts: int) -> RoutingTrace:
    with np.load(data_dir / "traces" / f"{name}_topk.npz", allow_pickle=False) as arrays:
        lengths = arrays.get("seq_lens")
        return RoutingTrace(arrays["topk_ids"].astype(int), num_experts, request_lengths=lengths)


def halves(trace: RoutingTrace) -> tuple[RoutingTrace, RoutingTrace]:
    middle = trace.num_tokens // 2
    return trace.select_tokens(slice(0, middle)), trace.select_tokens(slice(middle, None))


@pytest.mark.parametrize(
    ("task", "greedy", "devices", "balanced"),
    [("summary", 3.656, 3.161, (3.428, 1.192)), ("intent", 3.458, 2.865, (3.187, 1.112))],
)
def test_real_deepseek_on_held_out_tokens(data_dir: Path, task: str, greedy: float, devices: float, balanced: tuple[float, float]) -> None:
    learn, score = halves(real(data_dir, f"deepseek_v2_lite/esft_{task}", 64))
    assert Placer(Topology(8), "greedy").place(learn).metrics(score).devices_per_token == pytest.approx(greedy, abs=1e-3)
    metrics = [layout.metrics(score) for layout in Placer(Topology(8)).spectrum(learn)]
    assert metrics[0].devices_per_token == pytest.approx(devices, abs=SAME)
    assert metrics[0].devices_per_token < 0.88 * greedy
    assert (metrics[5].devices_per_token, metrics[5].load_imbalance) == pytest.approx(balanced, abs=1e-2)
    assert metrics[5].devices_per_token < 0.94 * greedy and metrics[5].load_imbalance <= 1.25


def test_real_qwen3_on_other_text(data_dir: Path) -> None:
    learn, score = (real(data_dir, f"qwen3_30b_a3b/{name}_prefill", 128) for name in ("ep_states", "token_distri_8"))
    devices = {
        name: Placer(Topology(8), name).place(learn).metrics(score).devices_per_token for name in ("sequential", "greedy", "connectivity")
    }
    assert 5.33 < devices["sequential"] < 5.37  # the paper's Default
    assert devices["connectivity"] == pytest.approx(3.390, abs=SAME)
    assert devices["connectivity"] < 0.9 * devices["greedy"]


def test_real_nodes_keep_tokens_together(data_dir: Path) -> None:
    learn, score = halves(real(data_dir, "deepseek_v2_lite/esft_summary", 64))
    topology = Topology(8, 4, 5.0)
    greedy, found = (Placer(topology, method).place(learn).metrics(score) for method in ("greedy", "connectivity"))
    assert (found.devices_per_token, found.nodes_per_token) == pytest.approx((3.201, 1.658), abs=SAME)
    assert found.devices_per_token < 0.88 * greedy.devices_per_token and found.nodes_per_token < 0.92 * greedy.nodes_per_token
