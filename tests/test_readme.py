"""The README's example is run as it stands, and prints what the README says (figures within rounding of another CPU)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_readme_example_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "README.md").read_text()
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", readme, re.DOTALL)[:2]
    assert code.count("\n") <= 15
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    number = re.compile(r"\d+\.\d+")
    got, want = capsys.readouterr().out.strip(), printed.strip()
    assert number.sub("#", got) == number.sub("#", want)
    assert [float(n) for n in number.findall(got)] == pytest.approx([float(n) for n in number.findall(want)], abs=0.03)
    assert (tmp_path / "layout.json").exists()
