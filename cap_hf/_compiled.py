"""How the inner loops of placement and of pruning on CPUs are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

__all__ = ["compiled"]


def compiled(function: Callable[..., Any]) -> Any:
    """Machine code that runs without the interpreter's lock, kept on disk for the next process where a folder can be written."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache nor NUMBA_CACHE_DIR can be written
        return njit(nogil=True)(function)
