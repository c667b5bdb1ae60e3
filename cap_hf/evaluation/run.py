"""One model over tasks and thresholds: records with resume, then tables and pictures.

``evaluate`` answers every task at p = 0 first, then at each (rule, threshold), and writes one record per pair; what a
record rests on is hashed into it, so that a run that was interrupted goes on where it ended, and only there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

from cap_hf._files import read_json, write_json
from cap_hf.config import CAPConfig
from cap_hf.evaluation.lm import CapLM
from cap_hf.evaluation.tables import report_files
from cap_hf.evaluation.tasks import FEWSHOT_SEED, EvalTask, check_tasks, file_name, load_task
from cap_hf.fingerprint import weights_fingerprint
from cap_hf.modeling import CAPMoEModel
from cap_hf.report import provenance

__all__ = ["Setting", "check_request", "evaluate", "facts_of", "settings_of"]


@dataclass(frozen=True)
class Setting:
    """One pruning rule at one threshold."""

    rule: str
    threshold: float

    def __str__(self) -> str:
        return f"{self.rule}, p = {self.threshold:.10g}" if self.threshold else "p = 0"


def settings_of(rules: Sequence[str], thresholds: Sequence[float]) -> list[Setting]:
    """p = 0 first, then every rule at every threshold.

    Raises:
        ValueError: a threshold outside [0, 1), or a rule other than "expert" and "device".
    """
    for rule in rules:
        if rule not in ("expert", "device"):
            raise ValueError(f"pruning rule {rule!r} is unknown; choose expert, device or both")
    for threshold in thresholds:
        CAPConfig(pruning="device", prune_threshold=threshold)
    above = sorted({threshold for threshold in thresholds if threshold > 0})
    return [Setting("none", 0.0), *(Setting(rule, threshold) for rule in dict.fromkeys(rules) for threshold in above)]


Limits = Mapping[str, int | None]
"""Documents per task, MMLU: per subject; a task that is not named, or None, takes all."""


def check_request(tasks: Sequence[str], allow_code: bool, limits: Limits, batch_size: int, out: Path) -> None:
    """Refuse what cannot be run, before anything is loaded; makes the folder ``out``.

    Raises:
        ValueError: an unknown or repeated task, HumanEval without leave to run generated code, a limit or batch size below 1,
            an output folder that cannot be written.
    """
    check_tasks(tasks, allow_code)
    for name, limit in limits.items():
        if name not in tasks:
            raise ValueError(f"a limit is given for {name!r}, which is not among the tasks {', '.join(tasks)}; name a task of this run")
        if limit is not None and limit < 1:
            raise ValueError(f"the limit of {name} is {limit}; it must be 1 or more documents, or left out for all")
    if batch_size < 1:
        raise ValueError(f"batch size is {batch_size}; it must be 1 or more rows")
    if set("*?[]") & set(str(out.resolve())):
        raise ValueError(
            f"the output folder {str(out)!r} has *, ?, [ or ] in its path, which the datasets library takes as a pattern; rename it"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"the output folder {str(out)!r} cannot be written ({error}); give another") from error
    if blocked := next((path for path in report_files(out) if path.is_dir()), None):
        raise ValueError(f"{blocked} is a folder where a report is to be written; move it or give another output folder")


def evaluate(
    model: CAPMoEModel,
    tokenizer: Any,
    tasks: Sequence[str],
    settings: Sequence[Setting],
    out: Path,
    limits: Limits | None = None,
    data_dir: Path | None = None,
    batch_size: int = 8,
    allow_code: bool = False,
    divergence: bool = True,
    references: bool = True,
    model_name: str = "",
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Records of every task at every setting, on every rank; every rank must call with the same.

    Args:
        settings: p = 0 first, see ``settings_of``.
        out: folder for records, task files and data; on several hosts a shared one.
        limits: see ``Limits``; None takes all documents.
        data_dir: local benchmark files; None reads the Hub's.
        batch_size: rows per forward.
        allow_code: run model-written programs (HumanEval) in the sandbox.
        divergence: compare next-token distributions with p = 0, at one more forward per scored batch.
        references: score the reference answers of tasks that generate, one more request per document.
        model_name: what the records call the model.
        progress: show a bar with the time left.

    Raises:
        ValueError: as ``check_request``, and for bad data.
    """
    limits = limits or {}
    check_request(tasks, allow_code, limits, batch_size, out)
    group, before, records = model.group, model.cap_config, []
    with ExitStack() as stack:
        stack.enter_context(_quiet_harness())
        stack.callback(lambda: model.set_pruning(before.pruning, before.prune_threshold))
        lm = CapLM(model, tokenizer, batch_size)
        loaded = [load_task(name, data_dir, out, lm.max_length, group) for name in tasks]
        asked = _asked(model, tokenizer, model_name)
        work = {task.name: _units(lm, task, limits.get(task.name), references) for task in loaded}
        with tqdm(total=sum(work.values()) * len(settings) // group.size, unit="request", disable=group.rank > 0 or not progress) as bar:
            lm.progress = bar.update
            for task, setting in product(loaded, settings):
                bar.set_description(f"{task.name}, {setting}")
                limit = limits.get(task.name)
                path = out / "records" / f"{file_name(task.name)}__{setting.rule}_{setting.threshold!r}.json"
                key = _key(asked, model, task, setting, limit, (batch_size, divergence and setting.threshold > 0, references))
                record = group.from_first(partial(_finished, path, key))
                if record is None:
                    model.set_pruning(setting.rule, setting.threshold)
                    record = {"key": key, **_record(lm, task, setting, limit, divergence, references)}
                    group.from_first(partial(write_json, path, "eval_record", record))
                else:
                    bar.update(work[task.name] // group.size)
                records.append(record)
    return records


@contextmanager
def _quiet_harness() -> Iterator[None]:
    """Without the harness's remarks on how it is called, and its bars between the lines of ours."""
    import lm_eval.api.task

    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with mock.patch.object(lm_eval.api.task, "tqdm", partial(tqdm, disable=True)):
            yield
    finally:
        logger.setLevel(level)


def facts_of(
    model: CAPMoEModel,
    records: Sequence[Mapping[str, Any]],
    limits: Limits,
    batch_size: int,
    divergence: bool,
    references: bool,
    model_name: str,
) -> dict[str, Any]:
    """Provenance of some records: what was evaluated, on what, with what and where."""
    config, topology = model.cap_config, model.layout.topology
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "CPU"
    return {
        "model": model_name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "layout": f"{model.layout.fingerprint}, {topology.num_ranks} ranks, {topology.ranks_per_node} per node",
        "processes": model.group.size,
        "pruning": f"{config.prune_solver} solver" + (", renormalized" if config.renormalize else ""),
        "data checksums": {record["task"]: record["checksum"] for record in records},
        "documents, for mmlu per subject": {record["task"]: limits.get(record["task"]) or "all" for record in records},
        "batch size": batch_size,
        "KL to p = 0": "measured" if divergence else "left out",
        "reference answers": "scored" if references else "left out",
        "few-shot seed": FEWSHOT_SEED,
        "device": device,
        **provenance(),
    }


def _asked(model: CAPMoEModel, tokenizer: Any, model_name: str) -> str:
    """Hash of who answers: weights, vocabulary, versions, commit, kind of device; the same on all ranks."""
    facts = provenance()
    vocabulary = sorted(tokenizer.get_vocab().items())
    what = [model_name, weights_fingerprint(model), vocabulary, facts["versions"], facts["commit"], model.device.type]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _key(asked: str, model: CAPMoEModel, task: EvalTask, setting: Setting, limit: int | None, how: tuple[Any, ...]) -> str:
    """Hash of all that a record depends on; ``asked`` is that of the model."""
    config = model.cap_config
    options = (config.prune_solver, config.renormalize, config.wire_dtype, str(model.dtype), *how)
    what = (asked, model.layout.fingerprint, task.name, task.checksum, task.notes, setting.rule, setting.threshold, limit, options)
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _finished(path: Path, key: str) -> dict[str, Any] | None:
    """The record of an earlier run, if it rests on the same."""
    try:
        record = read_json(path, "eval_record")
    except ValueError:
        return None
    return record if record.get("key") == key and record.get("items") else None


def _units(lm: CapLM, task: EvalTask, limit: int | None, references: bool) -> int:
    """Requests of one task at one setting, as the progress bar counts them."""
    total = 0
    for subtask in task.subtasks.values():
        documents = [document for _, document in subtask.doc_iterator(limit=limit)]
        if subtask.OUTPUT_TYPE == "loglikelihood_rolling":
            total += sum(-(-lm.num_tokens(subtask.doc_to_target(document)) // lm.max_length) for document in documents)
        else:
            total += (4 if subtask.OUTPUT_TYPE == "multiple_choice" else 1 + references) * len(documents)
    return total


def _record(lm: CapLM, task: EvalTask, setting: Setting, limit: int | None, divergence: bool, references: bool) -> dict[str, Any]:
    """What one task gives at one setting."""
    import lm_eval

    task.reseed()
    with lm.measuring(divergence and setting.threshold > 0):
        results = lm_eval.evaluate(
            lm,
            {"tasks": task.subtasks, "groups": {}, "group_map": {}},
            limit=limit,
            bootstrap_iters=0,
            confirm_run_unsafe_code=task.runs_code,
        )
        items: dict[str, Any] = {}
        asked = hashlib.sha256()
        for name, samples in results["samples"].items():
            for sample in samples:
                asked.update(repr(sample["arguments"]).encode())
                _add(items, f"{name}/{sample['doc_id']}", sample)
        num_cut = _score_references(lm, task, results["samples"], items, references)
        gaps, routing = lm.divergences(), lm.meter.means()
        truncated = sum(lm.wrapped.group.gather_json(lm.truncated))
    return {
        "task": task.name,
        "rule": setting.rule,
        "threshold": setting.threshold,
        "items": items,
        "divergence": gaps,
        "routing": routing,
        "truncated": truncated,
        "notes": [*task.notes, *([f"{num_cut} reference answers are cut to fit the model's context"] if num_cut else [])],
        "checksum": task.checksum,
        "requests": asked.hexdigest()[:16],
    }


def _add(items: dict[str, Any], key: str, sample: dict[str, Any]) -> None:
    """One sample of the harness: a filter's view of one document."""
    item = items.setdefault(key, {"answer": "", "scores": {}})
    filter_name = sample["filter"]
    for name in sample["metrics"]:
        if not isinstance(sample[name], tuple | list):  # of texts, the pairs that perplexities are made from
            item["scores"][name if filter_name in ("none", "create_test") else filter_name] = float(sample[name])
    responses = sample["filtered_resps"]
    if isinstance(sample["target"], int) and len(responses) > 1:  # log-likelihood of each choice
        values = [value for value, _ in responses]
        item["answer"] = str(values.index(max(values)))
        item |= {"loglikelihood": values[sample["target"]], "tokens": 1}
    elif isinstance(responses[0], float):
        item |= {"loglikelihood": responses[0], "words": sample["word_perplexity"][1]}
    else:
        item["answer"] += f"{filter_name}: {responses[0]}\n"


def _score_references(lm: CapLM, task: EvalTask, samples: dict[str, Any], items: dict[str, Any], references: bool) -> int:
    """Log-likelihoods of the reference answers of generating tasks, and tokens of all references; how many were cut."""
    from lm_eval.api.instance import Instance

    requests, num_cut, most = [], 0, lm.max_length * 7 // 8
    for name, views in samples.items():
        subtask, seen = task.subtasks[name], set()
        for sample in views:
            key = f"{name}/{sample['doc_id']}"
            if key in seen:
                continue
            seen.add(key)
            if subtask.OUTPUT_TYPE == "loglikelihood_rolling":
                items[key]["tokens"] = lm.num_tokens(sample["arguments"][0][0])
            elif subtask.OUTPUT_TYPE == "multiple_choice":
                items[key]["tokens"] = 1
            elif references:
                reference = sample["doc"].get("canonical_solution") or f" {sample['target']}"
                tokens = lm.tok_encode(reference, add_special_tokens=False)
                if len(tokens) > most:  # the harness takes no answer that is longer than the context
                    tokens, num_cut = tokens[:most], num_cut + 1
                    reference = lm.tok_decode(tokens)
                items[key]["tokens"] = len(tokens)
                requests.append(
                    Instance("loglikelihood", sample["doc"], (sample["arguments"][0][0], reference), 0, (name, sample["doc_id"], 1))
                )
    for request, (value, _) in zip(requests, lm.loglikelihood(requests) if requests else [], strict=True):
        items[f"{request.task_name}/{request.doc_id}"]["loglikelihood"] = value
    return num_cut
