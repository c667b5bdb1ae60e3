"""What pruning leaves of the routing, counted while a model runs.

Letters: ``B`` rows of a batch, ``S`` positions, ``T`` = B * S tokens, ``K`` experts per token, ``R`` ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cap_hf.modeling import CAPMoEModel

__all__ = ["RoutingMeter"]


class RoutingMeter:
    """Means over tokens and MoE layers of what pruning leaves; an observer of the model.

    Padding is not counted: ``real`` says which tokens of the next forward are none, where its attention mask does not.
    """

    NAMES = ("devices_per_token", "rows_per_token", "experts_kept", "score_kept")

    def __init__(self, model: CAPMoEModel) -> None:
        self.model = model
        self.real: torch.Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything counted."""
        self.sums, self.count = [0.0] * len(self.NAMES), 0
        self._keep: torch.Tensor | None = None
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def begin_forward(self, recorded_BS: torch.Tensor, cache: Any, past_length: int) -> None:
        """Told by the model."""
        real_BS = recorded_BS if self.real is None else recorded_BS & self.real
        self._keep = None if bool(real_BS.all()) else real_BS.flatten()

    def observe(self, layer: int, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        """Told by the experts hook."""
        if self._is_paused:
            return
        runtime = self.model._runtime
        source_T = runtime.sources(len(ids_TK), ids_TK.device).long()
        if self._keep is not None:
            ids_TK, weights_TK, source_T = ids_TK[self._keep], weights_TK[self._keep], source_T[self._keep]
        if not len(ids_TK):
            return
        kept_TK = ids_TK >= 0
        num_ranks = runtime.layout.num_ranks
        expert_to_rank = torch.tensor(runtime.layout.expert_to_rank[layer], device=ids_TK.device)
        rank_TK = torch.where(kept_TK, expert_to_rank[ids_TK.clamp(min=0).long()], num_ranks)
        visited_TR = torch.zeros((len(ids_TK), num_ranks + 1), dtype=torch.bool, device=ids_TK.device).scatter_(1, rank_TK, True)
        visited_TR = visited_TR[:, :num_ranks]
        weights_TK = weights_TK.float()
        mass_T = torch.where(kept_TK, weights_TK, 0).sum(1) / weights_TK.sum(1).clamp(min=1e-30)
        devices = visited_TR.sum()
        own = visited_TR.gather(1, source_T[:, None]).sum()
        values = torch.stack([devices.double(), (devices - own).double(), kept_TK.sum().double(), mass_T.double().sum()]).tolist()
        self.sums = [total + value for total, value in zip(self.sums, values, strict=True)]
        self.count += len(ids_TK)

    def end_forward(self, cache: Any) -> None:
        """Told by the model."""

    def means(self) -> dict[str, float]:
        """Over everything counted on all ranks (each must call)."""
        everywhere = self.model.group.gather_json([self.count, *self.sums])
        count, *sums = (sum(column) for column in zip(*everywhere, strict=True))
        return {name: total / max(count, 1) for name, total in zip(self.NAMES, sums, strict=True)}
