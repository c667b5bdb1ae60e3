"""One door to the placement methods: a routing trace in, a layout or a spectrum of layouts out.

Letters: ``L`` layers, ``E`` experts per layer, ``R`` ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cap_hf.layout import ExpertLayout
from cap_hf.metrics import jaccard
from cap_hf.placement.baselines import random, rank_capacities, sequential
from cap_hf.placement.greedy import greedy_layers
from cap_hf.placement.spectrum import PlacementSpectrum, adjusted_spectrum
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace

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
