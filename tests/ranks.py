"""Real processes that talk gloo over loopback, for tests: a function on R ranks, one result each.

Letters: ``R`` ranks. ``RankPool`` keeps its ranks between calls; ``run_ranks`` starts new ones for a single call. Both run
a top-level function of an importable module, and both kill every rank at the time limit.

Ranks are forked from a server process that has imported torch, transformers and DeepSpeed once, so that starting them costs
tenths of a second, not the ten seconds of those imports.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context, set_start_method
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["RankPool", "RanksFailed", "free_port", "run_ranks", "warm_up"]

START_LIMIT_S = 180.0  # imports of the server included; ten times what a busy two-core machine takes
GRACE_S = 2.0  # for the other ranks, once one has failed: those that wait for it never end
LOG_LINES = 60  # of a failed rank's output in the message
_PRELOADED = ["torch", "deepspeed", "transformers.modeling_utils", "transformers.models.qwen3_moe.modeling_qwen3_moe"]
_SERVER_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # these ranks are CPU processes on any machine
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",  # more threads than cores collapse
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(_PRELOADED)


class RanksFailed(AssertionError):
    """One rank or more raised, died or ran out of time; the message has a section per such rank."""


@dataclass(frozen=True)
class _Rank:
    process: Any
    pipe: connection.Connection
    log: Path
    """What the rank prints, and where it stands when it gets SIGUSR1."""


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: str | None = None


class RankPool:
    """R processes in one initialised DeepSpeed gloo group; each call runs on all of them, in lock-step.

    Process-wide state (environment, caches, further groups) stays from call to call; use ``run_ranks`` where that matters.

    Args:
        num_ranks: R.
        timeout_s: limit of a call that names none.
    """

    def __init__(self, num_ranks: int, timeout_s: float = 60.0) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; it must be 1 or more")
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self._ranks: list[_Rank] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """``function(*args)`` on every rank; the results in rank order.

        Args:
            function: top-level function of an importable module; it finds its rank in ``RANK`` or in ``deepspeed.comm``.
            args: anything that pickles; the same for every rank.
            timeout_s: limit for all ranks together.

        Raises:
            RanksFailed: a rank raised, died or ran out of time. The next call gets new processes.
        """
        request = pickle.dumps((function, args))
        if not all(rank.process.is_alive() for rank in self._ranks):
            self.close()
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            os.truncate(rank.log, 0)
            rank.pipe.send_bytes(request)
        return self._results(function.__qualname__, self.timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """End the processes; a later call starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
            rank.pipe.close()
            rank.log.unlink(missing_ok=True)
        self._ranks = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        warm_up()
        port = free_port()
        for index in range(self.num_ranks):
            ours, theirs = connection.Pipe()
            descriptor, log = tempfile.mkstemp(prefix="rank_", suffix=".log")
            os.close(descriptor)
            environment = _launcher_environment(index, self.num_ranks, port)
            process = _CONTEXT.Process(target=_serve, args=(theirs, environment, log, self.timeout_s), daemon=True)
            process.start()
            theirs.close()  # the rank holds the only other end, so its death reads as end of file here
            self._ranks.append(_Rank(process, ours, Path(log)))
        self._results("start", START_LIMIT_S)

    def _results(self, name: str, limit_s: float) -> list[Any]:
        outcomes = self._collect(limit_s)
        errors = {rank: outcome.error for rank, outcome in outcomes.items() if outcome.error is not None}
        if errors:
            sections = [
                f"--- rank {rank} of {self.num_ranks} ---\n{error.rstrip()}\n{self._output(rank)}" for rank, error in sorted(errors.items())
            ]
            self.close()
            raise RanksFailed("\n".join([f"{name} failed on {len(errors)} of {self.num_ranks} ranks", *sections]))
        return [outcomes[rank].value for rank in range(self.num_ranks)]

    def _collect(self, limit_s: float) -> dict[int, _Outcome]:
        """One outcome per rank; waits no longer than the limit, and hardly longer once a rank has failed."""
        waiting: dict[Any, int] = {rank.pipe: index for index, rank in enumerate(self._ranks)}
        outcomes: dict[int, _Outcome] = {}
        started = time.monotonic()
        deadline, reason = started + limit_s, f"no result within {limit_s:g} s"
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                index = waiting.pop(pipe)
                outcomes[index] = self._receive(index)
                if outcomes[index].error is not None:
                    deadline, reason = min(deadline, time.monotonic() + GRACE_S), "no result after another rank failed"
        for index in waiting.values():
            self._ask_where(index)
            outcomes[index] = _Outcome(error=f"{reason}; killed, see below where")
        return outcomes

    def _receive(self, index: int) -> _Outcome:
        rank = self._ranks[index]
        try:
            return pickle.loads(rank.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            rank.process.join(GRACE_S)
            return _Outcome(error=f"the process died with exit code {rank.process.exitcode} and left no traceback")

    def _ask_where(self, index: int) -> None:
        """Have a rank that hangs write its stack to its log; it can even from inside a blocking collective."""
        rank = self._ranks[index]
        size = rank.log.stat().st_size
        os.kill(rank.process.pid, signal.SIGUSR1)
        patience = time.monotonic() + 1.0
        while time.monotonic() < patience and rank.log.stat().st_size == size:
            time.sleep(0.02)

    def _output(self, index: int) -> str:
        lines = self._ranks[index].log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join(["its output ends with", *lines]) if lines else "it printed nothing"


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """``function(*args)`` on ``num_ranks`` new processes, ended afterwards; see ``RankPool.run``."""
    with RankPool(num_ranks, timeout_s) as pool:
        return pool.run(function, *args)


def warm_up() -> None:
    """Start the server that ranks are forked from, without waiting for its imports."""
    with mock.patch.dict(os.environ, _SERVER_ENVIRONMENT):
        forkserver.ensure_running()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _launcher_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets on one host, and DeepSpeed's ``LOCAL_SIZE``, which it does not."""
    facts = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), num_ranks)
    return {name: str(value) for name, value in (facts | sizes).items()}


