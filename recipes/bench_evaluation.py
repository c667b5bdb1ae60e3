"""What an evaluation costs beside lm-evaluation-harness on the plain model, at p = 0, on one rank.

    python recipes/bench_evaluation.py                    # or: make bench-evaluation

All answer the same documents of each task in turns, with the same batches and kernel. Ours counts the routing and writes a
record, which is part of its time; it is measured without and with the scoring of reference answers (GSM8K's solutions,
HumanEval's canonical ones), which the stock harness does not do.

Hardware: 1 CPU core, about 6 minutes. Expect ratios near 1.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from transformers.utils import logging

from cap_hf import CAPMoEModel
from cap_hf.corpora import find_data_dir
from cap_hf.evaluation.run import evaluate, settings_of
from cap_hf.evaluation.tasks import load_task
from cap_hf.models import embedded_model
from cap_hf.parallel.groups import ExpertGroup
from cap_hf.report import markdown_table, provenance

BATCH = 8  # rows per forward


@dataclass
class BenchArguments:
    """Options of the benchmark."""

    model: str = field(default=str(embedded_model()), metadata={"help": "checkpoint folder or Hub name"})
    tasks: str = field(default="mmlu=1,gsm8k=16,humaneval=8,wikitext=6", metadata={"help": "documents of each task, MMLU: per subject"})
    rounds: int = field(default=3, metadata={"help": "evaluations of each, in turns"})
    data_dir: str | None = field(default=None, metadata={"help": "folder of local data"})
    output_dir: str = field(default="build/bench_evaluation", metadata={"help": "where results.json goes"})


def stock(lm: HFLM, name: str, limit: int, data_dir: Path | None, out: Path) -> None:
    """The harness's own evaluation of one task."""
    task = load_task(name, data_dir, out, lm.max_length, ExpertGroup())
    task.reseed()
    arguments = {"tasks": task.subtasks, "groups": {}, "group_map": {}}
    lm_eval.evaluate(lm, arguments, limit=limit, bootstrap_iters=0, confirm_run_unsafe_code=task.runs_code)


def ours(model: CAPMoEModel, tokenizer: Any, name: str, limit: int, data_dir: Path | None, references: bool, out: Path) -> None:
    """The same documents through ``evaluate``."""
    options = {"allow_code": True, "references": references, "progress": False}
    evaluate(model, tokenizer, [name], settings_of(["device"], []), out, {name: limit}, data_dir, BATCH, **options)


def seconds(run: Callable[[Path], object]) -> float:
    """Wall time of ``run`` with a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run(Path(folder))
        return time.perf_counter() - start


def main() -> None:
    (args,) = HfArgumentParser(BenchArguments).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    limits = {name: int(count) for name, count in (each.rsplit("=", 1) for each in args.tasks.split(","))}
    data_dir, tokenizer = find_data_dir(args.data_dir), AutoTokenizer.from_pretrained(args.model)
    plain = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, experts_implementation="grouped_mm")
    harness = HFLM(pretrained=plain, tokenizer=tokenizer, batch_size=BATCH)
    model = CAPMoEModel.from_pretrained(args.model, dtype=torch.float32)
    results = []
    for name, limit in limits.items():
        runs = {
            "stock lm-eval": partial(stock, harness, name, limit, data_dir),
            "ours": partial(ours, model, tokenizer, name, limit, data_dir, False),
            "ours, references too": partial(ours, model, tokenizer, name, limit, data_dir, True),
        }
        took = [{key: seconds(runs[key]) for key in list(runs)[:: 1 if turn % 2 else -1]} for turn in range(args.rounds + 1)][1:]
        results.append({"task": name, "documents": limit, "seconds": took})
        print(f"{name}: {took}", flush=True)
    rows = []
    for each in results:
        row = {"task": f"{each['task']}, {each['documents']}"}
        for key in each["seconds"][0]:
            row[f"{key}, s"] = f"{np.median([turn[key] for turn in each['seconds']]):.2f}"
        for key in ("ours", "ours, references too"):
            row[f"{key} / stock"] = f"{np.median([turn[key] / turn['stock lm-eval'] for turn in each['seconds']]):.3f}"
        rows.append(row)
    print(markdown_table(rows))
    out = Path(args.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps({"results": results, **provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
