"""Evaluation against the threshold: data that is checked, answers as the stock harness gives them, measures in closed form."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cap_hf.evaluation.data import prepare
from cap_hf.evaluation.lm import _real_positions, owners_of
from cap_hf.evaluation.measures import measures, paired_change, sign_test
from cap_hf.evaluation.run import Setting, settings_of
from cap_hf.evaluation.tasks import check_tasks, file_name, load_task
from cap_hf.parallel.groups import ExpertGroup


def record(*items: tuple[str, float, float, int], divergence: list[list[float]] | None = None) -> dict[str, object]:
    made = {
        str(number): {"answer": answer, "scores": {"acc": score}, "loglikelihood": value, "tokens": tokens}
        for number, (answer, score, value, tokens) in enumerate(items)
    }
    return {"items": made, "divergence": divergence or []}


def test_measures_of_four_items() -> None:
    before = record(("a", 1, -1.0, 1), ("b", 0, -2.0, 2), ("c", 1, -3.0, 3), ("d", 1, -4.0, 4))
    after = record(("a", 1, -2.0, 1), ("x", 0, -2.0, 2), ("y", 0, -3.0, 3), ("z", 0, -4.0, 4), divergence=[[0.5, 1], [1.0, 2]])
    result = measures(after, before)
    assert result["acc"] == 0.25 and result["acc_flips"] == 0.5 and result["changed"] == 0.75
    assert result["acc_stderr"] == pytest.approx(0.25) and result["acc_p_value"] == pytest.approx(0.5)
    assert result["nats_per_token"] == pytest.approx(1.1) and result["nats_per_token_change"] == pytest.approx(0.1)
    assert result["divergence"] == pytest.approx(0.5)


def test_nothing_changed_is_no_evidence() -> None:
    same = record(("a", 1, -1.0, 1), ("b", 0, -2.0, 2))
    result = measures(same, same)
    assert result["acc_flips"] == 0 and result["acc_p_value"] == 1 and result["nats_per_token_p_value"] == 1


def test_records_of_other_items_are_refused() -> None:
    with pytest.raises(ValueError, match="1 items cannot be compared with 2 others"):
        measures(record(("a", 1, -1.0, 1)), record(("a", 1, -1.0, 1), ("b", 0, -2.0, 2)))
    other = record(("a", 1, -1.0, 1))
    with pytest.raises(ValueError, match="other prompts"):
        measures({**other, "requests": "1"}, {**other, "requests": "2"})


def test_the_paired_test_holds_its_level_and_sees_a_real_change() -> None:
    draw, tokens = np.random.default_rng(0), np.full(50, 10.0)
    assert 0.02 < np.mean([paired_change(draw.normal(0.0, 1.0, 50), tokens).is_sure for _ in range(400)]) < 0.09
    real = paired_change(draw.normal(1.0, 1.0, 50), tokens)
    assert real.p_value is not None and real.p_value < 1e-4 and real.change == pytest.approx(0.1, abs=0.05)


def test_sign_test_of_five_against_none() -> None:
    assert sign_test(5, 0) == pytest.approx(2 / 32) and sign_test(0, 0) == 1


def test_settings_begin_with_no_pruning() -> None:
    assert settings_of(["device"], [0.3, 0.1, 0.1]) == [Setting("none", 0.0), Setting("device", 0.1), Setting("device", 0.3)]
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
        settings_of(["device"], [1.0])
    with pytest.raises(ValueError, match="'node' is unknown"):
        settings_of(["node"], [0.1])


def test_unknown_repeated_and_unsafe_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown task 'mmul'"):
        check_tasks(["mmul"], False)
    with pytest.raises(ValueError, match="named 2 times"):
        check_tasks(["gsm8k", "gsm8k"], False)
    with pytest.raises(ValueError, match="--run-generated-code"):
        check_tasks(["humaneval"], False)
    check_tasks(["humaneval", "text:python"], True)


def test_all_requests_of_a_document_go_to_one_rank() -> None:
    requests = [SimpleNamespace(task_name=task, doc_id=doc) for task in "ab" for doc in range(2) for _ in range(4)]
    assert owners_of(requests, 3) == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4


GOOD = json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n"


@pytest.mark.parametrize(
    ("test", "words"),
    [
        (GOOD + '{"question": "q"}\n', r"test.jsonl, row 2: no field 'answer'"),
        (GOOD + '{"question": "q", "answer": "2"}\n', r"row 2, field 'answer'.*####"),
        (GOOD + "{\n", r"row 2: not JSON"),
        (GOOD + "[1]\n", r"row 2: no field 'question' \(it holds list\)"),
        ("", r"test.jsonl holds 0 rows; the task needs 1 or more"),
        (b"\xff" + GOOD.encode(), r"test.jsonl is not UTF-8 text"),
        (None, r"test.jsonl is missing"),
    ],
)
def test_a_malformed_row_is_named(test: str | bytes | None, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\ufeff" + 5 * GOOD)  # a byte order mark does no harm
    if test is not None:
        (folder / "test.jsonl").write_bytes(test if isinstance(test, bytes) else test.encode())
    with pytest.raises(ValueError, match=words):
        prepare("gsm8k", None, tmp_path, tmp_path / "out")


def test_too_few_examples_for_the_prompt_are_named(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(4 * GOOD)
    with pytest.raises(ValueError, match=r"train.jsonl holds 4 rows; the task needs 5 or more"):
        prepare("gsm8k", None, tmp_path, tmp_path / "out")


@pytest.mark.parametrize("kept", [100, -100])
def test_a_damaged_archive_is_named(kept: int, tmp_path: Path) -> None:
    (tmp_path / "humaneval").mkdir()
    content = bytearray(gzip.compress(json.dumps({"task_id": "x" * 5000}).encode()))
    if kept > 0:
        content[20:30] = b"\0" * 10
    (tmp_path / "humaneval" / "HumanEval.jsonl.gz").write_bytes(content if kept > 0 else content[:-20])
    with pytest.raises(ValueError, match=r"HumanEval.jsonl.gz is damaged or cut off"):
        prepare("humaneval", None, tmp_path, tmp_path / "out")


@pytest.mark.parametrize("name", ["gsm8k", "mmlu", "wikitext"])
def test_without_local_data_the_stock_task_asks_the_hub(name: str, tmp_path: Path) -> None:
    """Tests run offline, so that asking is refused."""
    with pytest.raises(
        ValueError, match=r"the data of \w+ cannot be read .*(openai/gsm8k|cais/mmlu|EleutherAI/wikitext).* give --data-dir"
    ):
        load_task(name, None, tmp_path, 512, ExpertGroup())


def test_other_data_is_read_anew(tmp_path: Path) -> None:
    """``datasets`` remembers what it has read by the names of folder and configuration."""
    (tmp_path / "gsm8k").mkdir()
    for answer in ("#### 2", "#### 3"):
        for split in ("train", "test"):
            (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(5 * (json.dumps({"question": "1 + 1?", "answer": answer}) + "\n"))
        task = load_task("gsm8k", tmp_path, tmp_path / "out", 512, ExpertGroup()).subtasks["gsm8k"]
        assert [document["answer"] for document in task.test_docs()] == 5 * [answer]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("q,a,b,c,d,B", r"row 7, field 'answer': 'B' is no index from 0 to 3"),
        ("One, two or 3?,1,2,3,0,2", r"row 7: 7 cells for 6 columns; put cells with commas in quotes"),
        ("q,a,b,c,d", r"row 7: no field 'answer'"),
        (f"{'q' * 200_000},a,b,c,d,1", r"row \d: field larger than field limit"),
    ],
)
def test_a_malformed_mmlu_row_is_named(row: str, words: str, tmp_path: Path) -> None:
    for split in ("dev", "test"):
        (tmp_path / "mmlu" / split).mkdir(parents=True)
        rows = ["question,choice0,choice1,choice2,choice3,answer", *5 * ["q,a,b,c,d,1"], row]
        (tmp_path / "mmlu" / split / f"anatomy_{split}.csv").write_text("\n".join(rows) + "\n")
    with pytest.raises(ValueError, match=rf"anatomy_dev.csv, {words}"):
        prepare("mmlu", None, tmp_path, tmp_path / "out")


def test_file_names_of_tasks_are_plain_and_unlike() -> None:
    names = ["wikitext", "text:a/t.txt", "text:a_t.txt", "text:" + "x" * 300, "text:ü b.txt"]
    files = [file_name(name) for name in names]
    assert files[0] == "wikitext" and len(set(files)) == len(names)
    assert all(len(file) < 80 and file.isascii() and "/" not in file and " " not in file for file in files)


def test_a_row_may_end_in_the_id_that_fills_rows_up() -> None:
    ids = torch.tensor([[5, 0, 0, 0], [5, 6, 7, 0], [0, 0, 0, 0], [9, 9, 0, 0]])
    real = _real_positions(ids, {(5, 0, 0), (5, 6, 7), (0,), (9, 9, 0, 0)})
    assert real.sum(1).tolist() == [3, 3, 1, 4]
