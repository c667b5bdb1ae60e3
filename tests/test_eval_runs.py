"""Evaluation on the embedded model: equal to the stock harness, equal on ranks, resumed, refused, and the choice of p."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from cap_hf import CAPConfig, CAPMoEModel, ExpertLayout, Topology
from cap_hf.cli import main
from cap_hf.corpora import load_texts
from cap_hf.evaluation import run
from cap_hf.evaluation.lm import CapLM
from cap_hf.evaluation.run import evaluate, settings_of
from cap_hf.evaluation.tasks import EvalTask, load_task
from cap_hf.evaluation.threshold import ThresholdChoice, choose_threshold
from cap_hf.models import embedded_model
from cap_hf.parallel.groups import init_expert_group

TASKS = ("mmlu", "gsm8k", "humaneval", "wikitext")
SUBJECTS = ("anatomy", "virology")
ARTICLES = "".join(
    f" = Article {number} = \n\n The old lighthouse was built in {1800 + number} . " + f"Its keeper wrote {number} letters . " * 40 + "\n"
    for number in range(4)
)


def write_data(folder: Path) -> Path:
    """A folder of the four benchmarks, a few rows each."""
    for split, count in (("dev", 5), ("test", 3)):
        (folder / "mmlu" / split).mkdir(parents=True)
        for subject in SUBJECTS:
            rows = [f"Which number follows {number} in {subject}?,{number + 1},7,8,9,{number % 4}" for number in range(count)]
            lines = ["question,choice0,choice1,choice2,choice3,answer", *rows]
            (folder / "mmlu" / split / f"{subject}_{split}.csv").write_text("\n".join(lines) + "\n")
    (folder / "gsm8k").mkdir()
    for split, count in (("train", 6), ("test", 3)):
        rows = [
            {"question": f"Tom has {n} apples and buys 2. How many?", "answer": f"{n} + 2 = {n + 2}\n#### {n + 2}"} for n in range(count)
        ]
        (folder / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "wikitext2").mkdir()
    for split in ("valid", "test"):
        (folder / "wikitext2" / f"wiki.{split}.raw").write_text(ARTICLES)
    return folder


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def load(num_ranks: int = 8) -> tuple[CAPMoEModel, Any]:
    path = embedded_model("tiny_qwen3_moe")
    layout = ExpertLayout.sequential(4, 64, Topology(num_ranks))
    return CAPMoEModel.from_pretrained(path, cap_config=CAPConfig(layout=layout), dtype=torch.float32), AutoTokenizer.from_pretrained(path)


def samples_of(lm: Any, task: EvalTask) -> dict[str, list[Any]]:
    task.reseed()
    arguments = {"tasks": task.subtasks, "groups": {}, "group_map": {}}
    results = lm_eval.evaluate(lm, arguments, limit=2, bootstrap_iters=0, confirm_run_unsafe_code=True)
    keys = ("doc_id", "arguments", "resps", "filtered_resps", "target", *("acc", "exact_match", "pass@1", "word_perplexity"))
    return {name: [{key: sample.get(key) for key in keys} for sample in samples] for name, samples in results["samples"].items()}


@pytest.mark.parametrize("name", TASKS)
def test_without_pruning_every_sample_equals_the_stock_harness_on_the_plain_model(name: str, small_data: Path, tmp_path: Path) -> None:
    model, tokenizer = load()
    plain = AutoModelForCausalLM.from_pretrained(embedded_model("tiny_qwen3_moe"), dtype=torch.float32, experts_implementation="grouped_mm")
    ours, stock = CapLM(model, tokenizer, 4), HFLM(pretrained=plain, tokenizer=tokenizer, batch_size=4)
    task = load_task(name, small_data, tmp_path, ours.max_length, model.group)
    for subtask in task.subtasks.values():  # long enough to differ, short enough for a test
        subtask.config.generation_kwargs = {**(subtask.config.generation_kwargs or {}), "max_gen_toks": 24}
    want, got = samples_of(stock, task), samples_of(ours, task)
    assert sum(map(len, want.values())) >= 2 * len(task.subtasks)
    assert got == want


def rank_records(data: str, out: str, threshold: float) -> list[dict[str, Any]]:
    model, tokenizer = load(2)
    settings = settings_of(["device"], [threshold])
    with mock.patch.object(run, "load_task", shortened):
        return evaluate(model, tokenizer, TASKS, settings, Path(out), dict.fromkeys(TASKS, 3), Path(data), 2, allow_code=True)


def shortened(*args: Any) -> EvalTask:
    task = load_task(*args)
    for subtask in task.subtasks.values():
        subtask.config.generation_kwargs = {**(subtask.config.generation_kwargs or {}), "max_gen_toks": 12}
    return task


def test_ranks_share_the_requests_and_give_the_result_of_one_process(rank_pool: Any, small_data: Path, tmp_path: Path) -> None:
    by_rank = rank_pool(2).run(rank_records, str(small_data), str(tmp_path / "ranks"), 0.3)
    alone = rank_records(str(small_data), str(tmp_path / "alone"), 0.3)
    assert by_rank[0] == by_rank[1]
    assert len(alone) == 2 * len(TASKS)
    for ours, one in zip(by_rank[0], alone, strict=True):
        assert list(ours["items"]) == list(one["items"]) and ours["truncated"] == one["truncated"]
        for key, item in ours["items"].items():
            other = one["items"][key]
            assert (item["answer"], item["scores"].keys(), item["tokens"]) == (other["answer"], other["scores"].keys(), other["tokens"])
            assert list(item["scores"].values()) == pytest.approx(list(other["scores"].values()))
            assert item["loglikelihood"] == pytest.approx(other["loglikelihood"], rel=1e-5)
        assert sum(gap for gap, _ in ours["divergence"]) == pytest.approx(sum(gap for gap, _ in one["divergence"]), rel=1e-3)
        assert len(ours["divergence"]) == len(one["divergence"]) and (one["threshold"] == 0 or len(one["divergence"]) > 0)
        if one["threshold"]:  # at p = 0 one process runs all rows at once, whoever owns them
            assert ours["routing"] == pytest.approx(one["routing"], rel=1e-4)
    pruned = [record for record in alone if record["threshold"]]
    assert [record["requests"] for record in pruned] == [record["requests"] for record in alone if not record["threshold"]]
    assert all(record["routing"]["score_kept"] < 0.98 and record["routing"]["devices_per_token"] < 1.98 for record in pruned)


def evaluated(small_data: Path, out: Path, limit: int = 2) -> tuple[list[dict[str, Any]], int]:
    """Records, and how many of them were computed."""
    model, tokenizer = load()
    model.set_pruning("device", 0.2)
    with mock.patch.object(run, "_record", wraps=run._record) as computed:
        records = evaluate(model, tokenizer, ["wikitext"], settings_of(["device"], [0.3]), out, {"wikitext": limit}, small_data)
    assert (model.cap_config.pruning, model.cap_config.prune_threshold) == ("device", 0.2)  # as it was
    return records, computed.call_count


def test_a_run_goes_on_where_it_ended_and_only_on_the_same_grounds(small_data: Path, tmp_path: Path) -> None:
    first, count = evaluated(small_data, tmp_path)
    assert count == 2
    assert evaluated(small_data, tmp_path) == (first, 0)
    record = tmp_path / "records" / "wikitext__device_0.3.json"
    record.write_text(record.read_text()[:100])  # as if it had ended while writing
    assert evaluated(small_data, tmp_path) == (first, 1)
    assert evaluated(small_data, tmp_path, limit=1)[1] == 2


def test_other_weights_are_other_results(small_data: Path, tmp_path: Path) -> None:
    """At the same path, and whether it is a dense weight or one of an expert that changes."""
    model, tokenizer = load()
    arguments = (tokenizer, ["wikitext"], settings_of(["device"], []), tmp_path, {"wikitext": 1}, small_data)
    experts = model.model.get_submodule("model.layers.2.mlp.experts")
    results = [evaluate(model, *arguments)]
    for parameter in (model.model.model.norm.weight, experts.down_proj):
        with torch.no_grad():
            parameter.mul_(1.3)
        results.append(evaluate(model, *arguments))
    assert len({record[0]["key"] for record in results}) == 3
    assert len({record[0]["items"]["wikitext/0"]["loglikelihood"] for record in results}) == 3


def test_hostile_answers_fail_and_right_ones_pass(small_data: Path, tmp_path: Path) -> None:
    model, tokenizer = load()
    precious = tmp_path / "precious"
    precious.write_text("kept")
    task = load_task("humaneval", small_data, tmp_path / "out", 512, model.group)
    solutions = [document["canonical_solution"] for document in list(task.subtasks["humaneval"].test_docs())[:3]]
    answers = [solutions[0], f"    import os\n    os.remove({str(precious)!r})\n", "    import os\n    while True:\n        os.fork()\n"]
    with mock.patch.object(CapLM, "generate_until", lambda _, requests, **__: answers[: len(requests)]):
        records = evaluate(
            model, tokenizer, ["humaneval"], settings_of(["device"], []), tmp_path / "out", {"humaneval": 3}, small_data, allow_code=True
        )
    assert [item["scores"]["pass@1"] for item in records[0]["items"].values()] == [1, 0, 0]
    assert precious.read_text() == "kept"


def test_the_command_writes_tables_and_pictures(small_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(embedded_model("tiny_qwen3_moe")), "--data-dir", str(small_data), "--output-dir", str(tmp_path / "out")]
    tasks = ["--tasks", "mmlu,wikitext", "--limit", "mmlu=2,wikitext=2", "--thresholds", "0,0.3", "--pruning", "both"]
    assert main(["eval", *options, *tasks]) == 0
    shown = capsys.readouterr().out
    assert "mmlu accuracy" in shown and "wikitext PPL" in shown and shown.count("\n|") == 4  # rule, p = 0, expert, device
    report = json.loads((tmp_path / "out" / "accuracy.json").read_text())
    assert [(row["task"], row["rule"]) for row in report["rows"]] == [
        (t, r) for t in ("mmlu", "wikitext") for r in ("none", "expert", "device")
    ]
    assert (
        report["provenance"]["documents, for mmlu per subject"] == {"mmlu": 2, "wikitext": 2}
        and report["provenance"]["versions"]["lm_eval"]
    )
    text = (tmp_path / "out" / "accuracy.md").read_text()
    assert "## Order" in text and report["provenance"]["data checksums"]["mmlu"] in text
    assert len((tmp_path / "out" / "accuracy.csv").read_text().splitlines()) == 7
    assert all((tmp_path / "out" / f"{task}.png").stat().st_size > 10_000 for task in ("mmlu", "wikitext"))
    assert main(["eval", *options, *tasks, "--json"]) == 0  # from the records
    assert json.loads(capsys.readouterr().out)["rows"] == report["rows"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--tasks mmul", "unknown task 'mmul'; choose from mmlu,"),
        ("--tasks wikitext --thresholds 0,1.5", r"prune_threshold is 1.5; it must be in [0, 1)"),
        ("--tasks wikitext --thresholds a", "--thresholds is 'a'"),
        ("--tasks humaneval", "--run-generated-code"),
        ("--tasks wikitext --limit 0", "the limit of wikitext is 0"),
        ("--tasks wikitext --limit gsm8k=3", "'gsm8k', which is not among the tasks wikitext"),
        ("--tasks wikitext --limit x", "--limit is 'x'"),
        ("--tasks wikitext --batch-size 0", "batch size is 0"),
        ("--tasks text:nowhere.txt", "text:nowhere.txt is no readable UTF-8 file"),
        ("--tasks wikitext --layout nowhere.json", "nowhere.json cannot be read"),
        ("--tasks wikitext --num-ranks 0", "num_ranks is 0"),
        ("--tasks wikitext --model /nowhere", "model folder '/nowhere' does not exist"),
        ("--tasks wikitext --output-dir /proc/x", "the output folder '/proc/x' cannot be written"),
        ("--tasks wikitext --output-dir o[1]", "rename it"),
    ],
)
def test_a_wrong_request_is_one_line(
    arguments: str, words: str, small_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(embedded_model("tiny_qwen3_moe"))
    options = ["--model", model, "--data-dir", str(small_data), "--output-dir", str(tmp_path), *arguments.split()]
    assert main(["eval", *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("cap-hf eval: ") and words in error


def test_a_model_without_experts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    assert main(["eval", "--model", str(tmp_path), "--tasks", "wikitext"]) == 2
    assert "llama" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_pad_is_refused() -> None:
    model, tokenizer = load()
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.unk_token = None
    with pytest.raises(ValueError, match="no padding, end-of-text or unknown token"):
        CapLM(model, tokenizer)


def test_what_exceeds_the_context_is_counted(small_data: Path, tmp_path: Path) -> None:
    model, tokenizer = load()
    long = tmp_path / "data"
    write_data(long)
    lines = (long / "gsm8k" / "train.jsonl").read_text().replace("How many?", "How many? " + "Count them all again. " * 30)
    (long / "gsm8k" / "train.jsonl").write_text(lines)
    with mock.patch.object(run, "load_task", shortened):
        records = [
            evaluate(model, tokenizer, ["gsm8k"], settings_of(["device"], []), tmp_path / folder.name, {"gsm8k": 2}, folder)
            for folder in (small_data, long)
        ]
    assert [record["truncated"] for (record,) in records] == [0, 4]  # two prompts to answer, two to score the reference after


def test_a_reference_longer_than_the_context_is_cut(tmp_path: Path) -> None:
    model, tokenizer = load()
    data = write_data(tmp_path / "data")
    text = (data / "gsm8k" / "test.jsonl").read_text().replace(" + 2 = ", " + 2 = " + "one and one and " * 200, 1)
    (data / "gsm8k" / "test.jsonl").write_text(text)
    with mock.patch.object(run, "load_task", shortened):
        (record,) = evaluate(model, tokenizer, ["gsm8k"], settings_of(["device"], []), tmp_path / "o: x #1", {"gsm8k": 2}, data)
    assert record["notes"] == ["1 reference answers are cut to fit the model's context"]
    assert [item["tokens"] == 448 for item in record["items"].values()] == [True, False]


def test_a_missing_subject_file_is_named(small_data: Path, tmp_path: Path) -> None:
    model, _ = load()
    write_data(tmp_path / "data")
    (tmp_path / "data" / "mmlu" / "dev" / "virology_dev.csv").unlink()
    with pytest.raises(ValueError, match=r"virology_dev.csv is missing"):
        load_task("mmlu", tmp_path / "data", tmp_path / "out", 512, model.group)


def chosen(num_ranks: int, budget: float = 0.03, **options: Any) -> ThresholdChoice:
    model, tokenizer = load(num_ranks)
    texts = load_texts("python", "test")[:6]
    return choose_threshold(model, tokenizer, texts, budget, num_tokens=12 * 512, resolution=0.05, progress=False, **options)


def rank_choice() -> tuple[int, ThresholdChoice]:
    return init_expert_group().rank, chosen(2)


def test_the_chosen_threshold_holds_the_budget_and_the_next_one_does_not() -> None:
    choice = chosen(8)
    tried = {step.threshold: step for step in choice.steps}
    assert 0 < choice.threshold < 0.9 and choice.upper_bound <= 0.03 < tried[round(choice.threshold + 0.05, 10)].upper_bound
    assert 0 < choice.cost < choice.upper_bound and choice == chosen(8)
    assert choice.devices_per_token < choice.devices_unpruned == tried[0.0].devices_per_token and 0 < choice.saved < 1
    assert f"p = {choice.threshold:g}" in str(choice)
    bolder = chosen(8, confidence=0.5)
    assert bolder.threshold >= choice.threshold and bolder.upper_bound == pytest.approx(bolder.cost)
    nothing = chosen(8, 1e-6)
    assert nothing.threshold == 0 and nothing.saved == 0 and "none of" in str(nothing)
    flips = chosen(8, 0.1, measure="flips")
    assert 0 < flips.cost < flips.upper_bound <= 0.1 and all(step.cost <= 1 for step in flips.steps)


def test_no_flips_at_all_are_no_proof() -> None:
    """None in n positions leave 3 / n possible at 95 % confidence."""
    model, tokenizer = load()
    texts = load_texts("python", "test")[:2]
    choice = choose_threshold(model, tokenizer, texts, 1e-9, "flips", num_tokens=1024, resolution=0.0005, progress=False)
    assert choice.threshold == 0
    least = min((step for step in choice.steps if step.threshold), key=lambda step: step.cost)
    assert least.cost < 0.002 and least.upper_bound >= 0.9 * 3 / 1022


def test_two_ranks_choose_as_one_process_that_plays_them(rank_pool: Any) -> None:
    alone = chosen(2)
    for _, choice in rank_pool(2).run(rank_choice):
        assert choice.threshold == alone.threshold and choice.num_tokens == alone.num_tokens
        for ours, one in zip(choice.steps, alone.steps, strict=True):
            assert vars(ours) == pytest.approx(vars(one), rel=1e-4, abs=1e-6)


def test_bad_arguments_of_the_choice_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load()
    for options, words in (
        ({"budget": 0.0}, "budget is 0.0"),
        ({"measure": "bleu"}, "unknown measure 'bleu'"),
        ({"rule": "node"}, "rule 'node'"),
        ({"confidence": 1.0}, "confidence is 1.0"),
        ({"resolution": 0.0}, "resolution is 0.0"),
        ({"num_tokens": 600}, "num_tokens is 600; at least 1024"),
        ({"batch_size": 0}, "batch size is 0"),
    ):
        with pytest.raises(ValueError, match=words):
            choose_threshold(model, tokenizer, ["text"], **{"budget": 0.01, **options})
    short = tmp_path / "short.txt"
    short.write_text("Too short. " * 200)  # one block of 512 tokens, and a bit
    model = str(embedded_model("tiny_qwen3_moe"))
    assert main(["threshold", "--model", model, "--budget", "1%", "--text-file", str(short)]) == 2
    assert "calibration text has less than 1024 tokens" in capsys.readouterr().err
    assert main(["threshold", "--model", model, "--budget", "cheap"]) == 2
    assert "--budget is 'cheap'" in capsys.readouterr().err


def test_the_threshold_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(embedded_model("tiny_qwen3_moe")), "--corpus", "python", "--num-tokens", "4096", "--resolution", "0.1"]
    assert main(["threshold", *options, "--budget", "5%"]) == 0
    shown = capsys.readouterr().out
    assert "at 95% confidence below" in shown and "devices per token" in shown
    assert main(["threshold", *options, "--budget", "0.05", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert f"p = {result['threshold']:g}: " in shown and result["saved"] > 0
