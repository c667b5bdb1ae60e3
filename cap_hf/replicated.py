"""Where every expert lives when some have several copies.

Letters: ``L`` MoE layers, ``E`` experts per layer, ``R`` ranks, ``S`` slots per rank, ``N`` nodes, ``T`` tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cap_hf._files import read_json, read_only, write_json
from cap_hf.layout import ExpertLayout
from cap_hf.metrics import LayoutMetrics, distinct_destinations, jaccard
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace

__all__ = ["ReplicatedLayout", "nearest_copy_cost"]


@dataclass(frozen=True, eq=False, repr=False)
class ReplicatedLayout:
    """Immutable map from the slots of every rank to experts, every layer on its own; each expert has one slot or more.

    Args:
        slot_to_expert: (L, R, S) integers, expert of each slot in [0, E), -1 = empty. A rank may hold an expert twice, as
            plans of DeepSeek's EPLB do: give its (L, R * S) array reshaped to (L, R, S).
        topology: the machine the layout is for.
        layer_ids: (L,) index of each MoE layer in the model; default 0 .. L-1.
        num_experts: E; default: the highest id plus 1.

    Raises:
        ValueError: wrong shape or type, another number of ranks than the topology's, ids out of range, an expert without a slot.
    """

    slot_to_expert: Any
    topology: Topology
    layer_ids: Any = None
    num_experts: int = 0

    def __post_init__(self) -> None:
        slots = np.asarray(self.slot_to_expert)
        if slots.ndim != 3 or 0 in slots.shape or not np.issubdtype(slots.dtype, np.integer):
            raise ValueError(f"slot_to_expert has shape {slots.shape} and type {slots.dtype}; it must be integers, (layers, ranks, slots)")
        if slots.shape[1] != self.topology.num_ranks:
            raise ValueError(
                f"slot_to_expert has {slots.shape[1]} ranks, the topology {self.topology.num_ranks}; use one of the two numbers"
            )
        num_experts = int(self.num_experts or slots.max() + 1)
        outside = (slots < -1) | (slots >= num_experts)
        if outside.any() or num_experts < 1:
            layer, rank, slot = (int(i) for i in np.argwhere(outside | (num_experts < 1))[0])
            raise ValueError(
                f"slot_to_expert[{layer}, {rank}, {slot}] is {slots[layer, rank, slot]}; it must be -1 (empty) or an expert, "
                f"0 to {max(num_experts, 1) - 1}: check num_experts or place again"
            )
        layer_ids = np.array(range(len(slots)) if self.layer_ids is None else self.layer_ids, dtype=np.int64)
        if layer_ids.shape != (len(slots),):
            raise ValueError(f"layer_ids has {layer_ids.size} entries; slot_to_expert has {len(slots)} layers")
        values = {"slot_to_expert": read_only(slots.astype(np.int64)), "layer_ids": read_only(layer_ids), "num_experts": num_experts}
        for name, value in values.items():  # the only writes a frozen value ever sees
            object.__setattr__(self, name, value)
        if not self.num_copies.all():
            layer, expert = (int(i) for i in np.argwhere(self.num_copies == 0)[0])
            raise ValueError(
                f"expert {expert} of layer {layer} has no slot; each of the {num_experts} experts needs 1 or more: place again"
            )

    @classmethod
    def from_layout(cls, layout: ExpertLayout) -> ReplicatedLayout:
        """One slot per expert, ids ascending on each rank; ranks that hold fewer experts than the fullest end with empty slots."""
        ranks, counts = layout.expert_to_rank, layout.experts_per_rank()
        order = np.argsort(ranks, axis=1, kind="stable")  # rank by rank
        rank = np.take_along_axis(ranks, order, axis=1)
        slot = np.arange(layout.num_experts) - np.take_along_axis(counts.cumsum(axis=1) - counts, rank, axis=1)
        slots = np.full((layout.num_layers, layout.num_ranks, counts.max()), -1)
        slots[np.arange(layout.num_layers)[:, None], rank, slot] = order
        return cls(slots, layout.topology, layout.layer_ids, layout.num_experts)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.slot_to_expert.shape[0]

    @property
    def num_ranks(self) -> int:
        """R."""
        return self.slot_to_expert.shape[1]

    @property
    def slots_per_rank(self) -> int:
        """S, empty ones included."""
        return self.slot_to_expert.shape[2]

    @cached_property
    def hosts(self) -> np.ndarray:
        """Which ranks hold which experts, (L, E, R) bool."""
        hosts = np.zeros((self.num_layers, self.num_experts + 1, self.num_ranks), dtype=bool)
        layer, rank, _ = np.indices(self.slot_to_expert.shape, sparse=True)
        hosts[layer, self.slot_to_expert, rank] = True  # -1 writes to the spare last expert
        return read_only(np.ascontiguousarray(hosts[:, :-1]))

    @property
    def num_copies(self) -> np.ndarray:
        """Ranks that hold each expert, (L, E); twice on a rank counts once."""
        return self.hosts.sum(axis=2)

    def metrics(self, trace: RoutingTrace, source_rank: np.ndarray | None = None) -> LayoutMetrics:
        """Traffic and balance on ``trace``, each token using the copies that ``route_tokens`` gives it.

        Args:
            trace: of the model that the layout is for.
            source_rank: (T,) rank that each token is on; default: its request's number modulo R.

        ``communication_cost`` takes each pair of experts at the distance of their nearest copies (``nearest_copy_cost``).

        Raises:
            ValueError: a trace of another model, or malformed source ranks.
        """
        from cap_hf.placement.routing import route_tokens, source_ranks  # compiled code, loaded where it is needed

        if (trace.num_layers, trace.num_experts) != (self.num_layers, self.num_experts):
            raise ValueError(
                f"trace has {trace.num_layers} layers of {trace.num_experts} experts, the layout {self.num_layers} of {self.num_experts}; "
                "use a trace of the model that the layout is for"
            )
        sources = source_ranks(trace, self.num_ranks) if source_rank is None else source_rank
        ranks = route_tokens(trace.expert_ids, self.hosts, self.topology, sources)
        itself = np.tile(np.arange(self.num_ranks), (self.num_layers, 1))
        loads = np.stack([np.bincount(layer.ravel() + 1, minlength=self.num_ranks + 1)[1:] for layer in ranks])
        values = (
            distinct_destinations(ranks, itself, self.num_ranks),
            distinct_destinations(ranks, self.topology.rank_to_node[itself], self.topology.num_nodes),
            np.where(loads.any(axis=1), loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1e-300), 1.0),
            nearest_copy_cost(jaccard(trace), self.hosts, self.topology),
        )
        devices, nodes, imbalance, cost = (float(value.mean()) for value in values)
        return LayoutMetrics(devices, nodes, imbalance, cost, *map(read_only, values))

    @property
    def fingerprint(self) -> str:
        """First 12 hex digits of a SHA-256 over the content: the layout's name in reports."""
        content = repr((self.topology, self.layer_ids.tolist(), self.num_experts, self.slot_to_expert.tolist()))
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready content."""
        return {
            "topology": self.topology.to_dict(),
            "layer_ids": self.layer_ids.tolist(),
            "num_experts": self.num_experts,
            "slot_to_expert": self.slot_to_expert.tolist(),
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any], source: str = "layout") -> ReplicatedLayout:
        """Inverse of ``to_dict``; ValueError names ``source`` where a field is missing or malformed."""
        try:
            topology = Topology.from_dict(content["topology"], source)
            layer_ids = np.array(content["layer_ids"], dtype=np.int64)
            return cls(np.array(content["slot_to_expert"]), topology, layer_ids, content["num_experts"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{source} lacks a valid topology, slot_to_expert, layer_ids or num_experts ({error}); save the layout again"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write_json(path, "replicated_layout", self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> ReplicatedLayout:
        """Read what ``save`` wrote; ValueError for a foreign or truncated file."""
        return cls.from_dict(read_json(path, "replicated_layout"), str(path))

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, ReplicatedLayout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        shape = f"{self.num_layers}x{self.num_ranks}x{self.slots_per_rank}"
        return f"ReplicatedLayout(slot_to_expert=<{shape}>, topology={self.topology!r}, fingerprint={self.fingerprint!r})"


def nearest_copy_cost(p: np.ndarray, hosts: np.ndarray, topology: Topology) -> np.ndarray:
    """C = sum over pairs i < j of p_ij * distance of the nearest copies of i and j, (L,); the paper's C where none has a second.

    Too low as a count of traffic where copies are many: a token with three experts may find no two distances at once.

    Args:
        p: (L, E, E) co-activation, zero diagonal.
        hosts: (L, E, R) bool, which ranks hold which experts.
        topology: prices of the distances, 0 on one rank, 1 in one node, ``inter_node_cost`` between nodes.
    """
    costs = []
    for layer, on_rank in zip(p, hosts.astype(np.int64), strict=True):
        on_node = on_rank.reshape(len(on_rank), topology.num_nodes, -1).sum(axis=2)
        distance = np.where(on_node @ on_node.T > 0, 1.0, float(topology.inter_node_cost))
        distance[on_rank @ on_rank.T > 0] = 0.0
        costs.append((layer * distance).sum() / 2)
    return np.array(costs)
