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

_TOKENS_AT_ONCE = 16_384


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
        self._waiting: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._num_waiting = 0

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
        source_T = self.model._runtime.sources(len(ids_TK), ids_TK.device)
        if self._keep is not None:
            ids_TK, weights_TK, source_T = ids_TK[self._keep], weights_TK[self._keep], source_T[self._keep]
        self._waiting.append((layer, ids_TK, weights_TK, source_T))
        self._num_waiting += len(ids_TK)
        if self._num_waiting >= _TOKENS_AT_ONCE:
            self._add_up()

    def _add_up(self) -> None:
        """Count what is waiting; many layers of short forwards at once, for each operation costs the same for one token."""
        if not self._num_waiting:
            return
        layers, ids, weights, sources = zip(*self._waiting, strict=True)
        self._waiting, self._num_waiting = [], 0
        ids_TK, weights_TK, source_T = torch.cat(ids), torch.cat(weights).float(), torch.cat(sources).long()
        layout, device = self.model.layout, ids_TK.device
        layer_T = torch.repeat_interleave(torch.tensor(layers, device=device), torch.tensor([len(each) for each in ids], device=device))
        kept_TK = ids_TK >= 0
        rank_TK = torch.tensor(layout.expert_to_rank, device=device)[layer_T[:, None], ids_TK.clamp(min=0)].long()
        rank_TK = torch.where(kept_TK, rank_TK, layout.num_ranks)
        visited_TR = torch.zeros((len(ids_TK), layout.num_ranks + 1), dtype=torch.bool, device=device).scatter_(1, rank_TK, True)
        visited_TR = visited_TR[:, : layout.num_ranks]
        mass_T = torch.where(kept_TK, weights_TK, 0).sum(1) / weights_TK.sum(1).clamp(min=1e-30)
        devices, own = visited_TR.sum(), visited_TR.gather(1, source_T[:, None]).sum()
        values = torch.stack([devices.double(), (devices - own).double(), kept_TK.sum().double(), mass_T.double().sum()]).tolist()
        self.sums = [total + value for total, value in zip(self.sums, values, strict=True)]
        self.count += len(ids_TK)

    def end_forward(self, cache: Any) -> None:
        """Told by the model."""

    def means(self) -> dict[str, float]:
        """Over everything counted on all ranks (each must call)."""
        self._add_up()
        everywhere = self.model.group.gather_json([self.count, *self.sums])
        count, *sums = (sum(column) for column in zip(*everywhere, strict=True))
        return {name: total / max(count, 1) for name, total in zip(self.NAMES, sums, strict=True)}
