"""The machine as the cost of moving a row between two ranks.

Letters: ``R`` ranks (devices), ``N`` nodes; ranks are numbered node by node.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cap_hf._files import read_json, read_only, write_json

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """``num_ranks`` devices, ``ranks_per_node`` of them (default: all) in one node.

    A row costs 0 to the same rank, 1 to another rank of the node and ``inter_node_cost`` (>= 1) to another node.

    Raises:
        ValueError: a count below 1, nodes that are not equally large, or a cost below 1.
    """

    num_ranks: int
    ranks_per_node: int = 0
    inter_node_cost: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_ranks", "ranks_per_node"):
            if not isinstance(getattr(self, name), int | np.integer):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be an integer")
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks is {self.num_ranks}; it must be 1 or more")
        object.__setattr__(self, "ranks_per_node", self.ranks_per_node or self.num_ranks)
        if self.ranks_per_node < 1 or self.num_ranks % self.ranks_per_node:
            raise ValueError(
                f"ranks_per_node is {self.ranks_per_node}; it must divide num_ranks = {self.num_ranks}: use equally large nodes"
            )
        cost = self.inter_node_cost
        if not (isinstance(cost, int | float) and math.isfinite(cost) and cost >= 1):
            raise ValueError(f"inter_node_cost is {self.inter_node_cost}; it must be finite and at least 1, the cost inside a node")

    @property
    def num_nodes(self) -> int:
        """Number of nodes ``N``."""
        return self.num_ranks // self.ranks_per_node

    @cached_property
    def rank_to_node(self) -> np.ndarray:
        """Node of each rank, (R,)."""
        return read_only(np.arange(self.num_ranks) // self.ranks_per_node)

    @cached_property
    def cost_matrix(self) -> np.ndarray:
        """Cost of one row from rank i to rank j, (R, R) float64."""
        same_node = self.rank_to_node[:, None] == self.rank_to_node[None, :]
        cost = np.where(same_node, 1.0, float(self.inter_node_cost))
        np.fill_diagonal(cost, 0.0)
        return read_only(cost)

    def to_dict(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Any, source: str = "topology") -> Topology:
        """Inverse of ``to_dict``; ValueError names ``source`` where fields are missing, unknown or malformed."""
        try:
            return cls(**content)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source} holds no valid topology ({error}); save it again") from error

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write_json(path, "topology", self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """Read what ``save`` wrote; ValueError for a foreign or truncated file."""
        return cls.from_dict(read_json(path, "topology"), str(path))
