"""What ranks tell each other when a collective does not end: notices in the job's rendezvous store, beside the collectives.

A rank that fails or waits too long posts a notice; the others look for notices while they wait. Whoever posts none is
killed or stuck. Notices carry the step (a forward, or the time between two) they belong to, so that old ones mean nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

__all__ = ["POLL_S", "Notice", "NoticeBoard", "wait_for"]

STORE_LIMIT_S = 5.0  # a store that answers no sooner is gone
ANSWER_LIMIT_S = 4.0  # for the other ranks to post, once one has; each looks every POLL_S seconds
POLL_S = 1.0
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

    def settle(self, step: int) -> list[Notice] | None:
        """Wait until a cause is known or every rank has posted, at most ``ANSWER_LIMIT_S``; then as ``read``."""
        limit = time.monotonic() + ANSWER_LIMIT_S
        while True:
            notices = self.read(step)
            if notices is None or any(notice.is_cause for notice in notices) or len(notices) == self.size or time.monotonic() > limit:
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
