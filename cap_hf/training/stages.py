"""Stages that are done once: a stage's result is read back where it is there already and rests on the same inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cap_hf._files import read_json, write_json
from cap_hf.parallel.groups import ExpertGroup

__all__ = ["input_hash", "once"]

Value = TypeVar("Value")


def input_hash(inputs: Mapping[str, Any]) -> str:
    """Hash of JSON-ready inputs, 16 hex digits."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def once(
    group: ExpertGroup,
    folder: Path,
    name: str,
    inputs: Mapping[str, Any],
    make: Callable[[], Value],
    save: Callable[[Value], None],
    load: Callable[[], Value],
) -> tuple[Value, bool]:
    """A stage's result, and whether it was made now; every rank calls it alike.

    Args:
        folder: where ``<name>.stage.json`` says what the saved result rests on.
        inputs: all that the result depends on, JSON-ready and equal on all ranks.
        make: runs on every rank.
        save: runs on rank 0.
        load: runs on every rank, on files that rank 0 can read too; a ValueError means that the result is not there.
    """
    marker, key = folder / f"{name}.stage.json", input_hash(inputs)
    if group.from_first(partial(_is_there, marker, key, load)):
        return load(), False
    value = make()

    def keep() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        marker.unlink(missing_ok=True)  # an interruption between result and marker must not leave an old marker behind
        save(value)
        write_json(marker, "stage", {"key": key, "inputs": dict(inputs)})

    group.from_first(keep)
    return value, True


def _is_there(marker: Path, key: str, load: Callable[[], Any]) -> bool:
    try:
        if read_json(marker, "stage").get("key") != key:
            return False
        load()
    except ValueError:
        return False
    return True
