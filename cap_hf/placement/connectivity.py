"""Placement by the exact traffic: a search over swaps of experts, every layer alone.

What is minimised is what dispatch sends: the ranks that a token visits, and ``inter_node_cost`` for each node that it visits
where there are several. (Pairwise co-activation, which the greedy follows, charges a token once per pair.) To it come

- an *attraction*: pairs of experts earn a little for sharing a rank, in proportion to the cosine of their token sets. Its
  weight is what all pairs together would earn, in visits per token.
- a *load penalty*: ``load_weight * T * sum over ranks of max(0, load / mean - 1)^2``, averaged over four equal stretches of the
  trace, so that ranks are balanced throughout it and not by chance in the sum.

A little of both is regularisation: they decide where the counted tokens leave swaps nearly equal. Learning from 500 to 2,000
tokens of one text and serving another, they save 1.4 to 2.3 % of the visits (Qwen3-30B-A3B), and cost at most 0.3 % where what is
served is like the trace. ``choose_regularisation`` settles it on held-out requests, where the trace has some.

The search anneals from the greedy placement and from random ones: while it is hot on every so-manieth token, then on all of
them; steepest descent ends it. It never returns what costs more than its start.

Letters: ``L`` layers, ``E`` experts per layer, ``K`` experts per token, ``T`` tokens, ``R`` ranks.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from cap_hf.layout import ExpertLayout
from cap_hf.metrics import jaccard_of_counts, visits_per_token
from cap_hf.placement._swaps import State, anneal, count_pairs, count_visits, descend, state_of
from cap_hf.placement.greedy import greedy_layer
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace

__all__ = [
    "REGULARISATIONS",
    "LayerProblem",
    "Regularisation",
    "Search",
    "choose_regularisation",
    "connectivity_layers",
    "over_layers",
    "problems_of",
    "refine",
]

UNIT = 1024  # what a rank visit costs, an integer so that sums are exact
HOT, WARM, COLD = 0.1, 0.025, 0.0065  # temperatures, in visits per token of an average expert: start, all tokens come in, end
PROPOSALS, FEWEST_PROPOSALS = 10, 20_000  # of an annealing: over the square of the number of experts, and for small ones
STRETCHES = 4  # of the trace, each with loads of its own
COARSE_TOKENS = 1500  # about how many tokens are looked at while it is hot
FOLDS, FOLD_LAYERS, FOLD_PROPOSALS = 3, 8, 6  # of the cross-validation


class Regularisation(NamedTuple):
    """Weights of the attraction and of the load penalty in the placement with least traffic."""

    attraction: float
    load_weight: float


TIE_WEIGHT = 1e-3  # so light a load weight that balance only decides between equals
REGULARISATIONS = (Regularisation(1.0, 0.05), Regularisation(1.0, TIE_WEIGHT), Regularisation(0.0, TIE_WEIGHT))
"""What is tried on held-out requests; the first wins unless another is surely better."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Search:
    """How hard to search.

    ``num_starts``: annealings per layer, the first from the greedy placement, the others from random ones. ``deadline``: the
    ``time.monotonic()``, in seconds, after which none begins; without one, equal arguments give equal placements everywhere.
    """

    seed: int = 0
    num_starts: int = 2
    deadline: float = math.inf
    progress: bool = False

    def in_time(self) -> bool:
        """Whether another annealing may start."""
        return time.monotonic() < self.deadline


