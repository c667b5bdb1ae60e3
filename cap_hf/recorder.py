"""Records the routing of a live model: ids and scores after pruning, request by request, padding left out.

Letters: ``L`` MoE layers, ``T`` tokens, ``K`` experts per token, ``B`` rows of a batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from cap_hf.trace import RoutingTrace

if TYPE_CHECKING:
    from cap_hf.modeling import CAPMoEModel

__all__ = ["RoutingRecorder", "record_requests", "record_texts"]


@dataclass
class _Forward:
    """One forward under way."""

    rows: torch.Tensor
    """Request of each batch row, (B,)."""
    length: int
    """Positions S."""
    keep: torch.Tensor | None
    """(B * S,) tokens that count; None for all."""
    cache: Any
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """MoE layer -> ids and weights of the tokens that count."""


class RoutingRecorder:
    """Use around forwards or ``generate``; every batch row is a request, and decoding continues the rows of its prompt.

    A forward counts once it has succeeded. Beams are requests of their own, and candidates that assisted generation
    rejects count as well. Recorders may be nested; each sees what runs inside it.

    ::

        with RoutingRecorder(model) as recorder:
            model(**batch)
        trace = recorder.trace()
    """

    def __init__(self, model: CAPMoEModel) -> None:
        self._model = model
        self._ids: list[list[torch.Tensor]] = [[] for _ in range(model.layout.num_layers)]
        self._weights: list[list[torch.Tensor]] = [[] for _ in range(model.layout.num_layers)]
        self._requests: list[torch.Tensor] = []
        self._num_requests = 0
        self._rows_of_cache: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()
        self._forward: _Forward | None = None
        self.num_tokens = 0
        """Tokens recorded so far on this rank."""

    def __enter__(self) -> RoutingRecorder:
        self._model.attach(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self._forward = None
        self._model.detach(self)

    def begin_forward(self, recorded: torch.Tensor, cache: Any, past_length: int) -> None:
        """Told by the model before each forward: which tokens count, (B, S) bool, and the cache they continue.

        Raises:
            ValueError: the cache holds positions that were not recorded.
        """
        self._forward = None
        batch_size = len(recorded)
        if past_length == 0:
            rows = torch.arange(self._num_requests, self._num_requests + batch_size)
        else:
            known = self._rows_of_cache.get(cache)
            if known is None or len(known) != batch_size:
                held = "no recorded rows" if known is None else f"{len(known)} recorded rows"
                raise ValueError(f"a forward of {batch_size} rows continues a cache with {held}; record from the prompt on, rows unchanged")
            rows = known
        flat = recorded.flatten()
        self._forward = _Forward(rows, recorded.shape[1], None if bool(flat.all()) else flat, cache)

    def observe(self, layer: int, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> None:
        """Told by the experts hook: one layer's ids (T, K), -1 = pruned, and weights (T, K)."""
        forward = self._forward
        if forward is None or layer in forward.layers:  # outside a forward of the model, or computed again for a gradient
            return
        if forward.keep is not None:
            expert_ids, expert_weights = expert_ids[forward.keep], expert_weights[forward.keep]
        forward.layers[layer] = expert_ids.detach().to(torch.int16), expert_weights.detach()

    def end_forward(self, cache: Any) -> None:
        """Told by the model when a forward has succeeded: what it observed now counts, if it ran all layers."""
        forward, self._forward = self._forward, None
        if forward is None:
            return
        self._num_requests = max(self._num_requests, int(forward.rows.max()) + 1)
        for each in (forward.cache, cache):
            if each is not None:
                self._rows_of_cache[each] = forward.rows
        if len(forward.layers) < len(self._ids):  # an early exit: nothing to record, but its cache may be continued
            return
        for layer, (ids, weights) in forward.layers.items():
            self._ids[layer].append(ids)
            self._weights[layer].append(weights)
        rows = forward.rows.repeat_interleave(forward.length)
        self._requests.append(rows if forward.keep is None else rows[forward.keep.cpu()])
        self.num_tokens += len(self._requests[-1])

    def trace(self) -> RoutingTrace:
        """What was recorded on all ranks of the model's group (each must call), requests of rank 0 first.

        Raises:
            ValueError: no token was recorded on any rank.
        """
        group, top_k = self._model.group, self._model.top_k
        ids = [torch.cat(layer) if layer else torch.zeros((0, top_k), dtype=torch.int16) for layer in self._ids]
        weights = [torch.cat(layer).float() if layer else torch.zeros((0, top_k)) for layer in self._weights]
        requests = torch.cat(self._requests) if self._requests else torch.zeros(0, dtype=torch.long)
        order = torch.sort(requests, stable=True).indices.to(ids[0].device)
        lengths = torch.bincount(requests, minlength=self._num_requests).to(ids[0].device)
        all_ids = group.gather_rows(torch.stack(ids, dim=1)[order])  # (T, L, K)
        all_weights = group.gather_rows(torch.stack(weights, dim=1)[order])
        all_lengths = group.gather_rows(lengths)
        if len(all_ids) == 0:
            raise ValueError("0 tokens were recorded; run 1 forward or more with unpadded tokens inside the recorder's context")
        kept_ids = np.ascontiguousarray(all_ids.cpu().numpy().transpose(1, 0, 2))
        kept_weights = np.where(kept_ids >= 0, all_weights.cpu().numpy().transpose(1, 0, 2), 0)
        layout = self._model.layout
        return RoutingTrace(kept_ids, layout.num_experts, kept_weights, layout.layer_ids, all_lengths.cpu().numpy())


