"""Placements that ignore the trace: what the others are compared with.

Letters: ``L`` layers, ``E`` experts per layer, ``R`` ranks, ``R <= E``.
"""

from __future__ import annotations

import numpy as np

from cap_hf.layout import ExpertLayout, rank_capacities
from cap_hf.topology import Topology

__all__ = ["random", "sequential"]


def sequential(num_layers: int, num_experts: int, num_ranks: int) -> np.ndarray:
    """Experts in id order, a contiguous range on each rank: expert to rank, (L, E).

    Raises:
        ValueError: fewer experts than ranks, or no rank.
    """
    rank_capacities(num_experts, num_ranks)
    return ExpertLayout.sequential(num_layers, num_experts, Topology(num_ranks)).expert_to_rank


def random(num_layers: int, num_experts: int, num_ranks: int, seed: int = 0) -> np.ndarray:
    """``sequential`` with the experts of each layer shuffled, a different way in every layer: expert to rank, (L, E).

    Raises:
        ValueError: fewer experts than ranks, or no rank.
    """
    rng = np.random.default_rng(seed)
    return rng.permuted(sequential(num_layers, num_experts, num_ranks), axis=1)
