"""From a communication-oriented placement to a balanced one, in snapshots.

Letters: ``L`` layers, ``E`` experts per layer, ``R`` ranks, ``S`` states of a trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cap_hf._files import read_json, write_json
from cap_hf.layout import ExpertLayout
from cap_hf.metrics import jaccard
from cap_hf.trace import RoutingTrace

__all__ = ["PlacementSpectrum", "Trajectory", "adjusted_spectrum", "balancing_trajectory", "pick_states"]


class PlacementSpectrum:
    """Immutable sequence of layouts, ``spectrum[0]`` communication-oriented ... ``spectrum[-1]`` most balanced.

    Raises:
        ValueError: no layout, or layouts that differ in shape, topology or layer ids.
    """

    def __init__(self, layouts: Sequence[ExpertLayout]) -> None:
        self._layouts = tuple(layouts)
        if not self._layouts:
            raise ValueError("0 layouts; a spectrum holds 1 or more")
        facts = {(layout.expert_to_rank.shape, layout.topology, tuple(layout.layer_ids.tolist())) for layout in self._layouts}
        if len(facts) > 1:
            shapes = sorted({(layout.expert_to_rank.shape, repr(layout.topology)) for layout in self._layouts})
            raise ValueError(f"layouts of {len(facts)} different models or machines in one spectrum (shape, topology): {shapes}; give one spectrum each")

    def __len__(self) -> int:
        return len(self._layouts)

    def __getitem__(self, index: int) -> ExpertLayout:
        return self._layouts[index]

    def __iter__(self) -> Iterator[ExpertLayout]:
        return iter(self._layouts)

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write_json(path, "spectrum", {"layouts": [layout.to_dict() for layout in self]})

    @classmethod
    def load(cls, path: str | Path) -> PlacementSpectrum:
        """Read what ``save`` wrote; ValueError for a foreign or truncated file."""
        layouts = read_json(path, "spectrum").get("layouts")
        if not isinstance(layouts, list):
            raise ValueError(f"{path} holds layouts of type {type(layouts).__name__}, not a list; save the spectrum again")
        return cls([ExpertLayout.from_dict(content, f"{path}, layout {index},") for index, content in enumerate(layouts)])

    def __eq__(self, other: object) -> bool:
        return self._layouts == other._layouts if isinstance(other, PlacementSpectrum) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._layouts)

    def __repr__(self) -> str:
        return f"PlacementSpectrum([{', '.join(map(repr, self))}])"
