"""The tasks: stock tasks of lm-evaluation-harness, with local data where there is some.

The YAML files in ``tasks/`` include the stock ones; they are written out with their paths filled in, so that
``lm_eval --tasks <file>`` runs just the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from cap_hf.evaluation.data import LocalData, prepare
from cap_hf.parallel.groups import ExpertGroup, init_expert_group

__all__ = ["TASKS", "EvalTask", "check_data", "check_tasks", "file_name", "load_task"]

FEWSHOT_SEED = 1234  # lm-evaluation-harness's own default
TEMPLATES = Path(__file__).with_name("tasks")
TASKS = ("mmlu", "gsm8k", "humaneval", "wikitext", "text:<corpus or file>")


@dataclass(frozen=True)
class EvalTask:
    """One task as the user names it; MMLU is one of 57 subtasks."""

    name: str
    subtasks: dict[str, Any]
    """Name -> lm-evaluation-harness task."""
    checksum: str
    """Of the data that is read, or "from the Hub"."""
    runs_code: bool
    notes: tuple[str, ...] = ()
    """Where this run departs from the stock task."""

    def reseed(self) -> None:
        """Draw the same few-shot examples as the stock harness does, once more: each evaluation goes on from the last one's draws."""
        for task in self.subtasks.values():
            task.set_fewshot_seed(FEWSHOT_SEED)


def check_tasks(names: Sequence[str], allow_code: bool) -> None:
    """Refuse what cannot be run, before anything is loaded.

    Raises:
        ValueError: an unknown or repeated task, or HumanEval without leave to run generated code.
    """
    if not names:
        raise ValueError(f"no task is named; choose from {', '.join(TASKS)}")
    for name in names:
        if not name.startswith("text:") and name not in TASKS:
            raise ValueError(f"unknown task {name!r}; choose from {', '.join(TASKS)}")
        if list(names).count(name) > 1:
            raise ValueError(f"task {name!r} is named {list(names).count(name)} times; once is enough")
    if "humaneval" in names and not allow_code:
        raise ValueError(
            "humaneval runs code that the model wrote, in a sandbox; add --run-generated-code to allow it, or leave the task out"
        )


def check_data(names: Sequence[str], data_dir: Path | None, out: Path) -> None:
    """Read and check the local data of tasks, on every rank alike, before anything expensive; arguments and errors as in ``load_task``."""
    for name in names:
        init_expert_group().from_first(partial(_write_files, name, data_dir, out))


def load_task(name: str, data_dir: Path | None, out: Path, max_length: int, group: ExpertGroup) -> EvalTask:
    """A task with its data read and checked.

    Args:
        name: one of ``TASKS``.
        data_dir: folder of local data, or None for the Hub (HumanEval's problems are in a package).
        out: folder for the task files and the data they read.
        group: the ranks, each of which must call; the first writes the files.
        max_length: tokens the model's context holds; longer generations are cut to half of it, which is noted.

    Raises:
        ValueError: data that is missing or malformed; names file and row.
    """
    made = group.from_first(lambda: _write_files(name, data_dir, out))
    with group.all_or_none():
        subtasks = _built([Path(path) for path in made["files"]])
    notes = tuple(note for task in subtasks.values() if (note := _shorten(task, max_length)))
    return EvalTask(name, subtasks, made["checksum"], name == "humaneval", notes[:1])


def file_name(task: str) -> str:
    """A name for files of a task: the task's own where that is plain, else one with a checksum, so that no two are alike."""
    safe = "".join(letter if letter.isascii() and letter.isalnum() or letter in "._-" else "_" for letter in task)
    return safe if safe == task else f"{safe[-60:]}-{hashlib.sha256(task.encode()).hexdigest()[:8]}"


def _write_files(name: str, data_dir: Path | None, out: Path) -> dict[str, Any]:
    """Task files of one task, and the data that they read."""
    kind, _, source = name.partition(":")
    safe = file_name(name)
    data = prepare(kind, source, data_dir, out / "data" / safe)
    template = (TEMPLATES / f"{kind}.yaml").read_text().replace("{stock}", str(_stock()))
    files = []
    for subject in _subjects(data) if kind == "mmlu" else [""]:
        task_name = f"mmlu_{subject}" if subject else safe
        text = template.replace("{subject}", subject) + f"task: {task_name}\n"
        if data is not None:
            config = subject or next(path.name for path in data.path.iterdir() if path.is_dir())
            text += f"dataset_path: {json.dumps(str(data.path.resolve()))}\ndataset_name: {config}\n"
        files.append(out / "tasks" / f"{task_name}.yaml")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        files[-1].write_text(text)
    return {"files": [str(path) for path in files], "checksum": data.checksum if data else "from the Hub"}


def _stock() -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


def _subjects(data: LocalData | None) -> list[str]:
    stock = sorted(path.stem.removeprefix("mmlu_") for path in (_stock() / "mmlu" / "default").glob("mmlu_*.yaml"))
    if data is None:
        return stock
    held = sorted(path.name for path in data.path.iterdir() if path.is_dir())
    if unknown := sorted(set(held) - set(stock)):
        raise ValueError(f"mmlu: {', '.join(unknown)} is no subject of MMLU; rename the file or take it away")
    return held


def _built(files: Sequence[Path]) -> dict[str, Any]:
    """The tasks of some YAML files. The stock HumanEval asks for a metric by name, as which it gets the one in a sandbox."""
    import datasets
    import evaluate
    from lm_eval.tasks import TaskManager

    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        return code_metric() if name == "code_eval" else stock_load(name, *args, **kwargs)

    def code_metric() -> Any:
        return stock_load(str(Path(__file__).with_name("code_eval.py")))

    stock_load = evaluate.load
    shown = datasets.utils.is_progress_bar_enabled()
    datasets.utils.disable_progress_bar()
    try:
        with mock.patch.object(evaluate, "load", load):
            return TaskManager(include_defaults=False).load([str(path) for path in files])["tasks"]
    except (datasets.exceptions.DatasetsError, OSError) as error:
        raise ValueError(f"the data of {files[0].stem} cannot be read ({error}); give --data-dir with local copies") from error
    finally:
        if shown:
            datasets.utils.enable_progress_bar()


def _shorten(task: Any, max_length: int) -> str | None:
    """Let generations fit a short context; says so."""
    options, most = task.config.generation_kwargs, max_length // 2
    if task.OUTPUT_TYPE != "generate_until" or options.get("max_gen_toks", 0) <= most:
        return None
    note = f"generations end after {most} tokens, half the model's context of {max_length}; the stock task allows {options['max_gen_toks']}"
    options["max_gen_toks"] = most
    return note
