"""What a layout costs on a trace: traffic, balance and the paper's proxy objective.

Letters: ``L`` layers, ``E`` experts, ``K`` experts per token, ``T`` tokens, ``R`` ranks, ``N`` nodes.
Functions take ``ids`` (L, T, K), -1 = pruned, and ``expert_to_rank`` (L, E), and return one value per layer, (L,).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cap_hf._files import read_only
from cap_hf.topology import Topology
from cap_hf.trace import RoutingTrace

__all__ = [
    "LayoutMetrics",
    "communication_cost",
    "distinct_destinations",
    "jaccard",
    "jaccard_of_counts",
    "load_imbalance",
    "measure",
    "rank_loads",
    "remote_rows_per_token",
    "visits_per_token",
]


@dataclass(frozen=True)
class LayoutMetrics:
    """Means over layers, and the per-layer arrays (L,) they come from.

    ``devices_per_token`` counts the distinct ranks that host a token's experts, ``nodes_per_token`` likewise;
    ``load_imbalance`` is the busiest rank's (token, expert) pairs over the mean; ``communication_cost`` is the
    paper's C (method section 1), which ignores that a token pays for a rank only once and so over-states traffic.
    """

    devices_per_token: float
    nodes_per_token: float
    load_imbalance: float
    communication_cost: float
    devices_per_token_by_layer: np.ndarray
    nodes_per_token_by_layer: np.ndarray
    load_imbalance_by_layer: np.ndarray
    communication_cost_by_layer: np.ndarray


def _visits(ids: np.ndarray, expert_to_place: np.ndarray, num_places: int) -> np.ndarray:
    """Which places one layer's tokens visit: (T, K), (E,) -> (T, places) bool; pruned slots visit none."""
    places = np.append(expert_to_place, num_places)[ids]  # id -1 reads the appended, spare place
    visited = np.zeros((len(ids), num_places + 1), dtype=bool)
    np.put_along_axis(visited, places, True, axis=1)
    return visited[:, :num_places]


def distinct_destinations(ids: np.ndarray, expert_to_place: np.ndarray, num_places: int) -> np.ndarray:
    """Mean number of distinct places (ranks or nodes) per token, (L,)."""
    counts = [_visits(layer, place, num_places).sum() / len(layer) for layer, place in zip(ids, expert_to_place, strict=True)]
    return np.array(counts)


def visits_per_token(ids: np.ndarray, expert_to_rank: np.ndarray, topology: Topology) -> np.ndarray:
    """Mean ranks that a token visits plus, with several nodes, ``inter_node_cost`` times the nodes it visits, (L,).

    A node counts once per token, as hierarchical dispatch pays for it. The token's own rank and node count too, since a
    trace does not say where a token will be when it is served.
    """
    visits = distinct_destinations(ids, expert_to_rank, topology.num_ranks)
    if topology.num_nodes > 1:
        nodes = distinct_destinations(ids, topology.rank_to_node[expert_to_rank], topology.num_nodes)
        visits = visits + topology.inter_node_cost * nodes
    return visits


def remote_rows_per_token(ids: np.ndarray, expert_to_rank: np.ndarray, num_ranks: int, source_rank: np.ndarray) -> np.ndarray:
    """Mean rows a token sends to ranks other than its own, ``source_rank`` (T,): the device-centric volume, (L,)."""
    rows = []
    for layer, ranks in zip(ids, expert_to_rank, strict=True):
        visited = _visits(layer, ranks, num_ranks)
        visited[np.arange(len(layer)), source_rank] = False
        rows.append(visited.sum() / len(layer))
    return np.array(rows)


def rank_loads(trace: RoutingTrace, expert_to_rank: np.ndarray, num_ranks: int) -> np.ndarray:
    """(token, expert) pairs processed by each rank, (L, R)."""
    loads = trace.expert_loads()
    return np.stack([np.bincount(ranks, weights=load, minlength=num_ranks) for ranks, load in zip(expert_to_rank, loads, strict=True)])


def load_imbalance(trace: RoutingTrace, expert_to_rank: np.ndarray, num_ranks: int) -> np.ndarray:
    """B = max over ranks of load / mean load, (L,); 1.0 is perfect, and the value of a layer without any load."""
    loads = rank_loads(trace, expert_to_rank, num_ranks)
    mean = loads.mean(axis=1)
    return np.where(mean > 0, loads.max(axis=1) / np.maximum(mean, 1e-300), 1.0)


def jaccard(trace: RoutingTrace) -> np.ndarray:
    """Co-activation p_ij = tokens with both / tokens with either, p_ii = 0, (L, E, E) float64 (method section 1)."""
    return jaccard_of_counts(trace.coactivation_counts())


def jaccard_of_counts(counts: np.ndarray) -> np.ndarray:
    """``jaccard`` from numbers of tokens with both experts, (..., E, E), the diagonal holding the loads."""
    both = counts.astype(np.float64)
    loads = np.einsum("...ee->...e", both)
    either = loads[..., :, None] + loads[..., None, :] - both
    p = np.divide(both, either, out=np.zeros_like(both), where=either > 0)
    np.einsum("...ee->...e", p)[...] = 0.0
    return p


def communication_cost(p: np.ndarray, expert_to_rank: np.ndarray, topology: Topology) -> np.ndarray:
    """C = sum over pairs i < j of p_ij * d(rank of i, rank of j), (L,)."""
    distances = [topology.cost_matrix[np.ix_(ranks, ranks)] for ranks in expert_to_rank]
    return np.array([(layer * distance).sum() / 2 for layer, distance in zip(p, distances, strict=True)])


def measure(trace: RoutingTrace, expert_to_rank: np.ndarray, topology: Topology) -> LayoutMetrics:
    """All metrics of one layout, ``expert_to_rank`` (L, E), on one trace."""
    values = (
        distinct_destinations(trace.expert_ids, expert_to_rank, topology.num_ranks),
        distinct_destinations(trace.expert_ids, topology.rank_to_node[expert_to_rank], topology.num_nodes),
        load_imbalance(trace, expert_to_rank, topology.num_ranks),
        communication_cost(jaccard(trace), expert_to_rank, topology),
    )
    devices, nodes, imbalance, cost = (float(value.mean()) for value in values)
    return LayoutMetrics(devices, nodes, imbalance, cost, *map(read_only, values))
