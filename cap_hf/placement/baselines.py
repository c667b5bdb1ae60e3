"""Placements that ignore the trace: what the others are compared with.

Letters: ``L`` layers, ``E`` experts per layer, ``R`` ranks, ``R <= E``.
"""

from __future__ import annotations

import numpy as np

__all__ = ["random", "rank_capacities", "sequential"]


def rank_capacities(num_experts: int, num_ranks: int) -> np.ndarray:
    """Experts per rank, (R,): ``E // R``, and one more on each of the first ``E % R`` ranks.

    Raises:
        ValueError: fewer experts than ranks, or no rank.
    """
    if not 1 <= num_ranks <= num_experts:
        raise ValueError(f"{num_experts} experts per layer for {num_ranks} ranks; every rank needs an expert: use 1 to {num_experts} ranks")
    return num_experts // num_ranks + (np.arange(num_ranks) < num_experts % num_ranks)


def sequential(num_layers: int, num_experts: int, num_ranks: int) -> np.ndarray:
    """Experts in id order, a contiguous range on each rank: expert to rank, (L, E).

    Raises:
        ValueError: fewer experts than ranks, or no rank.
    """
    one_layer = np.repeat(np.arange(num_ranks), rank_capacities(num_experts, num_ranks))
    return np.tile(one_layer, (num_layers, 1))


def random(num_layers: int, num_experts: int, num_ranks: int, seed: int = 0) -> np.ndarray:
    """``sequential`` with the experts of each layer shuffled, a different way in every layer: expert to rank, (L, E).

    Raises:
        ValueError: fewer experts than ranks, or no rank.
    """
    rng = np.random.default_rng(seed)
    return rng.permuted(sequential(num_layers, num_experts, num_ranks), axis=1)
