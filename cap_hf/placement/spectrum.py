"""From a communication-oriented placement to a balanced one, in snapshots.

The adjustment works on every layer alone and knows only swaps, so each rank keeps its number of experts:

- Pair: one expert of the most loaded rank and a less loaded expert of any rank, so that both ranks end below the old
  peak. Of these, the swap that adds the least communication cost C (nodes count as the topology prices them); swaps
  that add the same differ in relief, how far the higher of the two ranks comes down, and the largest wins.
- Step: one swap. Every state on the way is kept.
- Stop: no such swap is left, or the peak is within 1 % of the mean. Below that, a calibration trace of some thousand
  tokens says nothing about other requests: on traces of Qwen3-30B-A3B and DeepSeek-V2-Lite the last percent cost 0.1-0.3
  devices per token and took at most 0.04 off the imbalance of held-out tokens.

C may fall on the first steps, because the greedy leaves swaps that improve both axes; snapshots are then spread between
the cheapest state and the most balanced one, not from the start.

Letters: ``L`` layers, ``E`` experts per layer, ``R`` ranks, ``S`` states of a trajectory, the first being the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cap_hf._files import read_json, write_json
from cap_hf.layout import ExpertLayout
from cap_hf.metrics import jaccard
from cap_hf.trace import RoutingTrace

__all__ = ["PlacementSpectrum", "Trajectory", "adjusted_spectrum", "balancing_trajectory", "pick_states"]

BALANCED = 1.01  # peak over mean at which the adjustment stops
SAME_COST = 1e-9  # differences of C below this are rounding


class PlacementSpectrum:
    """Immutable sequence of layouts, ``spectrum[0]`` communication-oriented ... ``spectrum[-1]`` most balanced.

    Raises:
        ValueError: no layout, or layouts that differ in shape, topology or layer ids.
    """

    def __init__(self, layouts: Sequence[ExpertLayout]) -> None:
        self._layouts = tuple(layouts)
        if not self._layouts:
            raise ValueError("0 layouts; a spectrum holds 1 or more: place at least once")
        facts = [(layout.expert_to_rank.shape, layout.topology, layout.layer_ids.tolist()) for layout in self._layouts]
        for index, fact in enumerate(facts):
            if fact != facts[0]:
                raise ValueError(
                    f"layout {index} has (layers, experts), topology and layer ids {fact}, layout 0 {facts[0]}; "
                    "a spectrum is of one model on one machine: keep them apart"
                )

    def __len__(self) -> int:
        return len(self._layouts)

    def __getitem__(self, index: int) -> ExpertLayout:
        return self._layouts[index]

    def __iter__(self) -> Iterator[ExpertLayout]:
        return iter(self._layouts)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready content."""
        return {"layouts": [layout.to_dict() for layout in self]}

    @classmethod
    def from_dict(cls, content: dict[str, Any], source: str = "spectrum") -> PlacementSpectrum:
        """Inverse of ``to_dict``; ValueError names ``source`` where the content is malformed."""
        layouts = content.get("layouts")
        if not isinstance(layouts, list):
            raise ValueError(f"{source} holds layouts of type {type(layouts).__name__}, not a list; save the spectrum again")
        return cls([ExpertLayout.from_dict(each, f"{source}, layout {index},") for index, each in enumerate(layouts)])

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write_json(path, "spectrum", self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> PlacementSpectrum:
        """Read what ``save`` wrote; ValueError for a foreign or truncated file."""
        return cls.from_dict(read_json(path, "spectrum"), str(path))

    def __eq__(self, other: object) -> bool:
        return self._layouts == other._layouts if isinstance(other, PlacementSpectrum) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._layouts)

    def __repr__(self) -> str:
        return f"PlacementSpectrum([{', '.join(map(repr, self))}])"


class Trajectory(NamedTuple):
    """One layer's way from its placement to a balanced one, one swap between neighbouring states."""

    expert_to_rank: np.ndarray
    """(S, E) rank of each expert in each state."""
    peak_load: np.ndarray
    """(S,) load of the most loaded rank, non-increasing."""
    added_cost: np.ndarray
    """(S,) communication cost C over that of the start."""


