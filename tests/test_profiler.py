"""Measuring: shares of text, timings, memory, held-out results, tables and pictures."""

from __future__ import annotations

import math
import mmap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cap_hf import CAPMoEModel, ExpertLayout, Topology
from cap_hf.corpora import load_texts, token_blocks
from cap_hf.models import EMBEDDED_MODELS, embedded_model
from cap_hf.plots import plot_coactivation, plot_tradeoff
from cap_hf.profiler import PeakMemory, evaluate_held_out, own_share, profile_layouts
from cap_hf.report import markdown_table, provenance

NAME = EMBEDDED_MODELS[0]


@pytest.fixture(scope="module")
def blocks() -> np.ndarray:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model(NAME))
    return token_blocks(tokenizer, load_texts("python", "test"), 64, 6)


@pytest.fixture
def model() -> CAPMoEModel:
    return CAPMoEModel.from_pretrained(embedded_model(NAME), dtype=torch.float32)


def interleaved(num_ranks: int) -> ExpertLayout:
    return ExpertLayout(np.tile(np.arange(64) % num_ranks, (4, 1)), Topology(num_ranks))


def test_every_block_goes_to_one_rank() -> None:
    numbered = np.arange(11)[:, None] * np.ones((1, 3), dtype=np.int64)
    shares = [own_share(numbered, rank, 2, batch_size=2) for rank in range(2)]
    assert [[batch[:, 0].tolist() for batch in share] for share in shares] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]
    assert [len(own_share(numbered, rank, 4, batch_size=4)) for rank in range(4)] == [1, 1, 1, 0]
    assert own_share(numbered[:0], 0, 1, batch_size=4) == []


def test_held_out_perplexity_is_that_of_plain_transformers(model: CAPMoEModel, blocks: np.ndarray) -> None:
    batches = own_share(blocks, 0, 1, batch_size=2)
    result = evaluate_held_out(model, batches, timed_batches=1, progress=False)
    plain = AutoModelForCausalLM.from_pretrained(embedded_model(NAME), dtype=torch.float32)
    with torch.no_grad():
        losses = [float(plain(input_ids=batch, labels=batch).loss) for batch in batches]
    assert result.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert result.trace.num_tokens == blocks.size
    assert result.bytes_per_token is None and result.rows_per_token == 0  # one process sends nothing
    assert result.devices_per_token == 1.0 and result.load_imbalance == 1.0
    assert result.tokens_per_s > 0 and len(result.peak_memory_bytes) == 1


def test_one_process_reports_the_rows_that_ranks_would_send(model: CAPMoEModel, blocks: np.ndarray) -> None:
    model.apply_layout(interleaved(4))
    result = evaluate_held_out(model, own_share(blocks, 0, 1, batch_size=2), timed_batches=1, progress=False)
    ids, rows = result.trace.expert_ids, 0
    for token in range(result.trace.num_tokens):
        owner = token // 64 % 2  # 64 tokens per row, 2 rows per batch: rank 0 and rank 1
        rows += sum(len(set((layer[token] % 4).tolist()) - {owner}) for layer in ids)
    assert result.rows_per_token == pytest.approx(rows / result.trace.num_tokens / 4)


@pytest.mark.parametrize(
    ("batches", "words"), [([], "no rank has a batch; give 1 or more"), ([torch.zeros((1, 1)).long()], "sequences of 1 tokens")]
)
def test_unusable_batches_are_refused(model: CAPMoEModel, batches: list[torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        evaluate_held_out(model, batches)


def test_profiling_measures_every_layout_and_leaves_the_last(model: CAPMoEModel, blocks: np.ndarray) -> None:
    layouts = [interleaved(2), interleaved(4)]
    timings = profile_layouts(model, layouts, own_share(blocks, 0, 1, batch_size=2), repeats=2, progress=False)
    assert [timing.layout for timing in timings] == layouts
    assert model.layout == layouts[-1]
    assert all(timing.tokens_per_s == pytest.approx(blocks.size / timing.forward_s) for timing in timings)


def test_peak_memory_sees_what_is_gone_at_the_end() -> None:
    size = 200_000_000  # mapped directly: the heap might serve it from pages that count already
    with PeakMemory(interval_s=0.001) as memory:
        start, deadline = memory.peak_bytes, time.monotonic() + 20
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
        while memory.peak_bytes - start < 0.95 * size and time.monotonic() < deadline:  # lives until a sample has seen it
            time.sleep(0.001)
        block.close()
    assert 0.95 * size < memory.peak_bytes - start < 1.3 * size


def test_pictures_are_written(model: CAPMoEModel, blocks: np.ndarray, tmp_path: Path) -> None:
    trace = evaluate_held_out(model, own_share(blocks, 0, 1, batch_size=2), timed_batches=1, progress=False).trace
    plot_coactivation(trace, {"before": interleaved(4), "after": interleaved(2)}, tmp_path / "heat.png")
    plot_tradeoff({"spectrum": [(2.0, 1.5), (2.5, 1.1)], "Default": [(3.0, 1.2)]}, tmp_path / "trade.png", chosen=(2.0, 1.5))
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("heat.png", "trade.png"))


def test_table_and_provenance() -> None:
    table = markdown_table([{"name": "a", "value": "1.5"}, {"name": "longer", "value": "10"}])
    assert table.splitlines() == ["| name   | value |", "|--------|------:|", "| a      |   1.5 |", "| longer |    10 |"]
    facts = provenance()
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["commit"] is None or len(facts["commit"]) == 40
