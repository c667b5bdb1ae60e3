"""The paper's two-stage greedy: grow groups of co-activated experts, then grow nodes out of the groups.

Every layer is placed alone, from its co-activation ``p`` (E, E): symmetric, non-negative, zero diagonal.
Letters: ``L`` layers, ``E`` experts per layer, ``R`` ranks (one group each), ``N`` nodes, ``N <= R <= E``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cap_hf.layout import rank_capacities
from cap_hf.topology import Topology

__all__ = ["greedy_groups", "greedy_layer", "greedy_layers", "groups_to_nodes"]

SAME_WEIGHT = 1e-9  # differences of summed weights below this are rounding: a tie


def greedy_groups(p: np.ndarray, capacities: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Group of each vertex, (E,), every group exactly as large as asked.

    The R vertices of largest weighted degree seed the groups, in that order. Then the groups take turns, full ones
    skipped: each takes the free vertex with the largest summed weight to its members, or a random free one where no
    free vertex has any. Equal degrees and equal sums go to the lowest id.

    Args:
        p: (E, E) weights between vertices, non-negative.
        capacities: (R,) sizes of the groups, each 1 or more, summing to E.
        rng: decides only the turns in which the best sum is 0.

    Raises:
        ValueError: ``p`` is not square, holds a negative or non-finite weight, or does not match the capacities.
    """
    p, capacities = np.asarray(p, dtype=np.float64), np.asarray(capacities)
    _check(p, capacities)
    num_vertices, num_groups = len(p), len(capacities)
    group = np.full(num_vertices, -1)
    affinity = np.zeros((num_groups, num_vertices))  # summed weight to the group's members; -inf once the vertex is taken

    def assign(vertex: int, to: int) -> None:
        group[vertex] = to
        affinity[to] += p[vertex]
        affinity[:, vertex] = -np.inf  # no later addition brings it back

    degrees = np.round(p.sum(axis=1) / SAME_WEIGHT)  # equal sums stay equal in whatever order they were added
    for turn, seed in enumerate(np.argsort(-degrees, kind="stable")[:num_groups]):
        assign(int(seed), turn)
    for turn in _turns(capacities):
        best = affinity[turn].max()
        if best == 0:
            assign(int(rng.choice(np.flatnonzero(group < 0))), turn)
        else:
            assign(int((affinity[turn] >= best - SAME_WEIGHT).argmax()), turn)
    return group


def _turns(capacities: np.ndarray) -> Iterator[int]:
    """The groups in round-robin order, each as often as it has room beside its seed."""
    for size in range(1, int(capacities.max())):
        yield from np.flatnonzero(capacities > size).tolist()


def _check(p: np.ndarray, capacities: np.ndarray) -> None:
    if p.ndim != 2 or p.shape[0] != p.shape[1]:
        raise ValueError(f"co-activation has shape {p.shape}; it must be square, one row and column per expert of the layer")
    if not np.isfinite(p).all() or (p < 0).any():
        raise ValueError(f"co-activation holds {p[~(np.isfinite(p) & (p >= 0))][0]}; weights must be finite and 0 or more")
    if capacities.ndim != 1 or not capacities.size or capacities.min() < 1 or capacities.sum() != len(p):
        raise ValueError(f"capacities {capacities.tolist()} do not fit {len(p)} experts; give sizes of 1 or more that sum to {len(p)}")


def groups_to_nodes(p: np.ndarray, expert_to_group: np.ndarray, num_nodes: int, rng: np.random.Generator) -> np.ndarray:
    """Node of each group, (R,): ``greedy_groups`` once more, on the summed co-activation between groups.

    Args:
        p: (E, E) co-activation of the layer.
        expert_to_group: (E,) what ``greedy_groups`` returned.
        num_nodes: N; every node takes R / N groups.
        rng: decides only the turns in which the best sum is 0.

    Raises:
        ValueError: N does not divide R, or ``p`` is malformed.
    """
    num_groups = int(expert_to_group.max()) + 1
    if num_nodes < 1 or num_groups % num_nodes:
        raise ValueError(f"{num_groups} groups for {num_nodes} nodes; the number must divide {num_groups}: use equally large nodes")
    member = np.eye(num_groups)[expert_to_group]  # (E, R) one-hot
    between = member.T @ p @ member
    np.fill_diagonal(between, 0.0)
    return greedy_groups(between, np.full(num_nodes, num_groups // num_nodes), rng)


def greedy_layer(p: np.ndarray, topology: Topology, rng: np.random.Generator) -> np.ndarray:
    """Rank of each expert of one layer, (E,), from its co-activation ``p`` (E, E).

    Inside a node, ranks take the groups in seed order. Where R does not divide E, the first ``E % R`` groups hold one
    expert more; in a single node these are the first ranks, else the ranks that the groups' nodes give them.

    Raises:
        ValueError: fewer experts than ranks, or ``p`` is malformed.
    """
    expert_to_group = greedy_groups(p, rank_capacities(len(p), topology.num_ranks), rng)
    nodes = groups_to_nodes(p, expert_to_group, topology.num_nodes, rng)
    group_to_rank = np.argsort(np.argsort(nodes, kind="stable"))  # nodes hold consecutive ranks
    expert_to_rank: np.ndarray = group_to_rank[expert_to_group]
    return expert_to_rank


def greedy_layers(p: np.ndarray, topology: Topology, seed: int = 0) -> np.ndarray:
    """Rank of each expert, (L, E), from the co-activation ``p`` (L, E, E); a layer's result depends on that layer alone.

    Raises:
        ValueError: fewer experts than ranks, or ``p`` is malformed.
    """
    return np.stack([greedy_layer(layer, topology, np.random.default_rng([seed, index])) for index, layer in enumerate(p)])