def record_texts(
    model: CAPMoEModel, tokenizer: Any, texts: Iterable[str], num_tokens: int = 8000, batch_size: int = 4, progress: bool = True
) -> RoutingTrace:
    """Routing of about ``num_tokens`` tokens of ``texts``, each text a request cut at the model's context length.

    Every rank gives the same texts and runs its share of them. Stops after the batch that reaches ``num_tokens``.

    Raises:
        ValueError: on every rank, before the first forward, if the texts yield no tokens or an argument is below 1.
    """
    with model.group.all_or_none():
        if num_tokens < 1 or batch_size < 1:
            raise ValueError(f"num_tokens is {num_tokens} and batch_size {batch_size}; both must be 1 or more")
        if isinstance(texts, str):
            raise ValueError(f"texts is one string of {len(texts)} characters; give a list of texts")
        requests = _tokenized(model, tokenizer, texts, num_tokens)
    return record_requests(model, requests, batch_size, progress)


def record_requests(model: CAPMoEModel, requests: Sequence[list[int]], batch_size: int = 4, progress: bool = True) -> RoutingTrace:
    """Routing of token ids, a list per request; every rank gives the same requests and runs its share of them."""
    group = model.group
    own = range(group.rank * batch_size, len(requests), group.size * batch_size)
    quiet = not progress or group.rank > 0 or len(own) < 3
    with RoutingRecorder(model) as recorder:
        with model.joined(), torch.no_grad():
            for start in tqdm(own, desc="recording routing", unit="batch", disable=quiet):
                model(**_padded(requests[start : start + batch_size], model.device), use_cache=False, logits_to_keep=1)
        return recorder.trace()


def _tokenized(model: CAPMoEModel, tokenizer: Any, texts: Iterable[str], num_tokens: int) -> list[list[int]]:
    """Token ids of as many texts as hold ``num_tokens`` tokens."""
    longest, left = int(model.config.max_position_embeddings), num_tokens
    requests: list[list[int]] = []
    num_texts = 0
    for num_texts, text in enumerate(texts, start=1):  # noqa: B007  # the last value is told in the error
        ids = tokenizer(text, truncation=True, max_length=min(longest, left))["input_ids"]
        requests += [ids] if ids else []
        left -= len(ids)
        if left == 0:
            break
    if not requests:
        raise ValueError(f"{num_texts} texts yield 0 tokens, 1 or more needed; give texts that are not empty")
    return requests


def _padded(requests: Sequence[list[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """Right-padded batch: input_ids and attention_mask, (B, S)."""
    longest = max(map(len, requests))
    ids = torch.tensor([[*request, *[0] * (longest - len(request))] for request in requests], device=device)
    mask = torch.tensor([[1] * len(request) + [0] * (longest - len(request)) for request in requests], device=device)
    return {"input_ids": ids, "attention_mask": mask}
