"""``cap-hf``: every command on real files, its JSON, its examples and its one-line errors."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from cap_hf import ExpertLayout, PlacementSpectrum, RoutingTrace, Topology
from cap_hf.cli import _parser, main
from cap_hf.models import embedded_model
from cap_hf.replicated import ReplicatedLayout


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """Two layers, eight experts in two blocks of four that are never mixed: even ids, odd ids."""
    rng = np.random.default_rng(0)
    ids = np.stack([[rng.permutation(4)[:3] * 2 + rng.integers(2) for _ in range(200)] for _ in range(2)])
    RoutingTrace(ids, 8, request_lengths=[150, 50]).save(tmp_path / "trace.safetensors")
    return tmp_path / "trace.safetensors"


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_place_finds_the_blocks_and_says_so(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "layout.json")
    result = run_json(capsys, "place", str(trace_file), "--num-ranks", "2", "--output", out)
    assert result["devices_per_token"] == 1.0
    layout = ExpertLayout.load(out)
    assert layout.fingerprint == result["layout"]
    assert all(len(set(row[::2].tolist())) == 1 for row in layout.expert_to_rank)
    assert main(["place", str(trace_file), "--num-ranks", "2", "--output", out]) == 0
    table = capsys.readouterr().out
    assert "Default (id order)" in table and f"written to {out}" in table


def test_spectrum_and_inspect(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "spectrum.json")
    result = run_json(capsys, "spectrum", str(trace_file), "--num-ranks", "2", "--num-placements", "3", "--output", out)
    assert len(PlacementSpectrum.load(out)) == len(result["placements"]) == 3
    inspected = run_json(capsys, "inspect", out, "--trace", str(trace_file))
    assert inspected["kind"] == "spectrum"
    keys = ("devices_per_token", "load_imbalance", "communication_cost")
    assert [[row[key] for key in keys] for row in inspected["content"]] == [[row[key] for key in keys] for row in result["placements"]]
    facts = run_json(capsys, "inspect", str(trace_file))["content"][0]
    assert facts["tokens"] == 200 and facts["requests"] == 2 and facts["slots pruned"] == "0.0%"


def test_place_with_copies(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks of two experts: a token of three needs two ranks, or one that holds copies of all four of its block."""
    out = str(tmp_path / "layout.json")
    plain = run_json(capsys, "place", str(trace_file), "--num-ranks", "4", "--output", out)
    copied = run_json(capsys, "place", str(trace_file), "--num-ranks", "4", "--redundant-slots", "2", "--output", out)
    assert (plain["devices_per_token"], copied["devices_per_token"]) == (2.0, 1.0)
    layout = ReplicatedLayout.load(out)
    assert layout.fingerprint == copied["layout"]
    inspected = run_json(capsys, "inspect", out, "--trace", str(trace_file))
    assert inspected["kind"] == "replicated_layout" and inspected["content"][0]["experts per rank"] == "3-4"
    assert inspected["content"][0]["devices_per_token"] == 1.0


def test_search_options_reach_the_placer(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "layout.json")
    common = [str(trace_file), "--num-ranks", "4", "--output", out]
    fingerprints = {
        method: run_json(capsys, "place", *common, "--method", method)["layout"] for method in ("greedy", "eplb", "sequential", "random")
    }
    assert len(set(fingerprints.values())) == 4
    assert run_json(capsys, "place", *common, "--time-limit", "0")["layout"] == fingerprints["greedy"]


def test_trace_records_a_live_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "trace.safetensors"
    text.write_text("The river rises in the hills.\n\ndef add(a, b):\n    return a + b\n")
    options = ["--model", str(embedded_model()), "--text-file", str(text), "--num-ranks", "4", "--pruning", "device", "--threshold", "0.4"]
    result = run_json(capsys, "trace", *options, "--output", str(out))
    trace = RoutingTrace.load(out)
    assert (trace.num_layers, trace.num_experts, trace.top_k, trace.num_requests) == (4, 64, 8, 2)
    assert trace.num_tokens == result["tokens"]
    assert 0.05 < (trace.expert_ids < 0).mean() < 0.7  # pruning was on


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("place {trace} --num-ranks 9", "8 experts"),
        ("place {trace} --num-ranks 0", "num_ranks is 0"),
        ("place {trace} --num-ranks 2 --num-starts 0", "num_starts is 0"),
        ("spectrum {trace} --num-ranks 2 --time-limit -3", "time_limit_s is -3.0"),
        ("place {trace} --num-ranks 2 --redundant-slots -1", "--redundant-slots is -1; it must be 0 or more"),
        ("place {missing} --num-ranks 2", "cannot be read"),
        ("place {foreign} --num-ranks 2", "foreign"),
        ("place {layout} --num-ranks 2", "holds a layout, not a trace"),
        ("spectrum {trace} --num-ranks 2 --num-placements 0", "num_placements is 0"),
        ("inspect {foreign}", "give one of: trace, layout, replicated_layout, spectrum"),
        ("inspect {missing}", "is not an existing file"),
        ("trace --model {missing} --num-ranks 4 --corpus python --threshold 1.5 --pruning device", "prune_threshold is 1.5"),
        ("trace --model {model} --num-ranks 100 --corpus python", "64 experts per layer for 100 ranks"),
        ("trace --model {model} --num-ranks 4 --corpus python --num-tokens 0", "--num-tokens is 0"),
        ("trace --model {model} --num-ranks 4 --text-file {binary}", "is not UTF-8 text"),
        ("trace --model {missing} --num-ranks 4 --corpus c4", "unknown corpus 'c4'"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: str, words: str, trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = trace_file.with_name("foreign")
    foreign.write_text('{"hello": 1}')
    layout = ExpertLayout([[0, 1]], Topology(2))
    layout.save(trace_file.with_name("layout.json"))
    (binary := trace_file.with_name("binary")).write_bytes(b"\xff\xfe\x00")
    places = {
        "model": embedded_model(),
        "binary": binary,
        "layout": trace_file.with_name("layout.json"),
        "trace": trace_file,
        "missing": trace_file.with_name("missing"),
        "foreign": foreign,
    }
    assert main(shlex.split(arguments.format(**places))) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_every_help_shows_an_example_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("trace", "place", "spectrum", "inspect"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        example = capsys.readouterr().out.split("example:\n")[1].strip()
        assert _parser().parse_args(shlex.split(example)[1:]).command == command
