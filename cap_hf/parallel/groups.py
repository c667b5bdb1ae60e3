"""The processes that share a model's experts, through DeepSpeed's communication layer.

Letters: ``R`` ranks. One process without a launcher is a group of one and needs neither DeepSpeed nor a network.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch

from cap_hf.parallel.notices import POLL_S, NoticeBoard, wait_for

__all__ = ["ExpertGroup", "RankError", "init_expert_group", "limited_group", "require_world_size"]

LONG_S = 1800.0  # for stages around files and searches, where one rank may rightly work much longer than another
_MESSAGE_BYTES = 2048  # of one rank's error text, as it is told to the others


class RankError(RuntimeError):
    """Another rank of the group failed, was killed or is stuck; the message names it, and the place where this rank waited."""


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


@dataclass
class Progress:
    """Where a rank stands, for its own error messages and to tell new notices from old ones."""

    step: int = 0
    """Counts the beginnings and ends of forwards; equal on all ranks that are in step."""
    where: str = "a collective between forwards"
    broken: str = ""
    """Why the ranks are out of step for good; empty while they are not."""


@dataclass(frozen=True)
class Pending:
    """A collective under way; ``wait`` gives its output."""

    group: ExpertGroup
    work: Any
    output: torch.Tensor
    sent: torch.Tensor
    """Kept alive until the collective has ended."""

    def wait(self) -> torch.Tensor:
        """The output, once it is complete."""
        if (interrupt := self.group._finish(self.work)) is not None:
            raise interrupt
        return self.output


@dataclass(frozen=True)
class ExpertGroup:
    """``size`` ranks, this one being ``rank``; ``handle`` is the process group, None for all ranks of the job.

    A collective that has not ended after ``timeout_s`` seconds, or that another rank's failure makes impossible, raises
    ``RankError``; the group cannot be used any more then. Tensors on a GPU are exchanged in stream order instead, under the
    time limit of the process group itself.
    """

    rank: int = 0
    size: int = 1
    handle: Any = None
    timeout_s: float = LONG_S
    board: NoticeBoard | None = None
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    progress: Progress = field(default_factory=Progress, compare=False)

    def all_to_all(self, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """Exchange slices along dim 0: ``sent[r]`` entries to rank r, ``received[r]`` from it; returns them in rank order.

        The own slice should be empty: it is copied, not sent, and does not count as traffic.
        """
        return self.start_all_to_all(tensor, received, sent).wait()

    def start_all_to_all(self, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> Pending:
        """As ``all_to_all``, without waiting for the end. On gloo, ``received`` may be upper bounds: see ``takes_bounds``."""
        from deepspeed import comm

        self._refuse_if_broken()
        output, tensor = tensor.new_empty((sum(received), *tensor.shape[1:])), tensor.contiguous()
        try:
            work = comm.all_to_all_single(output, tensor, list(received), list(sent), group=self.handle, async_op=True)
        except RuntimeError as error:
            self._give_up(error)
        row_bytes = tensor.element_size() * (tensor[:1].numel() if len(tensor) else 0)
        self.traffic.collectives += 1
        self.traffic.bytes_sent += row_bytes * (sum(sent) - sent[self.rank])
        return Pending(self, work, output, tensor)

    def takes_bounds(self, tensor: torch.Tensor) -> bool:
        """Whether a receiver may leave more room than is sent: gloo fills the start of the slice, NCCL must know the size."""
        return tensor.device.type == "cpu"

    def _finish(self, work: Any) -> KeyboardInterrupt | None:
        """Wait for a collective under this group's time limit, with an eye on the others' notices.

        Returns an interrupt that came meanwhile, for the others count on this rank until the collective has ended; a second
        one is raised at once.
        """
        limit, interrupt = time.monotonic() + self.timeout_s, None
        while True:
            try:
                if wait_for(work, min(POLL_S, self.timeout_s)):
                    break
                if time.monotonic() > limit or self.board is not None and self.board.has_notice(self.progress.step):
                    self._give_up(None)
            except RankError:
                raise
            except RuntimeError as error:
                self._give_up(error)
            except KeyboardInterrupt as error:
                if interrupt is not None:
                    raise
                interrupt = error
        return interrupt

    def _give_up(self, error: RuntimeError | None) -> NoReturn:
        """Find out whose fault it is that a collective failed (``error``) or does not end, and raise ``RankError``."""
        assert self.board is not None, "a group of several ranks has a board"
        me, size, step = self.board.rank, self.board.size, self.progress.step
        self.board.post(step, f"waits in {self.progress.where}", is_cause=False)
        notices = self.board.settle(step)
        causes = [notice for notice in notices or [] if notice.is_cause and notice.rank != me]
        silent = sorted(set(range(size)) - {notice.rank for notice in notices or []} - {me})
        ended = [rank for rank in silent if self.board.has_ended(rank)]
        how = f"gave no sign of life for {self.timeout_s:g} s" if error is None else "closed its connection"
        if causes:
            reason = "; ".join(f"rank {notice.rank} of {size} failed with {notice.text}" for notice in causes)
        elif notices is None:
            reason = f"rank 0 of {size} {how} and no longer keeps the ranks' notices: it was killed or is stuck"
        elif ended:
            reason = f"the process of rank {', '.join(map(str, ended))} of {size} has ended: it was killed, or left the others behind"
        elif silent:
            reason = f"rank {', '.join(map(str, silent))} of {size} {how}: it was killed, is stuck, or runs other forwards"
        else:
            places = "; ".join(f"rank {notice.rank} {notice.text}" for notice in notices)
            reason = f"all {size} ranks wait, but for different things ({places})" if error is None else f"the network failed ({error})"
        if error is None and not causes and not ended:
            reason += "; if it only needs longer, raise timeout_s of CAPConfig"
        self.progress.broken = reason
        raise RankError(f"this rank ({me}) waited in {self.progress.where}, but {reason}") from error

    def _refuse_if_broken(self) -> None:
        if self.progress.broken:
            raise RankError(f"the ranks are out of step since an earlier failure and must be started anew: {self.progress.broken}")

    def post_failure(self, failure: BaseException | None) -> None:
        """Tell ranks that wait, or will wait, for this one in the current step that it has failed; not if another one has."""
        if self.board is not None and failure is not None and not isinstance(failure, RankError):
            self.board.post(self.progress.step, f"{type(failure).__name__} in {self.progress.where}: {failure}", is_cause=True)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tensors of equal shape from every rank, stacked in rank order: (...) -> (R, ...)."""
        gathered, interrupt = self.all_gather_unless_interrupted(tensor)
        if interrupt is not None:
            raise interrupt
        return gathered

    def all_gather_unless_interrupted(self, tensor: torch.Tensor) -> tuple[torch.Tensor, KeyboardInterrupt | None]:
        """As ``all_gather``, and an interrupt that came meanwhile, for the caller to raise when it has noted the result."""
        if self.size == 1:
            return tensor[None], None
        from deepspeed import comm

        self._refuse_if_broken()
        # as bytes, since gloo does not carry every integer type, and on the device that the backend can read
        as_bytes = tensor.contiguous().reshape(-1).view(torch.uint8).to(_communication_device())
        parts = [torch.empty_like(as_bytes) for _ in range(self.size)]
        try:
            work = comm.all_gather(parts, as_bytes, group=self.handle, async_op=True)
        except RuntimeError as error:
            self._give_up(error)
        interrupt = self._finish(work)
        return torch.stack([part.view(tensor.dtype).view(tensor.shape) for part in parts]).to(tensor.device), interrupt

    def gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tensors that differ in length along dim 0, from every rank, joined in rank order."""
        if self.size == 1:
            return tensor
        lengths = self.all_gather(torch.tensor([len(tensor)], device=tensor.device)).flatten().tolist()
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = self.all_gather(padded)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

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

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON-ready value, by rank, on every rank."""
        text = json.dumps(value).encode()
        lengths = self.all_gather(torch.tensor(len(text))).tolist()
        received = self.gather_rows(torch.frombuffer(bytearray(text), dtype=torch.uint8)).cpu().numpy().tobytes()
        ends = list(itertools.accumulate(lengths))
        return [json.loads(received[end - length : end]) for end, length in zip(ends, lengths, strict=True)]

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

    Reads the launcher's ``WORLD_SIZE`` and ``RANK``. gloo on CPUs, NCCL on CUDA devices. Its time limit is long: it serves
    stages around files and searches; ``limited_group`` is for what happens within a forward.
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
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timedelta(seconds=LONG_S))
        atexit.register(_leave)
    rank, size = comm.get_rank(), comm.get_world_size()
    return ExpertGroup(rank, size, board=_board(rank, size, "stages"))


