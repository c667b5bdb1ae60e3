"""CAPTrainer on the embedded model: the four steps, training under pruning, evaluation at thresholds, checkpoints, bad input."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments

from cap_hf import CAPConfig, CAPMoEModel, CAPTrainer, CAPTrainingArguments, ExpertLayout, PlacementSpectrum, Topology
from cap_hf import trainer as trainer_module
from cap_hf.corpora import load_texts
from cap_hf.models import embedded_model
from cap_hf.parallel.groups import ExpertGroup
from cap_hf.training.data import packed
from cap_hf.training.losses import distillation_loss, locality_loss
from cap_hf.training.stages import once

PATH = embedded_model("tiny_qwen3_moe")
LENGTH = 64


def model() -> CAPMoEModel:
    return CAPMoEModel.from_pretrained(PATH, cap_config=CAPConfig(layout=ExpertLayout.sequential(4, 64, Topology(8))), dtype=torch.float32)


def text_dataset(count: int = 3, start: int = 0) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [text[:4000] for text in load_texts("python", "train")[start : start + count]]})


def arguments(out: Path, **options: Any) -> CAPTrainingArguments:
    defaults = dict(
        output_dir=str(out), use_cpu=True, report_to="none", disable_tqdm=True, seed=0, per_device_train_batch_size=4, max_steps=4,
        per_device_eval_batch_size=4, learning_rate=1e-3, block_size=LENGTH, eval_thresholds="0,0.3", trace_tokens=1500, save_strategy="no",
        num_placements=3, logging_steps=1, lr_scheduler_type="constant", profile_batches=1,
    )  # fmt: skip
    return CAPTrainingArguments(**(defaults | options))


def trainer(out: Path, eval_rows: int = 2, **options: Any) -> CAPTrainer:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    return CAPTrainer(model(), arguments(out, **options), text_dataset(), text_dataset(eval_rows, 40), processing_class=tokenizer)


# ---- losses, data, stages ----


def test_distillation_is_the_divergence_of_what_is_predicted() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    labels = torch.tensor([[1, 2, -100, 3, 4], [1, -100, -100, -100, 5]])
    terms = []
    for row, position in ((0, 1), (0, 3), (0, 4), (1, 4)):
        p, q = (logits[row, position - 1].softmax(-1) for logits in (teacher, student))
        terms.append(float((p * (p / q).log()).sum()))
    assert float(distillation_loss(student, teacher, labels)) == pytest.approx(sum(terms) / 4, rel=1e-5)
    assert float(distillation_loss(student, student, labels)) == pytest.approx(0, abs=1e-6)


def test_locality_counts_ranks_that_draws_would_visit() -> None:
    ranks, source = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1])
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]]).log()
    first = (1 - 0.7**2) + (1 - 0.6**2)  # ranks 1 and 2 with shares 0.3 and 0.4
    second = (1 - 0.2**2) + (1 - 0.9**2)  # ranks 0 and 2 with shares 0.8 and 0.1
    assert float(locality_loss(logits, ranks, source, 3, top_k=2)) == pytest.approx((first + second) / 2, rel=1e-5)


@pytest.mark.parametrize("streamed", [False, True])
def test_texts_become_rows_of_one_length(streamed: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    source = text_dataset()
    rows = list(packed(source.to_iterable_dataset() if streamed else source, tokenizer, LENGTH, "text", "training"))
    ids = [token for text in source["text"] for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert [token for row in rows for token in row["input_ids"]] == ids[: len(ids) // LENGTH * LENGTH]
    assert all(row["labels"] == row["input_ids"] and len(row["input_ids"]) == LENGTH for row in rows)


def test_a_stage_is_made_once_for_equal_inputs(tmp_path: Path) -> None:
    made = []
    path = tmp_path / "value"

    def run(key: int) -> tuple[str, bool]:
        def make() -> str:
            made.append(key)
            return f"value {key}"

        def load() -> str:
            if not path.exists():
                raise ValueError("gone")
            return path.read_text()

        return once(ExpertGroup(), tmp_path, "stage", {"key": key}, make, lambda value: path.write_text(value) and None, load)

    assert run(1) == ("value 1", True) and run(1) == ("value 1", False)
    assert run(2) == ("value 2", True) and run(1) == ("value 1", True)
    path.unlink()
    assert run(1) == ("value 1", True) and made == [1, 2, 1, 1]


# ---- the four steps ----


def test_the_four_steps_are_logged_saved_and_done_once(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    layout = first.optimize()
    assert first.model.layout == layout == ExpertLayout.load(tmp_path / "chosen_layout.json") == first.place()
    logged = {key for entry in first.state.log_history for key in entry}
    assert {
        "calibrate_tokens",
        "place_devices_per_token",
        "adjust_2_load_imbalance",
        "profile_0_forward_s",
        "optimize_devices_per_token",
    } <= logged
    default = ExpertLayout.sequential(4, 64, Topology(8))
    assert layout.metrics(first.calibrate()).devices_per_token < 0.95 * default.metrics(first.calibrate()).devices_per_token
    for forbidden in ("record_requests", "profile_layouts"):
        with mock.patch.object(trainer_module, forbidden, side_effect=AssertionError("made again")):
            assert trainer(tmp_path).optimize() == layout
    again = trainer(tmp_path, placement_method="sequential")
    assert again.place() == default  # other inputs, another result


def rank_steps(out: str) -> tuple[str, str, list[float], str]:
    """The four steps on real ranks, and what training there says."""
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    loaded = CAPMoEModel.from_pretrained(PATH, dtype=torch.float32)
    tested = CAPTrainer(loaded, arguments(Path(out)), text_dataset(), text_dataset(2, 40), processing_class=tokenizer)
    chosen = tested.optimize()
    try:
        tested.train()
    except ValueError as error:
        return chosen.fingerprint, tested.model.layout.fingerprint, [timing.forward_s for timing in tested.profile()], str(error)
    return chosen.fingerprint, "", [], "no error"


def test_ranks_take_the_steps_together_and_the_fastest_layout(rank_pool: Any, tmp_path: Path) -> None:
    results = rank_pool(2).run(rank_steps, str(tmp_path))
    assert results[0] == results[1]
    chosen, applied, seconds, error = results[0]
    spectrum = PlacementSpectrum.load(tmp_path / "spectrum.json")
    assert chosen == applied == spectrum[seconds.index(min(seconds))].fingerprint and len(seconds) == 3
    assert error.startswith("train() runs in one process") and "not on 2" in error


# ---- training ----


def test_without_pruning_it_trains_as_the_stock_trainer(tmp_path: Path) -> None:
    ours = trainer(tmp_path / "ours", pruning="none")
    plain = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32, experts_implementation="grouped_mm")
    options = {
        name: value
        for name, value in arguments(tmp_path).to_dict().items()
        if name in {f.name for f in dataclasses.fields(TrainingArguments)}
    }
    stock = Trainer(plain, TrainingArguments(**options), train_dataset=ours.train_dataset)
    losses = []
    for each in (ours, stock):
        each.train()
        losses.append([entry[key] for entry in each.state.log_history for key in ("loss", "grad_norm") if key in entry])
    assert len(losses[0]) == 8 and losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_training_under_pruning_wins_back_what_pruning_costs(tmp_path: Path) -> None:
    """On the rows it trains on, where a few steps must show."""
    trained = trainer(tmp_path, prune_threshold=0.5, eval_thresholds="0,0.5", max_steps=12, learning_rate=3e-4)
    trained.eval_dataset = trained.train_dataset
    before = trained.evaluate()
    trained.train()
    after = trained.evaluate()
    gaps = [metrics["eval_loss_p0.5"] - metrics["eval_loss_p0"] for metrics in (before, after)]
    assert gaps[0] > 0.05 and gaps[1] < 0.8 * gaps[0] and after["eval_loss_p0.5"] < before["eval_loss_p0.5"]


def test_locality_lowers_the_number_of_devices(tmp_path: Path) -> None:
    devices = {}
    for weight in (0.0, 1.0):
        options = {"trained": "router", "pruning": "none", "eval_thresholds": "0", "max_steps": 10, "learning_rate": 5e-3}
        trained = trainer(tmp_path / str(weight), locality_weight=weight, **options)
        trained.train()
        devices[weight] = trained.evaluate()["eval_devices_per_token_p0"]
    assert devices[1.0] < devices[0.0] - 0.1


def test_distillation_pulls_towards_the_model_before_training(tmp_path: Path) -> None:
    """With nothing else in the loss and no pruning there is nothing to learn."""
    trained = trainer(tmp_path, distillation_weight=1.0, pruning="none", eval_thresholds="0")
    before = trained.model.model.state_dict()["model.norm.weight"].clone()
    trained.train()
    norms = [entry["grad_norm"] for entry in trained.state.log_history if "grad_norm" in entry]
    assert norms[0] < 1e-4
    pruned = trainer(tmp_path, distillation_weight=1.0)
    pruned.train()
    assert next(entry["grad_norm"] for entry in pruned.state.log_history if "grad_norm" in entry) > 1e-2
    assert not torch.equal(pruned.model.model.state_dict()["model.norm.weight"], before)


@pytest.mark.parametrize(("trained", "kinds"), [("router", {"gate"}), ("moe", {"gate", "experts"}), ("all", {"gate", "experts", "rest"})])
def test_only_what_is_asked_for_is_trained(trained: str, kinds: set[str], tmp_path: Path) -> None:
    tuned = trainer(tmp_path, trained=trained, max_steps=1)
    before = {name: value.clone() for name, value in tuned.model.state_dict().items()}
    tuned.train()
    changed = {name for name, value in tuned.model.state_dict().items() if not torch.equal(value, before[name])}
    assert {"gate" if ".mlp.gate." in name else "experts" if ".experts." in name else "rest" for name in changed} == kinds


# ---- evaluation and checkpoints ----


def test_evaluate_reports_every_threshold_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    tested = trainer(tmp_path, eval_thresholds="0,0.2,0.4")
    tested.model.set_pruning("expert", 0.1)
    metrics = tested.evaluate()
    assert (tested.model.cap_config.pruning, tested.model.cap_config.prune_threshold) == ("expert", 0.1)
    assert metrics["eval_loss"] == metrics["eval_loss_p0.3"]  # of the rule in training
    losses, devices = ([metrics[f"eval_{name}_p{p}"] for p in (0, 0.2, 0.3, 0.4)] for name in ("loss", "devices_per_token"))
    assert losses == sorted(losses) and devices == sorted(devices, reverse=True)
    assert metrics["eval_perplexity_p0.4"] == pytest.approx(math.exp(losses[3]))
    plain = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32)
    rows = torch.tensor(tested.eval_dataset["input_ids"][:])
    with torch.no_grad():
        want = torch.stack([plain(input_ids=row[None], labels=row[None]).loss for row in rows]).mean()
    assert losses[0] == pytest.approx(float(want), rel=1e-5)


def test_a_run_resumes_from_its_checkpoint_and_saves_a_plain_model(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", max_steps=6)
    whole.train()
    halved = trainer(tmp_path / "halved", max_steps=6, save_strategy="steps", save_steps=3)
    halved.train()
    resumed = trainer(tmp_path / "halved", max_steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "halved" / "checkpoint-3"))
    want, got = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(got[name], value) for name, value in want.items())
    whole.save_model(str(tmp_path / "final"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32).state_dict()
    assert all(torch.equal(plain[name], value) for name, value in whole.model.model.state_dict().items())
    assert not list((tmp_path / "final").glob("*.bin"))


def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    tested = trainer(tmp_path, max_steps=4, learning_rate=0.05, metric_for_best_model="eval_loss_p0.3", greater_is_better=False, **options)
    tested.train()
    assert tested.state.best_model_checkpoint is not None and tested.state.best_model_checkpoint.endswith("checkpoint-2")
    best = CAPMoEModel.from_pretrained(tested.state.best_model_checkpoint, dtype=torch.float32).model.state_dict()
    assert all(torch.equal(tested.model.model.state_dict()[name], value) for name, value in best.items())


# ---- bad input ----


def test_what_does_not_fit_is_refused_before_the_first_step(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    with pytest.raises(ValueError, match="needs a CAPMoEModel, not a Linear"):
        CAPTrainer(torch.nn.Linear(2, 2), arguments(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"training dataset has no column 'text' \(it has content\)"):
        CAPTrainer(model(), arguments(tmp_path), datasets.Dataset.from_dict({"content": ["a"]}), processing_class=tokenizer)
    with pytest.raises(ValueError, match="give its tokenizer as processing_class"):
        CAPTrainer(model(), arguments(tmp_path), text_dataset())
    with pytest.raises(ValueError, match="evaluation dataset yields no row of 64 tokens"):
        CAPTrainer(
            model(), arguments(tmp_path), text_dataset(), datasets.Dataset.from_dict({"text": ["short"]}), processing_class=tokenizer
        )
    for options, words in (
        ({"trained": "head"}, "trained is 'head'"),
        ({"distillation_weight": 2.0}, "distillation_weight is 2.0"),
        ({"prune_threshold": 1.0}, "prune_threshold is 1.0"),
        ({"eval_thresholds": "0,x"}, "eval_thresholds is '0,x'"),
        ({"trace_tokens": 0}, "trace_tokens is 0"),
    ):
        with pytest.raises(ValueError, match=words):
            arguments(tmp_path, **options)


def test_arguments_come_from_a_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"output_dir: {tmp_path}\nprune_threshold: 0.2\nlocality_weight: 0.05\nuse_cpu: true\n")
    (args,) = HfArgumentParser(CAPTrainingArguments).parse_yaml_file(str(tmp_path / "run.yaml"))
    assert (args.prune_threshold, args.locality_weight, args.pruning) == (0.2, 0.05, "device")
