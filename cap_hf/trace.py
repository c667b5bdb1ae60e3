"""Which experts each token selected, layer by layer.

Letters: ``L`` MoE layers, ``E`` experts per layer, ``K`` experts per token, ``T`` tokens; -1 marks a pruned slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cap_hf._files import read_arrays, read_only, write_arrays

__all__ = ["RoutingTrace"]


@dataclass(frozen=True, eq=False, repr=False)
class RoutingTrace:
    """Immutable record of routing; token t is the same token in every layer.

    Args:
        expert_ids: (L, T, K) integers in [0, E) or -1, no id twice in a row.
        num_experts: E.
        expert_weights: (L, T, K) gate scores, or None where only ids are known.
        layer_ids: (L,) index of each MoE layer in the model; default 0 .. L-1.
        request_lengths: (number of requests,) tokens of each request, in order; default one request.

    Raises:
        ValueError: wrong shape or type, no tokens, ids out of range or twice in a row, lengths that do not sum to T.
    """

    expert_ids: Any
    num_experts: int
    expert_weights: Any = None
    layer_ids: Any = None
    request_lengths: Any = None

    def __post_init__(self) -> None:
        ids = np.asarray(self.expert_ids)
        if ids.ndim != 3 or 0 in ids.shape:
            raise ValueError(f"expert_ids has shape {ids.shape}; it must be (layers, tokens, experts per token), each 1 or more")
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"expert_ids has type {ids.dtype}; it must be an integer type")
        if not 1 <= self.num_experts <= np.iinfo(np.int16).max:
            raise ValueError(f"num_experts is {self.num_experts}; it must be 1 to {np.iinfo(np.int16).max}")
        _check_ids(ids.astype(np.int64), self.num_experts)
        values = {
            "expert_ids": ids.astype(np.int16),
            "num_experts": int(self.num_experts),
            "expert_weights": None if self.expert_weights is None else np.array(self.expert_weights, dtype=np.float32),
            "layer_ids": np.array(range(len(ids)) if self.layer_ids is None else self.layer_ids, dtype=np.int64),
            "request_lengths": np.array([ids.shape[1]] if self.request_lengths is None else self.request_lengths, dtype=np.int64),
        }
        for name, value in values.items():  # the only writes a frozen value ever sees
            object.__setattr__(self, name, read_only(value) if isinstance(value, np.ndarray) else value)
        self._check_companions()

    def _check_companions(self) -> None:
        """Weights, layer ids and request lengths must agree with the ids."""
        shape = self.expert_ids.shape
        weights, layer_ids, lengths = self.expert_weights, np.asarray(self.layer_ids), np.asarray(self.request_lengths)
        if weights is not None and weights.shape != shape:
            raise ValueError(f"expert_weights has shape {weights.shape}; it must equal that of expert_ids, {shape}")
        if weights is not None and not np.isfinite(weights).all():
            layer, token, slot = (int(i) for i in np.argwhere(~np.isfinite(weights))[0])
            raise ValueError(f"expert_weights[{layer}, {token}, {slot}] is {weights[layer, token, slot]}; scores must be finite")
        if layer_ids.shape != shape[:1]:
            raise ValueError(f"layer_ids has {layer_ids.size} entries; expert_ids has {shape[0]} layers")
        if lengths.ndim != 1 or (lengths < 0).any():
            raise ValueError(f"request_lengths is {lengths.tolist()[:8]}...; it must hold one length of 0 or more per request")
        if lengths.sum() != shape[1]:
            raise ValueError(f"request_lengths sums to {lengths.sum()}; it must sum to the {shape[1]} tokens of expert_ids")

    @property
    def num_layers(self) -> int:
        """L."""
        return self.expert_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.expert_ids.shape[1]

    @property
    def top_k(self) -> int:
        """K."""
        return self.expert_ids.shape[2]

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.request_lengths)

    @property
    def token_to_request(self) -> np.ndarray:
        """Request of each token, (T,)."""
        return np.repeat(np.arange(self.num_requests), self.request_lengths)

    def select(self, requests: slice | Sequence[int] | np.ndarray) -> RoutingTrace:
        """The trace of some requests, in the order asked for; ValueError if none is left."""
        ends = np.cumsum(self.request_lengths)
        try:
            chosen = np.atleast_1d(np.arange(self.num_requests)[requests])
        except IndexError as error:
            raise ValueError(f"selection {requests!r} is outside the trace's requests 0 to {self.num_requests - 1} ({error})") from error
        if self.request_lengths[chosen].sum() == 0:
            raise ValueError(f"selection {requests!r} of {self.num_requests} requests holds 0 tokens; select 1 request or more with tokens")
        tokens = np.concatenate([np.arange(ends[i] - self.request_lengths[i], ends[i]) for i in chosen])
        return self._take(tokens, self.request_lengths[chosen])

    def select_tokens(self, tokens: slice) -> RoutingTrace:
        """The trace of a contiguous range of tokens, requests cut where they must be; ValueError if none is left."""
        chosen = np.arange(self.num_tokens)[tokens]
        if not chosen.size:
            raise ValueError(f"selection {tokens!r} of {self.num_tokens} tokens is empty; select 1 token or more")
        counts = np.bincount(self.token_to_request[chosen], minlength=self.num_requests)
        return self._take(chosen, counts[counts > 0])

    def _take(self, tokens: np.ndarray, lengths: np.ndarray) -> RoutingTrace:
        weights = None if self.expert_weights is None else self.expert_weights[:, tokens]
        return RoutingTrace(self.expert_ids[:, tokens], self.num_experts, weights, self.layer_ids, lengths)

    @classmethod
    def concatenate(cls, traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Join traces of one model token after token; ValueError if they differ in layers, experts or experts per token."""
        if not traces:
            raise ValueError("0 traces to join; give 1 or more")
        facts = {(t.num_layers, t.num_experts, t.top_k, tuple(t.layer_ids.tolist()), t.expert_weights is None) for t in traces}
        if len(facts) > 1:
            raise ValueError(
                f"traces of {len(facts)} different shapes cannot be joined (layers, experts, top k, layer ids, no weights): {sorted(facts)}"
            )
        weights = None if traces[0].expert_weights is None else np.concatenate([t.expert_weights for t in traces], axis=1)
        ids = np.concatenate([t.expert_ids for t in traces], axis=1)
        return cls(ids, traces[0].num_experts, weights, traces[0].layer_ids, np.concatenate([t.request_lengths for t in traces]))

    def expert_loads(self) -> np.ndarray:
        """(token, expert) pairs per expert, (L, E) int64; pruned slots do not count."""
        shifted = self.expert_ids.astype(np.int64) + 1  # slot 0 collects the pruned ones
        return np.stack([np.bincount(layer.ravel(), minlength=self.num_experts + 1)[1:] for layer in shifted])

    def coactivation_counts(self) -> np.ndarray:
        """Tokens that selected both i and j, (L, E, E) int64; the diagonal holds the expert loads."""
        return np.stack([np.rint(onehot.T @ onehot).astype(np.int64) for onehot in self._incidence()])

    def _incidence(self) -> Iterator[np.ndarray]:
        """Token-by-expert 0/1 matrix of each layer in turn, (T, E) float32: exact for counts below 2**24."""
        for layer in self.expert_ids:
            onehot = np.zeros((self.num_tokens, self.num_experts + 1), dtype=np.float32)
            np.put_along_axis(onehot, layer.astype(np.int64), 1.0, axis=1)  # -1 lands in the spare last column
            yield onehot[:, :-1]

    def save(self, path: str | Path) -> None:
        """Write as safetensors."""
        arrays = {"expert_ids": self.expert_ids, "layer_ids": self.layer_ids, "request_lengths": self.request_lengths}
        if self.expert_weights is not None:
            arrays["expert_weights"] = self.expert_weights
        write_arrays(path, "trace", arrays, {"num_experts": self.num_experts})

    @classmethod
    def load(cls, path: str | Path) -> RoutingTrace:
        """Read what ``save`` wrote; ValueError for a foreign or truncated file."""
        arrays, info = read_arrays(path, "trace")
        try:
            return cls(num_experts=info["num_experts"], **arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no valid trace ({error}); record it again") from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutingTrace):
            return NotImplemented
        pairs = [(getattr(self, name), getattr(other, name)) for name in ("expert_ids", "expert_weights", "layer_ids", "request_lengths")]
        return self.num_experts == other.num_experts and all(
            a is b or (a is not None and b is not None and np.array_equal(a, b)) for a, b in pairs
        )

    __hash__ = None  # type: ignore[assignment]  # compared by value, too large to hash

    def __repr__(self) -> str:
        weights = "None" if self.expert_weights is None else "..."
        return (
            f"RoutingTrace(expert_ids=<{self.num_layers}x{self.num_tokens}x{self.top_k}>, num_experts={self.num_experts}, "
            f"expert_weights={weights}, requests={self.num_requests})"
        )


def _check_ids(ids: np.ndarray, num_experts: int) -> None:
    outside = (ids < -1) | (ids >= num_experts)
    if outside.any():
        layer, token, slot = (int(i) for i in np.argwhere(outside)[0])
        raise ValueError(
            f"expert_ids[{layer}, {token}, {slot}] is {ids[layer, token, slot]}; ids must be -1 (pruned) or 0 to {num_experts - 1}: "
            "check num_experts or the trace's source"
        )
    ordered = np.sort(ids, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)
    if twice.any():
        layer, token, slot = (int(i) for i in np.argwhere(twice)[0])
        raise ValueError(
            f"expert {ordered[layer, token, slot]} stands twice in expert_ids[{layer}, {token}]; a token selects an expert at most once"
        )
