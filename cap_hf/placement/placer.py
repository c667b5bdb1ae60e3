"""One door to the placement methods: a routing trace in, a layout or a spectrum of layouts out.

Letters: ``L`` layers, ``E`` experts per layer, ``R`` ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cap_hf.layout import ExpertLayout, rank_capacities
from cap_hf.metrics import jaccard
from cap_hf.placement.baselines import random, sequential
from cap_hf.placement.greedy import greedy_layers
from cap_hf.placement.spectrum import PlacementSpectrum, adjusted_spectrum
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace

if TYPE_CHECKING:
    from cap_hf.modeling import CAPMoEModel

__all__ = ["METHODS", "Placer"]


def _greedy(trace: RoutingTrace, topology: Topology, seed: int) -> np.ndarray:
    return greedy_layers(jaccard(trace), topology, seed)


def _sequential(trace: RoutingTrace, topology: Topology, seed: int) -> np.ndarray:
    return sequential(trace.num_layers, trace.num_experts, topology.num_ranks)


def _random(trace: RoutingTrace, topology: Topology, seed: int) -> np.ndarray:
    return random(trace.num_layers, trace.num_experts, topology.num_ranks, seed)


METHODS: dict[str, Callable[[RoutingTrace, Topology, int], np.ndarray]] = {"greedy": _greedy, "sequential": _sequential, "random": _random}
"""Method name -> function ``(trace, topology, seed) -> expert_to_rank (L, E)``."""


@dataclass(frozen=True)
class Placer:
    """Places experts on the ranks of ``topology``; equal arguments give equal layouts.

    ``method``: "greedy" (the paper's, co-activated experts together), "sequential" (experts in id order) or "random".
    ``seed`` decides what a method leaves open.

    Raises:
        ValueError: unknown method, or a negative seed.
    """

    topology: Topology
    method: str = "greedy"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}; choose one of {', '.join(METHODS)}")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more")

    def place(self, trace: RoutingTrace) -> ExpertLayout:
        """The method's own placement, with the trace's layer ids.

        Raises:
            ValueError: fewer experts per layer than ranks.
        """
        rank_capacities(trace.num_experts, self.topology.num_ranks)  # fails before the co-activation is counted
        return ExpertLayout(METHODS[self.method](trace, self.topology, self.seed), self.topology, trace.layer_ids)

    def spectrum(self, trace: RoutingTrace, num_placements: int = 8) -> PlacementSpectrum:
        """``place(trace)`` and ``num_placements - 1`` ever more balanced adjustments of it; see ``adjusted_spectrum``.

        Raises:
            ValueError: fewer experts per layer than ranks, or fewer than 1 placement.
        """
        return adjusted_spectrum(self.place(trace), trace, num_placements)

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
            model: the wrapped model; with several ranks every rank calls this alike and gets the same spectrum.
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
        return self.spectrum(trace, num_placements)


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
