"""Pruning rules against a slow exact-arithmetic reference, their promises, and real traces.

Letters: ``T`` tokens, ``K`` experts per token, ``E`` experts, ``R`` ranks. Reference weights are small integers, so that
ties and equalities are frequent and exact: the reference needs no tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cap_hf import ExpertLayout, RoutingTrace, Topology, pruning
from cap_hf.corpora import find_data_dir
from cap_hf.metrics import remote_rows_per_token
from cap_hf.pruning import prune_devices, prune_experts

TOPOLOGIES = [Topology(4), Topology(4, 2, 2.0), Topology(6, 3, 1.5), Topology(8, 2, 3.0), Topology(8, 4, 5.0), Topology(64, 8, 4 / 3)]
SOLVERS = ["greedy", "exact"]
quick = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="module", autouse=True, params=["compiled loops", "tensor operations"])
def _implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds for both; the second is what an accelerator runs."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tensor operations":
            patch.setattr(pruning, "_runs_compiled", lambda tensor: False)
        yield


@dataclass
class Case:
    """Tokens of integer weights; ``threshold`` is exact, ``scale`` multiplies what the tested code sees."""

    topology: Topology
    ids: list[list[int]]
    weights: list[list[int]]
    expert_to_rank: list[int]
    sources: list[int]
    threshold: Fraction
    scale: float = 1.0
    hierarchical: bool = False

    def keep(self, solver: str = "greedy", dtype: torch.dtype = torch.float32) -> torch.Tensor:
        weights = (torch.tensor(self.weights, dtype=torch.float64) * self.scale).to(dtype)
        ids, ranks, sources = (torch.tensor(values) for values in (self.ids, self.expert_to_rank, self.sources))
        return prune_devices(ids, weights, ranks, sources, self.topology, float(self.threshold), solver, self.hierarchical)

    def ranks(self, token: int) -> dict[int, Fraction]:
        """Share of each distinct rank of one token."""
        pairs = [(i, w) for i, w in zip(self.ids[token], self.weights[token], strict=True) if i >= 0]
        total = sum(w for _, w in pairs)
        shares: dict[int, Fraction] = {}
        for i, w in pairs:
            rank = self.expert_to_rank[i]
            shares[rank] = shares.get(rank, Fraction(0)) + Fraction(w, total or 1)
        return shares

    def cost(self, token: int, ranks: set[int]) -> Fraction:
        """Of visiting these ranks; hierarchically, each further rank of a node costs 1."""
        source, size = self.sources[token], self.topology.ranks_per_node
        near = [rank for rank in ranks if rank // size == source // size and rank != source]
        far = [rank for rank in ranks if rank // size != source // size]
        full_price = len({rank // size for rank in far}) if self.hierarchical else len(far)
        inter = Fraction(self.topology.inter_node_cost).limit_denominator(1000)
        return len(near) + full_price * inter + (len(far) - full_price)

    def kept_ranks(self, token: int, keep: torch.Tensor) -> set[int]:
        return {self.expert_to_rank[i] for i, k in zip(self.ids[token], keep[token].tolist(), strict=True) if k}


def greedy_reference(case: Case, token: int) -> set[int]:
    """Own rank, then by share per added cost, cheaper and lower ranks first among equals, until 1 - p is reached."""
    shares, source = case.ranks(token), case.sources[token]
    if not any(shares.values()):
        return set(shares)
    kept = {source} & set(shares)
    while sum(shares[d] for d in kept) < 1 - case.threshold:
        added = {d: case.cost(token, kept | {d}) - case.cost(token, kept) for d in shares if d not in kept}
        kept.add(min(added, key=lambda d: (-shares[d] / added[d], added[d], d)))
    return kept


def exact_reference(case: Case, token: int) -> set[int]:
    """Cheapest of all sets that hold the own rank and 1 - p; then the larger share; then the first in binary order."""
    shares, source = case.ranks(token), case.sources[token]
    if not any(shares.values()):
        return set(shares)
    order = sorted(shares, key=lambda d: (case.cost(token, {d}), d))
    sets = [{d for bit, d in enumerate(order) if s >> bit & 1} | ({source} & set(order)) for s in range(1 << len(order))]
    enough = [ranks for ranks in sets if sum(shares[d] for d in ranks) >= 1 - case.threshold]
    return min(enough, key=lambda ranks: (case.cost(token, ranks), -sum(shares[d] for d in ranks)))


def experts_reference(weights: list[int], threshold: Fraction) -> list[bool]:
    """Drop from the worst, the later slot of equals first, while what is dropped stays below p of the sum."""
    keep, dropped = [True] * len(weights), 0
    for slot in sorted(range(len(weights)), key=lambda k: (weights[k], -k)):
        dropped += weights[slot]
        if not sum(weights) or dropped >= threshold * sum(weights):
            break
        keep[slot] = False
    return keep


@st.composite
def cases(draw: st.DrawFn) -> Case:
    topology = draw(st.sampled_from(TOPOLOGIES))
    num_experts, top_k, num_tokens = 16, draw(st.integers(1, 7)), draw(st.integers(1, 4))
    ids = draw(st.lists(st.permutations(range(num_experts)), min_size=num_tokens, max_size=num_tokens))
    pruned = st.lists(st.sampled_from([False] * 7 + [True]), min_size=top_k, max_size=top_k)
    row = st.lists(st.integers(0, 20), min_size=top_k, max_size=top_k)
    rank = st.integers(0, topology.num_ranks - 1) if topology.num_ranks < 64 else st.sampled_from([0, 1, 2, 9, 10, 63])
    return Case(
        topology=topology,
        ids=[[-1 if gone else i for i, gone in zip(token, draw(pruned), strict=False)] for token in ids],
        weights=[draw(row) for _ in range(num_tokens)],
        expert_to_rank=draw(st.lists(rank, min_size=num_experts, max_size=num_experts)),
        sources=[draw(rank) for _ in range(num_tokens)],
        threshold=Fraction(draw(st.integers(1, 99)), 100),
        scale=draw(st.sampled_from([1.0, 1 / 3, 1e-4, 1e4, 2.0**-20])),
        hierarchical=draw(st.booleans()),
    )


def worked_example(threshold: str, weights: tuple[int, ...] = (4, 6, 15, 5, 25, 15, 10, 20)) -> Case:
    """Method section 3 with two experts per rank: own 0.1, same node 0.2, other node 0.4 and 0.3."""
    ranks = [0, 0, 1, 1, 2, 2, 3, 3]
    return Case(Topology(4, 2, 2.0), [list(range(8))], [list(weights)], ranks, [0], Fraction(threshold), scale=0.01)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 0.003, 77.0])
def test_worked_example_keeps_exactly_seven_tenths(solver, scale):
    case = worked_example("0.3")
    case.scale = scale
    assert case.keep(solver).tolist() == [[True] * 6 + [False] * 2]


def test_a_tie_goes_to_the_cheaper_rank():
    # 0.2 / 1 ties with 0.4 / 2; 0.1 + 0.2 is enough, and so would 0.1 + 0.4 be
    case = worked_example("0.75")
    assert case.kept_ranks(0, case.keep()) == {0, 1}


@pytest.mark.parametrize(("lead", "first"), [(5e-7, 1), (1e-5, 2)])
def test_ratios_tie_within_a_millionth(lead, first):
    # other node ahead by ``lead`` in share per cost; p lets one remote rank of the two suffice
    weights = torch.tensor([[0.1, 0.3 - 2 * lead / 3, 0.6 + 2 * lead / 3]])
    keep = prune_devices(torch.tensor([[0, 1, 2]]), weights, torch.arange(4), torch.tensor([0]), Topology(4, 2, 2.0), 0.65)
    assert keep.tolist() == [[True, first == 1, first == 2]]


def test_equal_ranks_tie_by_number_also_through_a_chain():
    third = 1 / 3
    weights = torch.tensor([[third + 8e-7, third, third - 8e-7]])  # on ranks 3, 2, 1: neighbours tie, the ends do not
    keep = prune_devices(torch.tensor([[3, 2, 1]]), weights, torch.arange(4), torch.tensor([0]), Topology(4), 0.69)
    assert keep.tolist() == [[False, False, True]]


@given(cases())
@quick
def test_greedy_equals_the_reference(case):
    keep = case.keep("greedy")
    assert [case.kept_ranks(t, keep) for t in range(len(keep))] == [greedy_reference(case, t) for t in range(len(keep))]


@given(cases())
@quick
def test_exact_equals_brute_force(case):
    keep = case.keep("exact")
    assert [case.kept_ranks(t, keep) for t in range(len(keep))] == [exact_reference(case, t) for t in range(len(keep))]


@given(cases())
@quick
def test_exact_never_costs_more_and_equals_greedy_where_costs_are_equal(case):
    greedy, exact = case.keep("greedy"), case.keep("exact")
    for token in range(len(greedy)):
        costs = [case.cost(token, case.kept_ranks(token, keep)) for keep in (exact, greedy)]
        assert costs[0] <= costs[1]
        if case.topology.inter_node_cost == 1:
            assert costs[0] == costs[1]


def test_a_node_that_is_paid_for_makes_its_other_ranks_cost_one():
    case = Case(Topology(4, 2, 3.0), [[0, 1, 2, 3]], [[90, 138, 420, 352]], [0, 1, 2, 3], [0], Fraction("0.15"))
    # shares per cost: 0.140 for rank 2, 0.138 for rank 1, 0.117 for rank 3; 0.85 must stay
    assert case.kept_ranks(0, case.keep()) == {0, 1, 2, 3}
    case.hierarchical = True  # once rank 2 is paid for, rank 3 has 0.352 per cost, and both are enough
    assert case.kept_ranks(0, case.keep()) == {0, 2, 3}


def test_one_way_to_a_node_changes_the_cheapest_set():
    case = Case(Topology(8, 2, 3.0), [[0, 1, 2, 3, 4]], [[10, 22, 22, 26, 20]], [0, 2, 3, 4, 6], [0], Fraction("0.46"))
    assert case.kept_ranks(0, case.keep("exact")) == {0, 2, 4}  # two far ranks are enough; these have the largest share
    case.hierarchical = True
    assert case.kept_ranks(0, case.keep("exact")) == {0, 2, 3}  # 3 + 1 in one node; 3 + 3 in two


def test_equal_costs_go_to_the_larger_share_also_where_cost_sums_round():
    # own 1, near 1000, then 4 near ranks of 30 or 3 far ones of 41: 1 + 4 = 1 + 3 * 4/3, but not in float32
    weights = torch.tensor([[1.0, 1000, 30, 30, 30, 30, 41, 41, 41]])
    keep = prune_devices(torch.arange(9)[None], weights, torch.arange(9), torch.tensor([0]), Topology(12, 6, 4 / 3), 123 / 1244, "exact")
    assert keep.tolist() == [[True, True, False, False, False, False, True, True, True]]


def test_equal_costs_and_shares_go_to_the_cheaper_ranks_also_where_shares_round():
    a, b = torch.cartesian_prod(torch.arange(1, 31), torch.arange(1, 31)).float().T
    weights = torch.stack([2 * (a + b), a + b, a, b], dim=1)  # own half; a far rank, or two near ones at the same price
    ids = torch.tensor([0, 2, 1, 3]).expand(900, 4)
    keep = prune_devices(ids, weights, torch.tensor([0, 1, 3, 2]), torch.zeros(900).long(), Topology(6, 3, 2.0), 0.25, "exact")
    assert torch.equal(keep, torch.tensor([True, False, True, True]).expand(900, 4))


@given(cases(), st.sampled_from(SOLVERS), st.randoms(use_true_random=False))
@quick
def test_order_of_slots_does_not_matter(case, solver, random):
    keep = case.keep(solver)
    for token in range(len(case.ids)):
        order = random.sample(range(len(case.ids[0])), len(case.ids[0]))
        case.ids[token], case.weights[token] = ([row[k] for k in order] for row in (case.ids[token], case.weights[token]))
        keep[token] = keep[token][order]
    assert torch.equal(case.keep(solver), keep)


@given(st.integers(0, 2**32 - 1), st.sampled_from(TOPOLOGIES), st.floats(0, 1, exclude_max=True), st.sampled_from(SOLVERS))
@quick
def test_whole_ranks_and_enough_score_for_any_scores(seed, topology, threshold, solver):
    random = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand((20, 128), generator=random).pow(4).topk(8, dim=1)
    expert_to_rank = torch.randint(topology.num_ranks, (128,), generator=random)
    source = torch.randint(topology.num_ranks, (20,), generator=random)
    keep = prune_devices(ids, weights, expert_to_rank, source, topology, threshold, solver)
    ranks = expert_to_rank[ids]
    same = ranks[:, :, None] == ranks[:, None, :]
    assert not (same & (keep[:, :, None] != keep[:, None, :])).any()  # never half a rank
    assert keep[ranks == source[:, None]].all()
    share = torch.where(keep, weights.double(), 0).sum(1) / weights.double().sum(1)
    assert (share >= 1 - threshold - 1.5e-6).all()
    assert (share > 0).all()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("threshold", [0.999999, 1 - 1e-12])
def test_a_threshold_just_below_one_keeps_one_rank(solver, threshold):
    ids, topology = torch.tensor([[0, 1, 2, 3]] * 3), Topology(4, 2, 2.0)
    weights = torch.tensor([[0.1, 0.2, 0.5, 0.2], [0.1, 0.2, 0.5, 0.2], [0.0, 0.2, 0.5, 0.3]])
    expert_to_rank = torch.tensor([0, 1, 3, 3])
    # own rank with a score; no expert on the own rank; own rank without a score, which alone would leave nothing
    keep = prune_devices(ids, weights, expert_to_rank, torch.tensor([0, 2, 0]), topology, threshold, solver)
    best_per_cost, cheapest = [True, False, True, True], [True, True, False, False]
    last = best_per_cost if solver == "greedy" else cheapest
    assert keep.tolist() == [[True, False, False, False], [False, False, True, True], last]


@pytest.mark.parametrize("solver", SOLVERS)
def test_nothing_is_pruned_at_threshold_zero_or_on_one_rank(solver):
    ids = torch.tensor([[0, 1, -1], [3, -1, 2]])
    weights = torch.tensor([[1.0, 0.0, 5.0], [float("nan"), 1.0, 1e-30]])  # looked at by neither
    ranks = torch.tensor([0, 1, 2, 3])
    assert torch.equal(prune_devices(ids, weights, ranks, torch.tensor([0, 1]), Topology(4), 0, solver), ids >= 0)
    assert torch.equal(
        prune_devices(ids, weights, torch.zeros(4, dtype=torch.long), torch.zeros(2).long(), Topology(1), 0.9, solver), ids >= 0
    )
    assert prune_experts(weights, 0).all()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("row", [[0.0, 0.0, 0.0], [float("nan"), 1.0, 2.0], [float("inf"), 1.0, 2.0]])
def test_a_token_without_usable_scores_keeps_everything(solver, row):
    weights = torch.tensor([row, [0.8, 0.1, 0.1]])
    ids = torch.tensor([[0, 1, -1], [0, 1, 2]])
    weights[0, 2] = 0.0 if row[0] == 0 else 2.0
    keep = prune_devices(ids, weights, torch.arange(4), torch.tensor([3, 3]), Topology(4), 0.5, solver)
    assert keep.tolist() == [[True, True, False], [True, False, False]]
    assert prune_experts(weights, 0.5).tolist() == [[True, True, True], [True, False, False]]


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_pruned_slot_counts_nothing(solver):
    # expert 0 sits on the token's own rank: a pruned slot must not lend it the weight that still stands there
    ids, weights = torch.tensor([[-1, 1, 2]]), torch.tensor([[100.0, 0.6, 0.4]])
    keep = prune_devices(ids, weights, torch.arange(4), torch.tensor([0]), Topology(4), 0.3, solver)
    assert keep.tolist() == [[False, True, True]]
    assert prune_devices(ids, weights, torch.arange(4), torch.tensor([0]), Topology(4), 0.4, solver).tolist() == [[False, True, False]]


@given(
    st.lists(st.lists(st.integers(0, 20), min_size=6, max_size=6), min_size=1, max_size=4),
    st.integers(1, 99),
    st.sampled_from([1, 1 / 3, 1e4]),
)
@quick
def test_experts_equal_the_reference(weights, percent, scale):
    keep = prune_experts(torch.tensor(weights) * scale, percent / 100)
    assert keep.tolist() == [experts_reference(row, Fraction(percent, 100)) for row in weights]


def test_experts_reach_the_threshold_but_do_not_pass_it():
    weights = torch.tensor([[0.4, 0.1, 0.3, 0.2]])
    assert prune_experts(weights, 0.3).tolist() == [[True, False, True, True]]  # 0.1 + 0.2 is not below 0.3
    assert prune_experts(weights, 0.31).tolist() == [[True, False, True, False]]
    assert prune_experts(weights, 1 - 1e-9).tolist() == [[True, False, False, False]]
    assert prune_experts(torch.full((1, 4), 0.25), 0.3).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_computed_in_float32(dtype):
    random = torch.Generator().manual_seed(0)
    weights, ids = torch.rand((1000, 64), generator=random).pow(4).to(dtype).topk(8, dim=1)
    source = torch.arange(1000) % 8
    for solver in SOLVERS:
        keeps = [prune_devices(ids, w, torch.arange(64) // 8, source, Topology(8, 4, 3.0), 0.3, solver) for w in (weights, weights.float())]
        assert torch.equal(*keeps)
        assert not keeps[0].all()
    assert torch.equal(prune_experts(weights, 0.3), prune_experts(weights.float(), 0.3))


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_tokens(solver):
    keep = prune_devices(torch.zeros(0, 8).long(), torch.zeros(0, 8), torch.arange(8), torch.zeros(0).long(), Topology(8), 0.3, solver)
    assert keep.shape == (0, 8)
    assert keep.dtype == torch.bool
    assert prune_experts(torch.zeros(0, 8), 0.3).shape == (0, 8)


def test_exact_is_the_same_in_chunks(monkeypatch):
    random = torch.Generator().manual_seed(0)
    weights, ids = torch.rand((100, 64), generator=random).topk(6, dim=1)
    arguments = (ids, weights, torch.arange(64) // 8, torch.arange(100) % 8, Topology(8, 4, 3.0), 0.3, "exact")
    whole = prune_devices(*arguments)
    monkeypatch.setattr(pruning, "_runs_compiled", lambda tensor: False)
    monkeypatch.setattr(pruning, "_CHUNK_BYTES", 7 * pruning._BYTES_PER_SUBSET * 2**6)  # 7 tokens, and 2 in the last
    assert torch.equal(prune_devices(*arguments), whole)


def test_inputs_stay_and_gradients_are_not_needed():
    ids, weights = torch.tensor([[0, -1, 2]]), torch.tensor([[0.5, 0.4, 0.1]], requires_grad=True)
    copies = ids.clone(), weights.detach().clone()
    for mode in (torch.inference_mode(), torch.enable_grad()):  # tables made in the first serve the second
        with mode:
            keep = prune_devices(ids, weights, torch.arange(4), torch.tensor([1]), Topology(4, 2, 7.0), 0.3)
            assert keep.tolist() == [[True, False, False]]
            assert not keep.requires_grad
    assert torch.equal(ids, copies[0])
    assert torch.equal(weights.detach(), copies[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator on this machine")
@pytest.mark.parametrize("solver", SOLVERS)
def test_an_accelerator_agrees(solver):
    random = torch.Generator().manual_seed(0)
    weights, ids = torch.randint(1, 20, (2000, 64), generator=random).float().topk(8, dim=1)
    arguments = [ids, weights, torch.arange(64) // 8, torch.arange(2000) % 8]
    there = prune_devices(*(a.cuda() for a in arguments), Topology(8, 4, 3.0), 0.3, solver)
    assert torch.equal(there.cpu(), prune_devices(*arguments, Topology(8, 4, 3.0), 0.3, solver))
    assert torch.equal(prune_experts(weights.cuda(), 0.3).cpu(), prune_experts(weights, 0.3))


@pytest.mark.parametrize("threshold", [-0.1, 1.0, 1.5, float("nan"), float("inf")])
def test_thresholds_outside_the_range_are_refused(threshold):
    ids = torch.zeros(1, 2).long()
    for call in (
        lambda: prune_experts(torch.ones(1, 2), threshold),
        lambda: prune_devices(ids, torch.ones(1, 2), torch.zeros(1).long(), torch.zeros(1).long(), Topology(2), threshold),
    ):
        with pytest.raises(ValueError, match=rf"threshold is {threshold}; it must be in \[0, 1\)"):
            call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_ids": torch.zeros(5).long()}, r"expert_ids has shape \(5,\); it must be \(tokens, experts per token\)"),
        ({"expert_weights": torch.ones(5, 2)}, r"expert_weights has shape \(5, 2\); it must equal that of expert_ids, \(5, 3\)"),
        ({"expert_to_rank": torch.zeros(2, 8).long()}, r"expert_to_rank has shape \(2, 8\); .* pass one layer"),
        ({"source_rank": torch.zeros(4).long()}, r"source_rank has shape \(4,\); it must hold the rank of each token, \(5,\)"),
        ({"solver": "best"}, "unknown solver 'best'; choose one of greedy, exact"),
        (
            {"expert_ids": torch.zeros(5, 13).long(), "expert_weights": torch.ones(5, 13), "solver": "exact"},
            "13 experts per token; the exact solver tries .* at most 12: use 'greedy'",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    arguments = {
        "expert_ids": torch.zeros(5, 3).long(),
        "expert_weights": torch.ones(5, 3),
        "expert_to_rank": torch.zeros(8).long(),
        "source_rank": torch.zeros(5).long(),
        "topology": Topology(8),
        "threshold": 0.0,
    }
    with pytest.raises(ValueError, match=message):
        prune_devices(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_ids": torch.tensor([[0, 1], [2, 4]])}, "expert_ids of token 1 hold 4; they must be below 4"),
        ({"expert_to_rank": torch.tensor([0, 1, 4, 3])}, r"expert_to_rank of expert 2 is 4; it must be in \[0, 4\)"),
        ({"expert_to_rank": torch.tensor([0, -1, 2, 3])}, "expert_to_rank of expert 1 is -1"),
        ({"source_rank": torch.tensor([0, 4])}, r"source_rank of token 1 is 4; it must be in \[0, 4\)"),
        ({"source_rank": torch.tensor([-1, 1])}, "source_rank of token 0 is -1"),
    ],
)
def test_values_out_of_range_are_refused_on_a_cpu(change, message, monkeypatch):
    monkeypatch.setattr(pruning, "_runs_compiled", lambda tensor: True)
    given = {
        "expert_ids": torch.tensor([[0, 1], [2, 3]]),
        "expert_weights": torch.full((2, 2), 0.5),
        "expert_to_rank": torch.arange(4),
        "source_rank": torch.tensor([0, 1]),
    }
    with pytest.raises(ValueError, match=message):
        prune_devices(**(given | change), topology=Topology(4), threshold=0.3)


def test_expert_scores_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"expert_weights has shape \(1, 2, 3\); it must be \(tokens, experts per token\)"):
        prune_experts(torch.ones(1, 2, 3), 0.3)


@pytest.fixture(scope="module")
def real_trace() -> RoutingTrace:
    """The later half of the requests of a DeepSeek-V2-Lite trace: 3,609 tokens, 26 layers of 64 experts, top 6."""
    root = find_data_dir()
    if root is None:
        pytest.skip("no local data folder with the DeepSeek-V2-Lite traces")
    with np.load(root / "traces" / "deepseek_v2_lite" / "esft_summary_topk.npz") as arrays:
        trace = RoutingTrace(arrays["topk_ids"].astype(np.int64), 64, arrays["topk_weights"], arrays["layers"], arrays["seq_lens"])
    return trace.select(slice(trace.num_requests // 2, None))


def prune_trace(trace: RoutingTrace, topology: Topology, threshold: float, solver: str = "greedy") -> np.ndarray:
    """Ids after device pruning, experts in id order, request r on rank r mod R."""
    ranks = torch.tensor(ExpertLayout.sequential(1, trace.num_experts, topology).expert_to_rank[0])
    ids, source = torch.tensor(trace.expert_ids.astype(np.int64)), torch.tensor(trace.token_to_request % topology.num_ranks)
    weights = torch.tensor(trace.expert_weights)
    kept = [prune_devices(i, w, ranks, source, topology, threshold, solver) for i, w in zip(ids, weights, strict=True)]
    return torch.where(torch.stack(kept), ids, -1).numpy()


@pytest.mark.data
@pytest.mark.parametrize(("threshold", "rows"), [(0.0, 3.98), (0.1, 3.70), (0.3, 2.34)])
def test_rows_that_cross_on_a_real_trace(real_trace, threshold, rows):
    ids = prune_trace(real_trace, Topology(8), threshold)
    layout = ExpertLayout.sequential(real_trace.num_layers, 64, Topology(8))
    crossing = remote_rows_per_token(ids, layout.expert_to_rank, 8, real_trace.token_to_request % 8)
    assert crossing.mean() == pytest.approx(rows, abs=0.01)


@pytest.mark.data
@pytest.mark.parametrize(
    ("inter_node_cost", "threshold", "low", "high"),
    [(1.0, 0.3, 0, 0), (2.0, 0.1, 0.006, 0.010), (2.0, 0.3, 0.038, 0.047), (3.0, 0.3, 0.046, 0.056), (5.0, 0.3, 0.042, 0.052)],
)
def test_excess_of_the_greedy_on_a_real_trace(real_trace, inter_node_cost, threshold, low, high):
    topology = Topology(8, 4, inter_node_cost)
    trace = RoutingTrace(real_trace.expert_ids[::3], 64, real_trace.expert_weights[::3], None, real_trace.request_lengths)
    costs = []
    for solver in SOLVERS:
        ids = prune_trace(trace, topology, threshold, solver)
        source = trace.token_to_request % 8
        visits = np.zeros((*ids.shape[:2], 9), dtype=bool)
        np.put_along_axis(visits, np.where(ids >= 0, ids // 8, 8), True, axis=2)  # 8 experts per rank; pruned slots go to a spare one
        costs.append((visits[:, :, :8] * topology.cost_matrix[source]).sum())
    assert low <= costs[0] / costs[1] - 1 <= high
