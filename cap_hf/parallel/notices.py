"""What ranks tell each other when a collective does not end: notices in the job's rendezvous store, beside the collectives.

A rank that fails or waits too long posts a notice; the others look for notices while they wait. Whoever posts none is
killed or stuck. Notices carry the step (a forward, or the time between two) they belong to, so that old ones mean nothing.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["POLL_S", "Notice", "NoticeBoard", "wait_for"]

STORE_LIMIT_S = 5.0  # a store that answers no sooner is gone
POLL_S = 0.5  # a rank that waits looks for notices as often
ANSWER_LIMIT_S = 4 * POLL_S  # for the other ranks to post, once one has
_MAX_CHARACTERS = 2000


@dataclass(frozen=True)
class Notice:
    """One rank's words; ``is_cause`` if that rank failed itself, else it only tells that it is alive and waits."""

    rank: int
    text: str
    is_cause: bool


class NoticeBoard:
    """Notices of ``size`` ranks, this one being ``rank``; ``name`` keeps the groups of one job apart."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import _get_default_store  # no public way leads to it

        store: Any = _get_default_store()
        store = store.clone()  # a connection and a time limit of its own
        store.set_timeout(timedelta(seconds=STORE_LIMIT_S))
        self.rank, self.size = rank, size
        self._store: Any = PrefixStore(f"cap_hf/{name}", store)
        self._store.set(f"process/{rank}", f"{_host()} {os.getpid()}")

    def post(self, step: int, text: str, is_cause: bool) -> None:
        """Tell the others; a store that is gone is no error, for then its host is."""
        try:
            self._store.set(f"{step}/{self.rank}", f"{int(is_cause)}{text[:_MAX_CHARACTERS]}")
            self._store.set(f"{step}/posted", "1")
        except RuntimeError:
            pass

    def has_notice(self, step: int) -> bool:
        """Whether anybody posted in this step; False where the store is gone."""
        try:
            return bool(self._store.check([f"{step}/posted"]))
        except RuntimeError:
            return False

    def read(self, step: int) -> list[Notice] | None:
        """Notices of the step, by rank; None where the store is gone."""
        notices = []
        try:
            for rank in range(self.size):
                if self._store.check([f"{step}/{rank}"]):
                    content = self._store.get(f"{step}/{rank}").decode(errors="replace")
                    notices.append(Notice(rank, content[1:], content[0] == "1"))
        except RuntimeError:
            return None
        return notices

    def has_ended(self, rank: int) -> bool:
        """Whether that rank's process is known to have ended; only processes of this host can be looked at."""
        try:
            if not self._store.check([f"process/{rank}"]):
                return False
            host, _, pid = self._store.get(f"process/{rank}").decode().rpartition(" ")
        except RuntimeError:
            return False
        return host == _host() and not _runs(int(pid))

    def settle(self, step: int) -> list[Notice] | None:
        """Wait until a cause is known or nobody is left who could post, at most ``ANSWER_LIMIT_S``; then as ``read``."""
        limit = time.monotonic() + ANSWER_LIMIT_S
        while True:
            notices = self.read(step)
            if notices is None or any(notice.is_cause for notice in notices) or time.monotonic() > limit:
                return notices
            silent = set(range(self.size)) - {notice.rank for notice in notices}
            if all(self.has_ended(rank) for rank in silent):
                return notices
            time.sleep(0.05)


def wait_for(work: Any, limit_s: float) -> bool:
    """Wait for an asynchronous collective: True once it has ended, False after ``limit_s``, its own error if it has failed."""
    has_ended = work.is_completed()
    try:
        work.wait(timedelta(seconds=limit_s))
    except RuntimeError:
        if has_ended:
            raise
        return False  # the limit, or a failure that the next call raises
    return True


def _host() -> str:
    """Name of this host, and of its process numbers where a container has its own."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(namespace) if namespace.exists() else ''}"


def _runs(pid: int) -> bool:
    """False for a process that has ended, also where its parent has not noticed yet; True where that cannot be seen."""
    if not Path("/proc/self/stat").exists():
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
