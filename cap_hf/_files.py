"""Versioned JSON and safetensors files: atomic writes, and one clear error for a truncated or foreign file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["format_of", "read_arrays", "read_json", "read_only", "write_arrays", "write_json"]

VERSION = 1  # of every file format below; a reader refuses a newer one


def read_only(array: np.ndarray) -> np.ndarray:
    """The same array, locked against writing."""
    array.setflags(write=False)
    return array


def _check_header(path: Path, header: Mapping[str, Any], kind: str) -> None:
    found, wanted = header.get("format"), f"cap_hf.{kind}"
    if found != wanted:
        raise ValueError(f"{path} holds format {found!r}, not {wanted!r}; give a file that cap_hf saved as a {kind}")
    version = header.get("version")
    if str(version) not in map(str, range(1, VERSION + 1)):
        raise ValueError(
            f"{path} has {kind} format version {version}; this cap_hf reads 1 to {VERSION}; upgrade cap_hf or save the file again"
        )


def _refuse_other_kind(path: Path, kind: str) -> None:
    found = format_of(path)
    if found is not None:
        raise ValueError(f"{path} holds a {found}, not a {kind}; give a {kind} file")


def _replace(path: Path, write: Any) -> None:
    """Write beside ``path`` and rename, so that an interrupted write never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: str | Path, kind: str, payload: Mapping[str, Any]) -> None:
    """Save ``payload`` as ``{"format": "cap_hf.<kind>", "version": 1, ...}``."""
    text = json.dumps({"format": f"cap_hf.{kind}", "version": VERSION, **payload}, indent=1) + "\n"
    _replace(Path(path), lambda partial: partial.write_text(text, encoding="utf-8"))


def read_json(path: str | Path, kind: str) -> dict[str, Any]:
    """Load what ``write_json`` saved, without the header.

    Raises:
        ValueError: no such file, not JSON, another format, or a newer version.
    """
    path = Path(path)
    try:
        payload = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{kind} file {path} cannot be read ({error.strerror}); give the path of an existing file") from error
    except ValueError as error:  # JSON and UTF-8 errors both
        _refuse_other_kind(path, kind)
        raise ValueError(f"{path} is truncated or not JSON ({error}); save the {kind} again") from error
    if not isinstance(payload, dict):
        raise ValueError(f"{path} holds a JSON {type(payload).__name__}, not an object; save the {kind} again")
    _check_header(path, payload, kind)
    return {key: value for key, value in payload.items() if key not in ("format", "version")}


def write_arrays(path: str | Path, kind: str, arrays: Mapping[str, np.ndarray], info: Mapping[str, Any]) -> None:
    """Save named arrays as safetensors; ``info`` travels as JSON in the file's metadata."""
    from safetensors.numpy import save_file

    metadata = {"format": f"cap_hf.{kind}", "version": str(VERSION), "info": json.dumps(dict(info))}
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    _replace(Path(path), lambda partial: save_file(contiguous, partial, metadata=metadata))


def read_arrays(path: str | Path, kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Load what ``write_arrays`` saved: (arrays, info).

    Raises:
        ValueError: no such file, truncated, another format, or a newer version.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        with safe_open(path, framework="np") as handle:
            metadata = handle.metadata() or {}
            _check_header(path, metadata, kind)
            names = list(handle.keys())
            return {name: handle.get_tensor(name) for name in names}, json.loads(metadata.get("info", "{}"))
    except OSError as error:
        raise ValueError(f"{kind} file {path} cannot be read ({error}); give the path of an existing file") from error
    except SafetensorError as error:
        _refuse_other_kind(path, kind)
        raise ValueError(f"{path} is truncated or not a safetensors file ({error}); save the {kind} again") from error


def format_of(path: str | Path) -> str | None:
    """Kind of content ("trace", "layout", ...) a file says it holds; None for a file of another program.

    Raises:
        ValueError: no such file.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not an existing file; give the path of one")
    try:
        with safe_open(path, framework="np") as handle:
            header = handle.metadata() or {}
    except SafetensorError:
        try:
            header = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return None
    name = header.get("format") if isinstance(header, dict) else None
    return name.removeprefix("cap_hf.") if isinstance(name, str) and name.startswith("cap_hf.") else None