@dataclass(frozen=True)
class LayerProblem:
    """One layer to place: ids (T, K), tokens with both experts of a pair (E, E), and how the search is regularised."""

    index: int
    ids: np.ndarray
    pair_counts: np.ndarray
    topology: Topology
    regularisation: Regularisation

    def state(self, expert_to_rank: np.ndarray, load_weight: float = 0.0, stride: int = 1) -> State:
        """What the search works on, for every ``stride``-th token; costs are in 1 / ``UNIT`` visits, summed over tokens."""
        ids = self.ids[::stride].copy()
        scale = UNIT * len(ids)
        attraction = np.rint(self.earned * (self.regularisation.attraction * scale)).astype(np.int64)
        topology = self.topology
        units = (UNIT, round(topology.inter_node_cost * UNIT) if topology.num_nodes > 1 else 0)
        ranks, nodes = expert_to_rank.copy(), topology.rank_to_node[expert_to_rank]  # not read-only: that would be compiled apart
        num_places = (topology.num_ranks, topology.num_nodes)
        return state_of(ids, ranks, nodes, num_places, units, attraction, load_weight * scale, STRETCHES)

    @cached_property
    def earned(self) -> np.ndarray:
        """What pairs earn by sharing a rank, at weight 1: the cosine of their token sets, summing to 1 over pairs, (E, E)."""
        loads = np.diag(self.pair_counts)
        cosine = self.pair_counts / np.sqrt(np.maximum(np.outer(loads, loads), 1))
        np.fill_diagonal(cosine, 0.0)
        return cosine * (2 / max(float(cosine.sum()), 1e-9))

    @cached_property
    def stretch_loads(self) -> np.ndarray:
        """Tokens of each expert in each stretch of the trace, (STRETCHES, E)."""
        bounds = -(-np.arange(STRETCHES + 1) * len(self.ids) // STRETCHES)  # rounded up, as the compiled search counts
        parts = [self.ids[start:end] for start, end in itertools.pairwise(bounds)]
        return np.stack([np.bincount(part[part >= 0], minlength=len(self.pair_counts)) for part in parts])

    def cost(self, expert_to_rank: np.ndarray, load_weight: float = 0.0) -> float:
        """What the search minimises, per token: visits, minus the pairs' earnings, plus the load penalty."""
        together = expert_to_rank[:, None] == expert_to_rank[None, :]
        num_ranks = self.topology.num_ranks
        rank_loads = np.stack([np.bincount(expert_to_rank, weights=loads, minlength=num_ranks) for loads in self.stretch_loads])
        over = np.maximum(rank_loads / max(float(rank_loads.mean()), 1e-9) - 1, 0)
        penalty = load_weight * float((over**2).sum()) / STRETCHES
        return self.visits(expert_to_rank) - self.regularisation.attraction * float(self.earned[together].sum()) / 2 + penalty

    def visits(self, expert_to_rank: np.ndarray) -> float:
        """Mean visits per token of a placement, (E,); see ``cap_hf.metrics.visits_per_token``."""
        topology = self.topology
        visits = float(count_visits(self.ids, expert_to_rank.copy(), topology.num_ranks))
        if topology.num_nodes > 1:
            nodes = topology.rank_to_node[expert_to_rank]
            visits += topology.inter_node_cost * float(count_visits(self.ids, nodes, topology.num_nodes))
        return visits / len(self.ids)

    def imbalance(self, expert_to_rank: np.ndarray) -> float:
        """Load of the busiest rank over the mean, 1 without any load."""
        loads = np.bincount(expert_to_rank, weights=np.diag(self.pair_counts), minlength=self.topology.num_ranks)
        return float(loads.max() / loads.mean()) if loads.any() else 1.0

    def greedy(self, seed: int) -> np.ndarray:
        """The paper's placement of this layer, (E,)."""
        return greedy_layer(jaccard_of_counts(self.pair_counts), self.topology, np.random.default_rng([seed, self.index]))


def problems_of(
    trace: RoutingTrace, topology: Topology, regularisation: Regularisation, layers: Iterable[int] | None = None
) -> list[LayerProblem]:
    """The layers of a trace (or some of them) as problems."""

    def problem(layer: int) -> LayerProblem:
        ids = trace.expert_ids[layer].copy()
        return LayerProblem(layer, ids, count_pairs(ids, trace.num_experts), topology, regularisation)

    return over_layers(problem, range(trace.num_layers) if layers is None else layers)


def over_layers(function: Callable[[Item], Result], items: Iterable[Item], progress: str | None = None) -> list[Result]:
    """``[function(item) for item in items]`` on as many threads as there are cores: compiled code runs without the lock."""
    items = list(items)
    threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    try:
        return list(tqdm(threads.map(function, items), desc=progress, total=len(items), disable=progress is None, leave=False))
    finally:
        threads.shutdown(cancel_futures=True)  # after an error or Ctrl-C, what has not begun never will


def refine(problem: LayerProblem, start: np.ndarray, seed: int, load_weight: float = 0.0, proposals: float = PROPOSALS) -> np.ndarray:
    """Anneal one layer from ``start`` (E,), then descend: a placement (E,) that costs no more, each rank as full as before.

    Args:
        problem: the layer.
        start: rank of each expert.
        seed: of the random proposals.
        load_weight: of the load penalty.
        proposals: swaps to propose, over E squared; small layers get ``FEWEST_PROPOSALS``.
    """
    num_proposals = int(max(proposals * len(start) ** 2, FEWEST_PROPOSALS) / 2)
    stride = max(1, len(problem.ids) // COARSE_TOKENS)
    state = problem.state(start, load_weight, stride)
    scale = UNIT * max(float(state.loads.sum()), 1.0) / len(start)  # of what a swap can change
    anneal(state, num_proposals, HOT * scale, WARM * scale, seed)
    state = problem.state(state.ranks.place, load_weight)
    scale = UNIT * max(float(state.loads.sum()), 1.0) / len(start)
    anneal(state, num_proposals, WARM * scale, COLD * scale, seed + 1)
    descend(state, 0.5)  # half a unit: less is rounding of the penalty
    found: np.ndarray = state.ranks.place
    return found if problem.cost(found, load_weight) < problem.cost(start, load_weight) else start


def choose_regularisation(trace: RoutingTrace, topology: Topology, search: Search) -> Regularisation:
    """The one of ``REGULARISATIONS`` whose placements make held-out requests visit least, by cross-validation.

    Requests take turns at being held out; some layers, evenly spread, speak for all. The first is kept where the best one's
    advantage, paired by fold and layer, is within two standard errors, where time runs out, and where there are fewer requests
    than folds: stretches of one request are so alike that they would vote against any regularisation.
    """
    fold_of_token = trace.token_to_request % FOLDS
    if len(np.unique(fold_of_token)) < FOLDS:
        return REGULARISATIONS[0]
    layers = np.unique(np.linspace(0, trace.num_layers - 1, FOLD_LAYERS).astype(int))
    start = ExpertLayout.sequential(1, trace.num_experts, topology).expert_to_rank[0]  # knows nothing of the held-out tokens
    visits = np.zeros((len(REGULARISATIONS), FOLDS, len(layers)))
    for fold in range(FOLDS):
        held_out = fold_of_token == fold
        learned, scored = RoutingTrace(trace.expert_ids[:, ~held_out], trace.num_experts), trace.expert_ids[layers][:, held_out]
        for choice, regularisation in enumerate(REGULARISATIONS):
            if not search.in_time():
                return REGULARISATIONS[0]
            tried = problems_of(learned, topology, regularisation, layers)
            found = over_layers(lambda problem: _refine_for_fold(problem, start, search.seed + problem.index), tried)
            visits[choice, fold] = visits_per_token(scored, np.stack(found), topology)
    best = int(visits.mean(axis=(1, 2)).argmin())
    advantage = (visits[0] - visits[best]).ravel()
    sure = advantage.mean() > 2 * advantage.std() / math.sqrt(advantage.size)
    return REGULARISATIONS[best if sure else 0]


def _refine_for_fold(problem: LayerProblem, start: np.ndarray, seed: int) -> np.ndarray:
    return refine(problem, start, seed, problem.regularisation.load_weight, FOLD_PROPOSALS)


def connectivity_layers(problems: list[LayerProblem], search: Search) -> np.ndarray:
    """Rank of each expert, (L, E), by annealing every layer ``search.num_starts`` times and keeping its cheapest.

    All layers get their first annealing before any gets its second, so that a deadline leaves them equally good; without
    time for one, a layer keeps its greedy placement.
    """
    best = over_layers(lambda problem: problem.greedy(search.seed), problems)

    def better(job: tuple[LayerProblem, np.ndarray, int]) -> np.ndarray:
        problem, known, turn = job
        if not search.in_time():
            return known
        rng = np.random.default_rng([search.seed, problem.index, turn])
        start = known if turn == 0 else rng.permutation(known)
        weight = problem.regularisation.load_weight
        found = refine(problem, start, int(rng.integers(2**31)), weight)
        return found if problem.cost(found, weight) < problem.cost(known, weight) else known

    for turn in range(search.num_starts):
        jobs = [(problem, known, turn) for problem, known in zip(problems, best, strict=True)]
        best = over_layers(better, jobs, f"placing, start {turn + 1} of {search.num_starts}" if search.progress else None)
    return np.stack(best)
