"""Measures on this machine: speed of a live model under candidate layouts, perplexity, traffic and peak memory.

Letters: ``R`` ranks, ``B`` batch rows, ``S`` positions. Every rank of the model's group calls these functions alike.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from cap_hf.layout import ExpertLayout
from cap_hf.metrics import remote_rows_per_token
from cap_hf.trace import RoutingTrace

if TYPE_CHECKING:
    from cap_hf.modeling import CAPMoEModel

__all__ = [
    "HeldOutResult",
    "LayoutTiming",
    "PeakMemory",
    "anonymous_bytes",
    "evaluate_held_out",
    "own_share",
    "profile_layouts",
    "time_forward",
]


@dataclass(frozen=True)
class LayoutTiming:
    """One candidate's measured speed: ``forward_s`` is the median over repeats of the slowest rank's seconds per pass."""

    layout: ExpertLayout
    forward_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class HeldOutResult:
    """One configuration on held-out text, over all ranks."""

    perplexity: float
    devices_per_token: float
    load_imbalance: float
    bytes_per_token: float | None
    """Bytes put on the wire by all ranks and layers, counted at the collective, per token of text; None for one process."""
    rows_per_token: float
    """Rows sent to other ranks per token and layer; as many come back. What ranks would send, where one process plays them."""
    tokens_per_s: float
    peak_memory_bytes: list[int]
    """Peak anonymous memory of each rank, (R,)."""
    trace: RoutingTrace


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process (Linux ``RssAnon``): without the pages of mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status holds no RssAnon; peak memory is measured on Linux only")


class PeakMemory:
    """Context manager; ``peak_bytes`` is the largest anonymous memory seen, sampled every ``interval_s``."""

    def __init__(self, interval_s: float = 0.02) -> None:
        self.interval_s, self.peak_bytes = interval_s, 0
        self._stop = threading.Event()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    def __enter__(self) -> PeakMemory:
        self.peak_bytes = anonymous_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, anonymous_bytes())


def own_share(blocks: np.ndarray, rank: int, size: int, batch_size: int) -> list[torch.Tensor]:
    """This rank's batches (B, S) of ``blocks`` (n, S), dealt in turns: some ranks may get one fewer, one a shorter last one."""
    return list(torch.from_numpy(blocks).split(batch_size)[rank::size]) if len(blocks) else []


def _tokens_of_all_ranks(model: CAPMoEModel, batches: Sequence[torch.Tensor], shortest: int) -> int:
    """Tokens in all ranks' batches; refuses, on every rank, sequences under ``shortest`` and a run without any batch."""
    with model.group.all_or_none():
        length = min((batch.shape[1] for batch in batches), default=shortest)
        if length < shortest:
            raise ValueError(f"a batch has sequences of {length} tokens; {shortest} or more are needed")
    tokens = int(model.group.all_gather(torch.tensor([sum(batch.numel() for batch in batches)])).sum())
    if tokens == 0:
        raise ValueError("no rank has a batch; give 1 or more to at least one of them")
    return tokens


def time_forward(model: CAPMoEModel, batches: Sequence[torch.Tensor], repeats: int = 3) -> float:
    """Seconds until every rank is through its ``batches``: median over ``repeats`` after one warm-up batch.

    Ranks may have different numbers of batches, none included.

    Raises:
        ValueError: on every rank, if no rank has a batch.
    """
    _tokens_of_all_ranks(model, batches, shortest=1)
    seconds = []

    def run(own: Sequence[torch.Tensor]) -> None:
        with model.joined(), torch.no_grad():
            for batch in own:
                model(input_ids=batch, use_cache=False, logits_to_keep=1)

    run(batches[:1])
    for _ in range(repeats):
        model.group.all_gather(torch.zeros(1))  # start together
        start = time.perf_counter()
        run(batches)
        seconds.append(time.perf_counter() - start)
    slowest = model.group.all_gather(torch.tensor(seconds, dtype=torch.float64)).amax(dim=0)
    return float(slowest.median())


def profile_layouts(
    model: CAPMoEModel, layouts: Iterable[ExpertLayout], batches: Sequence[torch.Tensor], repeats: int = 3, progress: bool = True
) -> list[LayoutTiming]:
    """Measure every candidate on this machine, in the order given; the model is left with the last one.

    Args:
        model: a live model; layouts are applied to it one after the other.
        layouts: candidates, a spectrum for one.
        batches: this rank's token ids, each (B, S); ranks may have different numbers of them, none included.
    """
    timings = []
    tokens = _tokens_of_all_ranks(model, batches, shortest=1)
    for layout in tqdm(list(layouts), desc="profiling layouts", unit="layout", disable=not progress or model.group.rank > 0):
        model.apply_layout(layout)
        seconds = time_forward(model, batches, repeats)
        timings.append(LayoutTiming(layout, seconds, tokens / seconds))
    return timings


def evaluate_held_out(model: CAPMoEModel, batches: Sequence[torch.Tensor], timed_batches: int = 4, progress: bool = True) -> HeldOutResult:
    """Perplexity, traffic, balance, speed and memory of the model as it is now, on this rank's ``batches``, each (B, S).

    Ranks may have different numbers of batches, none included.

    Raises:
        ValueError: on every rank, if no rank has a batch or a sequence has fewer than 2 tokens.
    """
    from cap_hf.recorder import RoutingRecorder

    group, traffic = model.group, model.traffic
    _tokens_of_all_ranks(model, batches, shortest=2)
    traffic.reset()
    loss_sum, num_predicted = 0.0, 0
    with PeakMemory() as memory, RoutingRecorder(model) as recorder, model.joined(), torch.no_grad():
        for batch in tqdm(batches, desc="held-out text", unit="batch", disable=not progress or group.rank > 0, leave=False):
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
            loss_sum += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
            num_predicted += batch[:, 1:].numel()
    tokens = sum(batch.numel() for batch in batches)
    counts = [loss_sum, num_predicted, tokens, traffic.bytes_sent, traffic.rows_sent, memory.peak_bytes]
    per_rank = group.all_gather(torch.tensor(counts, dtype=torch.float64))
    loss, predicted, all_tokens, bytes_sent, rows_sent, _ = per_rank.sum(dim=0).tolist()
    trace, num_ranks = recorder.trace(), model.layout.num_ranks
    metrics = model.layout.metrics(trace)
    if group.size == 1:
        owner = np.concatenate([np.arange(len(batch)) % num_ranks for batch in batches])[trace.token_to_request]
        rows_sent = remote_rows_per_token(trace.expert_ids, model.layout.expert_to_rank, num_ranks, owner).sum() * all_tokens
    timed = batches[:timed_batches]
    timed_tokens = _tokens_of_all_ranks(model, timed, shortest=1)
    seconds = time_forward(model, timed)
    return HeldOutResult(
        perplexity=math.exp(loss / predicted),
        devices_per_token=metrics.devices_per_token,
        load_imbalance=metrics.load_imbalance,
        bytes_per_token=bytes_sent / all_tokens if group.size > 1 else None,
        rows_per_token=float(rows_sent / all_tokens / model.layout.num_layers),
        tokens_per_s=timed_tokens / seconds,
        peak_memory_bytes=[int(value) for value in per_rank[:, -1].tolist()],
        trace=trace,
    )
