"""From least traffic to best balance: every layer is searched with ever heavier load penalties, then the layers are traded.

Each layer's placements are points, visits per token against load imbalance. Of these only the lower left hull is kept, so that
walking along it every step buys balance at a higher price than the one before. The layers' steps, merged by price, make one way
from all layers at least traffic to all at best balance: at any point of it, the mean imbalance is the lowest that these
placements give for the mean traffic. The spectrum's placements stand on this way, at even steps of the logarithm of the
excess over a perfect balance, because the price of balance rises steeply as the excess falls.

Letters: ``L`` layers, ``E`` experts per layer, ``S`` placements of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cap_hf.placement.connectivity import LayerProblem, Search, over_layers, refine

__all__ = ["lower_hull", "pick_along", "tradeoff"]

LIGHTEST, HEAVIEST, NUM_WEIGHTS = 0.1, 6.0, 8  # load weights that are tried: a lighter one moves nothing, a heavier one fits the trace
LEAST_EXCESS = 0.01  # of the mean load: below, a trace says nothing about other requests


@dataclass(frozen=True)
class _Candidates:
    """A layer's placements (S, E), their visits per token (S,) and load imbalance (S,)."""

    expert_to_rank: np.ndarray
    visits: np.ndarray
    imbalance: np.ndarray


def tradeoff(problems: list[LayerProblem], start: np.ndarray, num_placements: int, search: Search) -> np.ndarray:
    """Placements from ``start`` (L, E), the one with least traffic, to best balance: (num_placements, L, E).

    On the problems' own tokens visits per token never fall and imbalance never rises along them, in every layer and in the
    mean; both means do change from each to the next, unless there are fewer different placements than asked for. The first is
    ``start``, except in layers where another placement is better balanced with the very same visits.
    """
    weights = np.geomspace(HEAVIEST, LIGHTEST, max(NUM_WEIGHTS, num_placements))
    # the heaviest first, then ever finer between, so that a deadline leaves both ends and gaps that are even
    order = sorted(range(len(weights)), key=lambda number: (number > 0, -(number & -number)))

    def balanced(job: tuple[int, int]) -> np.ndarray:
        number, layer = job
        if not search.in_time():
            return start[layer]
        return refine(problems[layer], start[layer], search.seed + 1000 * (number + 1) + layer, weights[number])

    jobs = [(number, layer) for number in order for layer in range(len(problems))]
    found = np.stack(over_layers(balanced, jobs, "trading traffic for balance" if search.progress else None))
    found = np.concatenate([start[None], found.reshape(len(weights), *start.shape)])
    return _trade(over_layers(lambda layer: _candidates(problems[layer], found[:, layer]), range(len(problems))), num_placements)


def _candidates(problem: LayerProblem, placements: np.ndarray) -> _Candidates:
    """The hull of a layer's placements (S, E)."""
    visits = np.array([problem.visits(ranks) for ranks in placements])
    imbalance = np.array([problem.imbalance(ranks) for ranks in placements])
    chosen = lower_hull(visits, imbalance)
    return _Candidates(placements[chosen], visits[chosen], imbalance[chosen])


def lower_hull(visits: np.ndarray, imbalance: np.ndarray) -> np.ndarray:
    """Indices of the lower left hull of points, (S,) each, with rising visits and falling imbalance.

    It begins at point 0, or at one with the same visits and better balance, and ends at the lowest imbalance. Points with
    fewer visits than point 0 are left out, so that a spectrum begins with the placement that was asked for.
    """
    hull: list[int] = []
    order = np.lexsort((imbalance, visits))
    for point in order[visits[order] >= visits[0]].tolist():
        if hull and imbalance[point] >= imbalance[hull[-1]]:
            continue
        while len(hull) > 1 and _price(visits, imbalance, hull[-2], hull[-1]) >= _price(visits, imbalance, hull[-2], point):
            hull.pop()
        hull.append(point)
    return np.array(hull)


def _price(visits: np.ndarray, imbalance: np.ndarray, start: int, end: int) -> float:
    """Visits paid for a unit of imbalance on the way between two points."""
    return float((visits[end] - visits[start]) / (imbalance[start] - imbalance[end]))


def _trade(layers: list[_Candidates], num_placements: int) -> np.ndarray:
    """The way through all layers, and the placements on it."""
    steps = [
        (_price(one.visits, one.imbalance, step, step + 1), layer, step + 1)
        for layer, one in enumerate(layers)
        for step in range(len(one.visits) - 1)
    ]
    position = np.zeros(len(layers), dtype=int)
    way = [position.copy()]
    for _, layer, step in sorted(steps):  # prices rise along a hull, so that each layer's steps keep their order
        position[layer] = step
        way.append(position.copy())
    imbalance = np.array([np.mean([one.imbalance[at] for one, at in zip(layers, where, strict=True)]) for where in way])
    picked = [way[index] for index in pick_along(np.log(np.maximum(imbalance - 1.0, LEAST_EXCESS)), num_placements)]
    return np.stack([np.stack([one.expert_to_rank[at] for one, at in zip(layers, where, strict=True)]) for where in picked])


def pick_along(values: np.ndarray, num_placements: int) -> np.ndarray:
    """Indices (num_placements,) into a falling sequence (S,): the first, the last, and between them values evenly spaced.

    All differ if there are enough; a single placement is the first.
    """
    aims = np.linspace(values[0], values[-1], num_placements)
    picked = np.abs(values[None, :] - aims[:, None]).argmin(axis=1)
    if num_placements > 1:
        picked[-1] = len(values) - 1  # values that are equal at the end would name the first of them
    order = np.arange(num_placements)
    if len(values) < num_placements:
        return picked
    apart = np.maximum.accumulate(picked - order) + order  # raised where it would not be above the one before
    return np.minimum(apart, len(values) - num_placements + order)
