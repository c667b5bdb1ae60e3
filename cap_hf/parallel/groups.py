"""The processes that share a model's experts, through DeepSpeed's communication layer.

Letters: ``R`` ranks. One process without a launcher is a group of one and needs neither DeepSpeed nor a network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["ExpertGroup", "RankError", "init_expert_group", "require_world_size"]

_MESSAGE_BYTES = 2048  # of one rank's error text, as it is told to the others


class RankError(RuntimeError):
    """Another rank of the group failed; the message names it and repeats its error."""


@dataclass
class Traffic:
    """What one rank sent to others by dispatch, by combine and by moving experts, counted at the collective.

    Bookkeeping is left out: gathered traces and error texts, and one flag per forward of ``CAPMoEModel.joined``.
    """

    collectives: int = 0
    bytes_sent: int = 0
    rows_sent: int = 0
    """Hidden-state rows sent to another rank by dispatch; combine returns as many."""
    token_visits: int = 0
    """Tokens that entered an MoE layer, summed over layers."""

    def reset(self) -> None:
        """Start counting anew."""
        self.collectives = self.bytes_sent = self.rows_sent = self.token_visits = 0


@dataclass(frozen=True)
class ExpertGroup:
    """``size`` ranks, this one being ``rank``; ``handle`` is the process group, None for all ranks of the job."""

    rank: int = 0
    size: int = 1
    handle: Any = None
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    def all_to_all(self, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """Exchange slices along dim 0: ``sent[r]`` entries to rank r, ``received[r]`` from it; returns them in rank order.

        The own slice should be empty: it is copied, not sent, and does not count as traffic.
        """
        from deepspeed import comm

        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        comm.all_to_all_single(output, tensor.contiguous(), list(received), list(sent), group=self.handle)
        row_bytes = tensor.element_size() * (tensor[:1].numel() if len(tensor) else 0)
        self.traffic.collectives += 1
        self.traffic.bytes_sent += row_bytes * (sum(sent) - sent[self.rank])
        return output

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tensors of equal shape from every rank, stacked in rank order: (...) -> (R, ...)."""
        if self.size == 1:
            return tensor[None]
        from deepspeed import comm

        # as bytes, since gloo does not carry every integer type, and on the device that the backend can read
        as_bytes = tensor.contiguous().reshape(-1).view(torch.uint8).to(_communication_device())
        parts = [torch.empty_like(as_bytes) for _ in range(self.size)]
        comm.all_gather(parts, as_bytes, group=self.handle)
        return torch.stack([part.view(tensor.dtype).view(tensor.shape) for part in parts]).to(tensor.device)

    def gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tensors that differ in length along dim 0, from every rank, joined in rank order."""
        if self.size == 1:
            return tensor
        lengths = self.all_gather(torch.tensor([len(tensor)], device=tensor.device)).flatten().tolist()
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = self.all_gather(padded)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def count(self, flag: bool) -> int:
        """On how many ranks ``flag`` is set."""
        if self.size == 1:
            return int(flag)
        from deepspeed import comm

        votes = torch.tensor([float(flag)], device=_communication_device())
        comm.all_reduce(votes, group=self.handle)
        return int(votes.item())

    def require_equal(self, value: str, what: str) -> None:
        """ValueError on every rank, naming the values, unless all ranks give the same ``value`` (up to 64 ASCII characters)."""
        text = torch.tensor(list(value.encode().ljust(64)), dtype=torch.uint8)
        values = [bytes(row.tolist()).decode().strip() for row in self.all_gather(text)]
        if len(set(values)) > 1:
            named = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(values[:8]))
            raise ValueError(f"{what} differs between ranks ({named}); give every rank the same")

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns on rank 0 (JSON-ready), on every rank; it runs there alone.

        Raises:
            RankError: on the others, where it fails on rank 0.
        """
        text = b""
        with self.all_or_none():
            if self.rank == 0:
                text = json.dumps(make()).encode()
        received = self.gather_rows(torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8))
        return json.loads(received.numpy().tobytes())

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A stage that every rank leaves alike: if it fails on one rank, the others raise ``RankError`` instead of waiting.

        The stage itself must not communicate, or must communicate equally on every rank until the failure.
        """
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:  # an exit or an interrupt leaves the others waiting just as well
            failure = error
        if self.size > 1:
            self._tell_failure(failure)
        if failure is not None:
            raise failure

    def _tell_failure(self, failure: BaseException | None) -> None:
        """Exchange error texts; raise for a peer's failure unless this rank has its own to raise."""
        text = b"" if failure is None else f"{type(failure).__name__}: {failure}".encode(errors="replace")[:_MESSAGE_BYTES]
        message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        message[: len(text)] = torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)[: len(text)]
        peers = self.all_gather(message)
        for rank, peer in enumerate(peers):
            words = bytes(peer.tolist()).rstrip(b"\0").decode(errors="replace")
            if words and failure is None:
                raise RankError(f"rank {rank} of {self.size} failed, this rank ({self.rank}) stops with it. {words}")


def _communication_device() -> torch.device:
    """Where a tensor must be for the job's backend: NCCL reads the process's GPU, gloo the host."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def init_expert_group() -> ExpertGroup:
    """The group of all launched processes, its communication started on the first call.

    Reads the launcher's ``WORLD_SIZE`` and ``RANK``. gloo on CPUs, NCCL on CUDA devices.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ExpertGroup()
    import deepspeed
    from deepspeed import comm

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not comm.is_initialized():
        # DeepSpeed would compile its shared-memory all-reduce first (a minute, and a C++ compiler), which nothing here calls
        # and which keeps 69 MB per rank in /dev/shm.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", auto_mpi_discovery=False, verbose=False)
    return ExpertGroup(rank=comm.get_rank(), size=comm.get_world_size())


def require_world_size(wanted: int | Callable[[int], bool], command: str) -> int:
    """World size of this launch; where it is not as wanted, exit with the right command in the message.

    Args:
        wanted: the exact number, or a test of it (at least 2, say).
        command: what to type instead.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if not (wanted(size) if callable(wanted) else size == wanted):
        number = "another number" if callable(wanted) else str(wanted)
        raise SystemExit(f"this recipe runs on {number} of processes, not {size}; launch it with:\n  {command}")
    return size
