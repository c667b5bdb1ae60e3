"""Where every expert lives.

Letters: ``L`` MoE layers, ``E`` experts per layer, ``R`` ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cap_hf._files import read_json, read_only, write_json
from cap_hf.metrics import LayoutMetrics, measure
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace

__all__ = ["ExpertLayout", "rank_capacities"]


def rank_capacities(num_experts: int, num_ranks: int) -> np.ndarray:
    """Experts per rank, (R,): ``E // R``, and one more on each of the first ``E % R`` ranks.

    Raises:
        ValueError: fewer experts than ranks, or no rank.
    """
    if not 1 <= num_ranks <= num_experts:
        raise ValueError(f"{num_experts} experts per layer for {num_ranks} ranks; every rank needs an expert: use 1 to {num_experts} ranks")
    return num_experts // num_ranks + (np.arange(num_ranks) < num_experts % num_ranks)


@dataclass(frozen=True, eq=False, repr=False)
class ExpertLayout:
    """Immutable map from experts to ranks, every layer on its own; ranks may hold different numbers of experts.

    Args:
        expert_to_rank: (L, E) integers in [0, R).
        topology: the machine the layout is for.
        layer_ids: (L,) index of each MoE layer in the model; default 0 .. L-1.

    Raises:
        ValueError: wrong shape or type, ranks out of range, fewer experts than ranks.
    """

    expert_to_rank: Any
    topology: Topology
    layer_ids: Any = None

    def __post_init__(self) -> None:
        ranks, num_ranks = np.asarray(self.expert_to_rank), self.topology.num_ranks
        if ranks.ndim != 2 or 0 in ranks.shape or not np.issubdtype(ranks.dtype, np.integer):
            raise ValueError(f"expert_to_rank has shape {ranks.shape} and type {ranks.dtype}; it must be integers, (layers, experts)")
        if ranks.shape[1] < num_ranks:
            raise ValueError(f"{ranks.shape[1]} experts per layer for {num_ranks} ranks; use at most {ranks.shape[1]} ranks")
        outside = (ranks < 0) | (ranks >= num_ranks)
        if outside.any():
            layer, expert = (int(i) for i in np.argwhere(outside)[0])
            value = ranks[layer, expert]
            raise ValueError(f"expert_to_rank[{layer}, {expert}] is {value}; it must be 0 to {num_ranks - 1}: place again")
        layer_ids = np.array(range(len(ranks)) if self.layer_ids is None else self.layer_ids, dtype=np.int64)
        if layer_ids.shape != (len(ranks),):
            raise ValueError(f"layer_ids has {layer_ids.size} entries; expert_to_rank has {len(ranks)} layers")
        # the only writes a frozen value ever sees
        object.__setattr__(self, "expert_to_rank", read_only(ranks.astype(np.int64)))
        object.__setattr__(self, "layer_ids", read_only(layer_ids))

    @classmethod
    def sequential(
        cls, num_layers: int, num_experts: int, topology: Topology, layer_ids: Sequence[int] | np.ndarray | None = None
    ) -> ExpertLayout:
        """Experts in id order, contiguous; where R does not divide E the first E mod R ranks hold one more ("Default")."""
        row = np.repeat(np.arange(topology.num_ranks), rank_capacities(num_experts, topology.num_ranks))
        return cls(np.tile(row, (num_layers, 1)), topology, layer_ids)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.expert_to_rank.shape[0]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.expert_to_rank.shape[1]

    @property
    def num_ranks(self) -> int:
        """R."""
        return self.topology.num_ranks

    def experts_of(self, layer: int, rank: int) -> np.ndarray:
        """Ids of the experts that ``rank`` hosts in MoE layer number ``layer``, ascending: the slot order on the rank."""
        return np.flatnonzero(self.expert_to_rank[layer] == rank)

    def experts_per_rank(self) -> np.ndarray:
        """Number of experts on each rank, (L, R)."""
        return np.stack([np.bincount(ranks, minlength=self.num_ranks) for ranks in self.expert_to_rank])

    def metrics(self, trace: RoutingTrace) -> LayoutMetrics:
        """Traffic and balance on ``trace``; ValueError if it is of another model."""
        if (trace.num_layers, trace.num_experts) != self.expert_to_rank.shape:
            raise ValueError(
                f"trace has {trace.num_layers} layers of {trace.num_experts} experts, the layout {self.num_layers} of {self.num_experts}; "
                "use a trace of the model that the layout is for"
            )
        return measure(trace, self.expert_to_rank, self.topology)

    @property
    def fingerprint(self) -> str:
        """First 12 hex digits of a SHA-256 over the content: the layout's name in reports."""
        content = repr((self.topology, self.layer_ids.tolist(), self.expert_to_rank.tolist()))
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready content."""
        return {"topology": self.topology.to_dict(), "layer_ids": self.layer_ids.tolist(), "expert_to_rank": self.expert_to_rank.tolist()}

    @classmethod
    def from_dict(cls, content: dict[str, Any], source: str = "layout") -> ExpertLayout:
        """Inverse of ``to_dict``; ValueError names ``source`` where a field is missing or malformed."""
        try:
            topology = Topology.from_dict(content["topology"], source)
            return cls(np.array(content["expert_to_rank"]), topology, np.array(content["layer_ids"], dtype=np.int64))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source} lacks a valid topology, expert_to_rank or layer_ids ({error}); save the layout again") from error

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write_json(path, "layout", self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> ExpertLayout:
        """Read what ``save`` wrote; ValueError for a foreign or truncated file."""
        return cls.from_dict(read_json(path, "layout"), str(path))

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, ExpertLayout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        shape = f"{self.num_layers}x{self.num_experts}"
        return f"ExpertLayout(expert_to_rank=<{shape}>, topology={self.topology!r}, fingerprint={self.fingerprint!r})"
