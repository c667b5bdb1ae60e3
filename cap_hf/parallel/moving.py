"""Experts on the move: from one layout to another, and home to one rank for saving.

Letters: ``R`` ranks, ``n`` experts of this rank in a layer. Both sides know both layouts, so only weights travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cap_hf.families import MoEFamily
from cap_hf.layout import ExpertLayout
from cap_hf.parallel.groups import ExpertGroup
from cap_hf.parallel.loading import experts_module, set_expert_parameters

__all__ = ["gathered_state_dict", "move_experts"]


def _exchange(parameter: torch.Tensor, old: np.ndarray, new: np.ndarray, group: ExpertGroup) -> torch.Tensor:
    """One packed parameter from placement ``old`` to ``new``, both (E,) ranks: (n_old, ...) -> (n_new, ...), ascending ids."""
    me, hosted = group.rank, np.flatnonzero(old == group.rank)
    leaving = [np.flatnonzero((old == me) & (new == rank) & (rank != me)) for rank in range(group.size)]
    arriving = [np.flatnonzero((new == me) & (old == rank) & (rank != me)) for rank in range(group.size)]
    staying = np.flatnonzero((old == me) & (new == me))
    slots = torch.from_numpy(np.searchsorted(hosted, np.concatenate(leaving))).to(parameter.device)
    received = group.all_to_all(parameter[slots], [len(ids) for ids in arriving], [len(ids) for ids in leaving])
    kept = parameter[torch.from_numpy(np.searchsorted(hosted, staying)).to(parameter.device)]
    order = np.argsort(np.concatenate([staying, *arriving]), kind="stable")
    return torch.cat([kept, received])[torch.from_numpy(order).to(parameter.device)]


def move_experts(model: Any, family: MoEFamily, old: ExpertLayout, new: ExpertLayout, group: ExpertGroup) -> None:
    """Move a live model's experts from layout ``old`` to ``new``; only experts that change rank travel, layer by layer."""
    with torch.no_grad():
        for layer, layer_id in enumerate(old.layer_ids.tolist()):
            if (old.expert_to_rank[layer] == new.expert_to_rank[layer]).all():
                continue
            module = experts_module(model, family, layer_id)
            ranks = old.expert_to_rank[layer], new.expert_to_rank[layer]
            set_expert_parameters(module, {name: _exchange(getattr(module, name), *ranks, group) for name in family.packed_parameters})


def gathered_state_dict(model: Any, family: MoEFamily, layout: ExpertLayout, group: ExpertGroup) -> Mapping[str, torch.Tensor]:
    """Full state dict on rank 0, experts in id order and on the CPU; the other ranks send theirs and get an empty dict."""
    experts: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for layer, layer_id in enumerate(layout.layer_ids.tolist()):
            module, prefix = experts_module(model, family, layer_id), family.experts_path(layer_id)
            for name in family.packed_parameters:
                here = getattr(module, name)
                ranks = layout.expert_to_rank[layer]
                whole = here if group.size == 1 else _exchange(here, ranks, np.zeros_like(ranks), group)
                if group.rank == 0:
                    experts[f"{prefix}.{name}"] = whole.cpu()
    return {**model.state_dict(), **experts} if group.rank == 0 else {}
