"""One door to the placement methods: a routing trace in, a layout or a spectrum of layouts out.

Letters: ``L`` layers, ``E`` experts per layer, ``R`` ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cap_hf.layout import ExpertLayout, rank_capacities
from cap_hf.metrics import jaccard
from cap_hf.placement.baselines import random, sequential
from cap_hf.placement.eplb import eplb
from cap_hf.placement.greedy import greedy_layers
from cap_hf.placement.spectrum import PlacementSpectrum, adjusted_spectrum
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace

if TYPE_CHECKING:
    from cap_hf.modeling import CAPMoEModel
    from cap_hf.placement.connectivity import LayerProblem, Search

__all__ = ["METHODS", "Placer"]


@dataclass(frozen=True)
class Placer:
    """Places experts on the ranks of ``topology``; without a time limit, equal arguments give equal layouts.

    ``method``:

    - "connectivity": search on the exact number of ranks (and nodes) that tokens visit; the least traffic, and a spectrum
      that trades it for balance.
    - "greedy": the paper's, co-activated experts together, and its adjustment by swaps.
    - "eplb": DeepSeek's balancer, even loads whatever the traffic; "sequential": experts in id order; "random".

    ``seed`` decides what a method leaves open. The others are for "connectivity": ``num_starts`` annealings per layer, of
    which the best counts (each more costs time and buys some tenths of a percent); ``time_limit_s`` bounds ``place`` and
    ``spectrum`` each, in seconds (what has begun is finished), and the best so far is the result; ``progress`` shows bars.

    Raises:
        ValueError: unknown method, a negative seed, no start, or a negative time limit.
    """

    topology: Topology
    method: str = "connectivity"
    seed: int = 0
    num_starts: int = 2
    time_limit_s: float | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}; choose one of {', '.join(METHODS)}")
        for name, least in (("seed", 0), ("num_starts", 1)):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be an integer, {least} or more")
        limit = self.time_limit_s
        if limit is not None and not (isinstance(limit, int | float | np.number) and limit >= 0):
            raise ValueError(f"time_limit_s is {limit!r}; it must be 0 or more seconds, or None for no limit")

    def place(self, trace: RoutingTrace) -> ExpertLayout:
        """The method's own placement, the one with least traffic, with the trace's layer ids.

        Raises:
            ValueError: fewer experts per layer than ranks.
        """
        rank_capacities(trace.num_experts, self.topology.num_ranks)  # fails before anything is counted
        return ExpertLayout(METHODS[self.method](trace, self), self.topology, trace.layer_ids)

    def spectrum(self, trace: RoutingTrace, num_placements: int = 8) -> PlacementSpectrum:
        """Layouts from least traffic to best balance.

        "connectivity" searches for them (``cap_hf.placement.tradeoff``): on ``trace``, every layout has more traffic and
        better balance than the one before. The other methods adjust ``place(trace)`` by swaps (``adjusted_spectrum``).

        Raises:
            ValueError: fewer experts per layer than ranks, or fewer than 1 placement.
        """
        if not isinstance(num_placements, int | np.integer) or num_placements < 1:
            raise ValueError(f"num_placements is {num_placements!r}; it must be an integer, 1 or more: 1 gives least traffic alone")
        if self.method != "connectivity":
            return adjusted_spectrum(self.place(trace), trace, num_placements)
        from cap_hf.placement.tradeoff import tradeoff  # compiled code, loaded by those who use it

        rank_capacities(trace.num_experts, self.topology.num_ranks)
        problems, placed, search = _search_layers(trace, self, PLACING_SHARE)
        layers = tradeoff(problems, placed, num_placements, search)
        return PlacementSpectrum([ExpertLayout(ranks, self.topology, trace.layer_ids) for ranks in layers])

    def fit(
        self,
        dataset: Iterable[Any],
        model: CAPMoEModel,
        tokenizer: Any,
        num_tokens: int = 8000,
        num_placements: int = 8,
        text_column: str = "text",
        batch_size: int = 4,
    ) -> PlacementSpectrum:
        """Run ``model`` on text, record its routing under the pruning it is set to, and make the spectrum.

        Args:
            dataset: a ``datasets.Dataset`` (streaming too) with ``text_column``, or plain strings.
            model: the wrapped model; with several ranks every rank calls this alike, the first one searches, and all get its spectrum.
            tokenizer: the model's.
            num_tokens: tokens to record.
            num_placements: layouts in the spectrum.
            text_column: where the text is, for rows that are mappings.
            batch_size: texts per forward.

        Raises:
            ValueError: no such column, no tokens, or a trace with fewer experts than this placer's ranks.
        """
        from cap_hf.recorder import record_texts  # needs torch, which placement itself does not

        trace = record_texts(model, tokenizer, _texts(dataset, text_column), num_tokens, batch_size)
        return PlacementSpectrum.from_dict(model.group.from_first(lambda: self.spectrum(trace, num_placements).to_dict()))


def _texts(dataset: Iterable[Any], text_column: str) -> Iterable[str]:
    """The text of each row, read as it is asked for."""
    if isinstance(dataset, str):
        raise ValueError(f"dataset is one string of {len(dataset)} characters; give a list of texts or a dataset")
    for number, row in enumerate(dataset):
        if isinstance(row, str):
            yield row
        elif text_column in row:
            yield row[text_column]
        else:
            raise ValueError(
                f"row {number} has columns {', '.join(row)}, not text_column={text_column!r}; name the column that holds the text"
            )


CHOOSING_SHARE, PLACING_SHARE = 0.2, 0.4  # of a time limit: until regularisation is chosen, until a spectrum's first layout stands


def _search_layers(trace: RoutingTrace, placer: Placer, share: float = 1.0) -> tuple[list[LayerProblem], np.ndarray, Search]:
    """The layers as problems, their placements (L, E) found in ``share`` of the time, and the search with all of it."""
    from cap_hf.placement.connectivity import Search, choose_regularisation, connectivity_layers, problems_of

    begin, limit = time.monotonic(), math.inf if placer.time_limit_s is None else placer.time_limit_s

    def search(part: float) -> Search:
        seed = int(placer.seed) % 2**31  # as large as the compiled generator takes
        return Search(seed, placer.num_starts, begin + part * limit, placer.progress)

    problems = problems_of(trace, placer.topology, choose_regularisation(trace, placer.topology, search(CHOOSING_SHARE)))
    return problems, connectivity_layers(problems, search(share)), search(1.0)


def _connectivity(trace: RoutingTrace, placer: Placer) -> np.ndarray:
    return _search_layers(trace, placer)[1]


def _greedy(trace: RoutingTrace, placer: Placer) -> np.ndarray:
    return greedy_layers(jaccard(trace), placer.topology, placer.seed)


def _eplb(trace: RoutingTrace, placer: Placer) -> np.ndarray:
    return eplb(trace.expert_loads(), placer.topology)


def _sequential(trace: RoutingTrace, placer: Placer) -> np.ndarray:
    return sequential(trace.num_layers, trace.num_experts, placer.topology.num_ranks)


def _random(trace: RoutingTrace, placer: Placer) -> np.ndarray:
    return random(trace.num_layers, trace.num_experts, placer.topology.num_ranks, placer.seed)


METHODS: dict[str, Callable[[RoutingTrace, Placer], np.ndarray]] = {
    "connectivity": _connectivity,
    "greedy": _greedy,
    "eplb": _eplb,
    "sequential": _sequential,
    "random": _random,
}
"""Method name -> function ``(trace, placer) -> expert_to_rank (L, E)``."""