def _serve(pipe: connection.Connection, environment: dict[str, str], log: str, timeout_s: float) -> None:
    """A rank's life: join the group, then run what comes down the pipe until it closes."""
    os.environ.update(environment)
    _print_to(log)
    set_start_method("fork", force=True)  # as in a launched process; else locks made here outlive a killed rank
    warnings.filterwarnings("error", module=r"cap_hf(\.|$)")  # as under pytest, for the code that is tested
    _answer(pipe, _join_group, timeout_s)
    while (request := _next_request(pipe)) is not None:
        _answer(pipe, _call, request)
    os._exit(0)  # the interpreter's own clean-up would wait for peers that are gone


def _print_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGUSR1, all_threads=False)


def _join_group(timeout_s: float) -> None:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    # Nothing here uses the shared-memory all-reduce: skip its compiler run and the 69 MB per rank that it leaves in /dev/shm.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, timeout=timedelta(seconds=timeout_s + START_LIMIT_S))


def _next_request(pipe: connection.Connection) -> bytes | None:
    try:
        return pipe.recv_bytes()
    except (EOFError, ConnectionError):  # the tests ended
        return None


def _call(request: bytes) -> Any:
    function, args = pickle.loads(request)
    return function(*args)


def _answer(pipe: connection.Connection, function: Callable[..., Any], *args: Any) -> None:
    try:
        answer = pickle.dumps(_Outcome(value=function(*args)))  # plain pickle copies tensors; nothing is shared with a dead rank
    except BaseException:  # a test's outcome exceptions too: whatever it is, the parent must hear of it
        answer = pickle.dumps(_Outcome(error=traceback.format_exc()))
    pipe.send_bytes(answer)
