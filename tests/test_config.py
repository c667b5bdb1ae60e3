"""``CAPConfig``: ranges, contradictions and its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cap_hf
from cap_hf import CAPConfig, ExpertLayout, Topology


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pruning": "tokens"}, "pruning is 'tokens'; choose one of none, expert, device"),
        ({"pruning": "device", "prune_threshold": 1.0}, r"prune_threshold is 1.0; it must be in \[0, 1\)"),
        ({"pruning": "device", "prune_threshold": -0.1}, "prune_threshold is -0.1"),
        ({"pruning": "device", "prune_threshold": float("nan")}, "prune_threshold is nan"),
        ({"pruning": "device", "prune_threshold": "0.3"}, "prune_threshold is '0.3'"),
        ({"prune_threshold": 0.3}, "prune_threshold is 0.3 but pruning is 'none'"),
        ({"prune_solver": "lp"}, "prune_solver is 'lp'; choose one of greedy, exact"),
    ],
)
def test_bad_values_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CAPConfig(**arguments)


@pytest.mark.parametrize("layout", [None, "layout.json", ExpertLayout([[0, 1, 1]], Topology(2), [3])])
def test_file_round_trip(layout: Any, tmp_path: Path) -> None:
    config = CAPConfig(layout=layout, pruning="expert", prune_threshold=0.25, renormalize=True)
    config.save(tmp_path / "config.json")
    assert CAPConfig.load(tmp_path / "config.json") == config


def test_unknown_fields_are_named_in_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    CAPConfig().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"replicas": 2}))
    with pytest.warns(UserWarning, match="fields replicas are not known"):
        assert CAPConfig.load(path) == CAPConfig()


def test_layout_is_read_from_its_path(tmp_path: Path) -> None:
    layout = ExpertLayout([[0, 1, 1]], Topology(2))
    layout.save(tmp_path / "layout.json")
    assert CAPConfig(layout=str(tmp_path / "layout.json")).load_layout() == layout
    with pytest.raises(ValueError, match="missing.json cannot be read"):
        CAPConfig(layout=tmp_path / "missing.json").load_layout()


def test_public_names_exist() -> None:
    assert cap_hf.__all__ == sorted(cap_hf.__all__)
    assert all(getattr(cap_hf, name) for name in cap_hf.__all__)
    with pytest.raises(AttributeError, match="no attribute 'CAPModel'"):
        _ = cap_hf.CAPModel