def balancing_trajectory(p: np.ndarray, loads: np.ndarray, expert_to_rank: np.ndarray, cost_matrix: np.ndarray) -> Trajectory:
    """Swap experts of one layer until its ranks are balanced, as the module's docstring lays down.

    Args:
        p: (E, E) co-activation: symmetric, non-negative, zero diagonal.
        loads: (E,) (token, expert) pairs of each expert.
        expert_to_rank: (E,) the start, left as it is.
        cost_matrix: (R, R) cost of a row between two ranks.
    """
    ranks, loads = expert_to_rank.copy(), loads.astype(np.float64)
    rank_loads = np.bincount(ranks, weights=loads, minlength=len(cost_matrix))
    cost_on = p @ cost_matrix[ranks]  # (E, R): an expert's share of C if it alone moved to that rank
    states, peaks, added = [ranks.copy()], [rank_loads.max()], [0.0]
    while rank_loads.max() > BALANCED * rank_loads.mean():
        swap = _cheapest_relief(p, loads, ranks, rank_loads, cost_on, cost_matrix)
        if swap is None:
            break
        expert, partner, cost = swap
        rank, other = ranks[expert], ranks[partner]
        moved = loads[expert] - loads[partner]
        rank_loads[rank] -= moved
        rank_loads[other] += moved
        cost_on += np.outer(p[partner] - p[expert], cost_matrix[rank] - cost_matrix[other])
        ranks[[expert, partner]] = other, rank
        states.append(ranks.copy())
        peaks.append(rank_loads.max())
        added.append(added[-1] + cost)
    return Trajectory(np.array(states), np.array(peaks), np.array(added))


def _cheapest_relief(
    p: np.ndarray, loads: np.ndarray, ranks: np.ndarray, rank_loads: np.ndarray, cost_on: np.ndarray, cost_matrix: np.ndarray
) -> tuple[int, int, float] | None:
    """The swap to make, (expert on the peak rank, its partner, added cost), or None where no swap lowers the peak rank.

    Arrays of pairs are (experts on the peak rank, experts elsewhere).
    """
    peak = int(rank_loads.argmax())
    here, there = np.flatnonzero(ranks == peak), np.flatnonzero(ranks != peak)
    other = ranks[there]
    moved = loads[here][:, None] - loads[there][None, :]
    relief = np.minimum(moved, rank_loads[peak] - rank_loads[other] - moved)  # old peak minus the higher of the two new loads
    if not (relief > 0).any():
        return None
    leaving = cost_on[here][:, other] - cost_on[here, peak][:, None]
    coming = cost_on[there, peak] - cost_on[there, other]
    # each of the two terms counts the pair as joined, but after the swap it is as far apart as before
    cost = leaving + coming + 2 * p[np.ix_(here, there)] * cost_matrix[peak, other]
    cost[relief <= 0] = np.inf
    best = int(np.where(cost <= cost.min() + SAME_COST, relief, -np.inf).argmax())
    row, column = divmod(best, len(there))
    return int(here[row]), int(there[column]), float(cost[row, column])


def pick_states(peak_load: np.ndarray, added_cost: np.ndarray, num_placements: int) -> np.ndarray:
    """States of a trajectory that become placements 0, 1, ..., (num_placements,) indices.

    Placement 0 is the start. The others aim at peaks evenly spaced from that of the cheapest state (of the next step
    where this is the start) down to the lowest, and each is the cheapest state that meets its aim. So, whatever the
    trajectory, peaks never rise along the placements, and the cost never falls from placement 1 on.
    """
    cheapest = len(added_cost) - 1 - int(added_cost[::-1].argmin())  # the last of equals is the most balanced
    num_steps = num_placements - (cheapest > 0)  # from the start, the first step is placement 0
    aims = np.linspace(peak_load[-1], peak_load[cheapest], num_steps)[: num_placements - 1][::-1]
    picked = [0]
    for aim in aims:
        first = int((peak_load <= aim).argmax())  # all later states meet the aim too
        picked.append(len(added_cost) - 1 - int(added_cost[first:][::-1].argmin()))
    return np.array(picked)


def adjusted_spectrum(layout: ExpertLayout, trace: RoutingTrace, num_placements: int) -> PlacementSpectrum:
    """``layout`` and ``num_placements - 1`` ever more balanced adjustments of it.

    On ``trace``, load imbalance never rises along the spectrum, layer by layer, and communication cost never falls from
    placement 1 on; placement 0 may cost more than 1, where ``layout`` leaves swaps that improve both.

    Raises:
        ValueError: fewer than 1 placement, or a trace of another model.
    """
    if num_placements < 1:
        raise ValueError(f"num_placements is {num_placements}; it must be 1 or more: 1 gives the communication-oriented placement alone")
    if (trace.num_layers, trace.num_experts) != layout.expert_to_rank.shape:
        raise ValueError(
            f"trace has {trace.num_layers} layers of {trace.num_experts} experts, the layout {layout.num_layers} of {layout.num_experts}; "
            "adjust on a trace of the model that the layout is for"
        )
    chosen = []  # L arrays (num_placements, E)
    for p, loads, ranks in zip(jaccard(trace), trace.expert_loads(), layout.expert_to_rank, strict=True):
        way = balancing_trajectory(p, loads, ranks, layout.topology.cost_matrix)
        chosen.append(way.expert_to_rank[pick_states(way.peak_load, way.added_cost, num_placements)])
    return PlacementSpectrum([ExpertLayout(ranks, layout.topology, layout.layer_ids) for ranks in np.stack(chosen, axis=1)])
