"""Every recipe and evaluation script, found by listing its folder: imports, explains itself, refuses a wrong launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cap_hf.models import EMBEDDED_MODELS, embedded_model
from cap_hf.parallel.groups import require_world_size

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for folder in ("recipes", "eval") for path in (ROOT / folder).glob("*.py"))
LAUNCHED = [script for script in SCRIPTS if "require_world_size(" in (ROOT / script).read_text()]


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment}, cwd=ROOT)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_the_options(script: str) -> None:
    result = run(script, "--help")
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout and " --" in result.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_docstring_says_command_hardware_and_time(script: str) -> None:
    docstring = (ROOT / script).read_text().split('"""')[1]
    assert script in docstring
    assert "Hardware:" in docstring and any(unit in docstring for unit in ("minute", "hour"))


@pytest.mark.parametrize("script", LAUNCHED)
def test_a_wrong_world_size_prints_the_right_command(script: str) -> None:
    result = run(script, WORLD_SIZE="1")
    assert result.returncode != 0
    assert "accelerate launch --use_deepspeed" in result.stderr and script in result.stderr
    assert "Traceback" not in result.stderr


def test_require_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert require_world_size(2, "x") == 2
    assert require_world_size(lambda size: size > 1, "x") == 2
    with pytest.raises(SystemExit, match="runs on 4 of processes, not 2; launch it with:\n  do this"):
        require_world_size(4, "do this")


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_embedded_models_ship_with_card_and_small_weights(name: str) -> None:
    folder = embedded_model(name)
    assert (folder / "model.safetensors").stat().st_size <= 20e6
    card = (folder / "README.md").read_text()
    assert "train_tiny.py" in card and "| wikitext |" in card
    with pytest.raises(ValueError, match="embedded model 'gpt' is not known"):
        embedded_model("gpt")