def limited_group(group: ExpertGroup, timeout_s: float) -> ExpertGroup:
    """The same ranks and traffic under a time limit, for the collectives of forwards; every rank calls it alike."""
    if group.size == 1:
        return group
    handle, progress = _limited_handle(timeout_s, torch.distributed.group.WORLD)
    board = _board(group.rank, group.size, f"forwards within {timeout_s:g} s")
    return ExpertGroup(group.rank, group.size, handle, timeout_s, board, group.traffic, progress)


@cache
def _board(rank: int, size: int, name: str) -> NoticeBoard:
    return NoticeBoard(rank, size, name)


@cache
def _limited_handle(timeout_s: float, _: Any) -> tuple[Any, Progress]:
    """One process group per time limit, whatever number of models use it, and how far its forwards have come.

    The backend's own limit comes a little later, so that it never speaks first; it is what lets a process end whose
    collective nobody answers.
    """
    progress = Progress()
    _progresses.append(progress)
    return torch.distributed.new_group(timeout=timedelta(seconds=timeout_s + 10)), progress


def node_group(group: ExpertGroup, ranks_per_node: int) -> ExpertGroup:
    """The ranks of ``group`` that share this rank's node, under the same time limit; every rank of the job calls it alike."""
    handle = _node_handle(ranks_per_node, group.timeout_s, torch.distributed.group.WORLD)
    return replace(group, rank=group.rank % ranks_per_node, size=ranks_per_node, handle=handle)


@cache
def _node_handle(ranks_per_node: int, timeout_s: float, _: Any) -> Any:
    limit = timedelta(seconds=timeout_s + 10)
    return torch.distributed.new_subgroups(ranks_per_node, timeout=limit)[0]


_progresses: list[Progress] = []


def _leave() -> None:
    """At the end of the process: without it, gloo's threads may be torn down while they run. Not where it would wait for lost ranks."""
    if torch.distributed.is_initialized() and not any(progress.broken for progress in _progresses):
        torch.distributed.destroy_process_group()


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
