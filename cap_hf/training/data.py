"""Text datasets into rows of token ids of one length.

Letters: ``S`` tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

__all__ = ["first_requests", "packed"]


def packed(dataset: Any, tokenizer: Any, length: int, text_column: str, what: str) -> Any:
    """A dataset of ``input_ids`` and ``labels``, (S,) each: texts joined by end-of-text tokens and cut; streamed ones stay so.

    A dataset that has ``input_ids`` is returned as it is. What is left of each thousand texts at the end is dropped.

    Args:
        length: ``S``.
        what: what the dataset is for, for error messages.

    Raises:
        ValueError: neither ``text_column`` nor ``input_ids`` in it, or no tokenizer for a text.
    """
    columns = _columns(dataset, what)
    if "input_ids" in columns:
        return dataset
    if text_column not in columns:
        raise ValueError(f"the {what} dataset has no column {text_column!r} (it has {', '.join(columns)}); name another with text_column")
    if tokenizer is None:
        raise ValueError(f"the {what} dataset holds text; give its tokenizer as processing_class")
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

    def cut(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = list(chain.from_iterable([*row, *end] for row in tokenizer(batch[text_column])["input_ids"]))
        rows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        return {"input_ids": rows, "labels": [list(row) for row in rows]}

    return dataset.map(cut, batched=True, remove_columns=columns)


def _columns(dataset: Any, what: str) -> list[str]:
    names = getattr(dataset, "column_names", None)
    if names is None:  # a stream that does not know: look at its first row
        names = list(next(iter(dataset), {}))
    if not names or isinstance(names, dict):
        raise ValueError(f"the {what} dataset is empty, or several splits in one; give one split that holds rows")
    return list(names)


def first_requests(dataset: Any, tokenizer: Any, num_tokens: int, longest: int, text_column: str, what: str) -> list[list[int]]:
    """Token ids of as many of the first rows as hold ``num_tokens``, each cut at ``longest``.

    Raises:
        ValueError: as ``packed``, and for a dataset without any token.
    """
    columns, left = _columns(dataset, what), num_tokens
    if "input_ids" not in columns:
        packed(dataset.select(range(0)) if hasattr(dataset, "select") else dataset, tokenizer, longest, text_column, what)  # its checks
    requests: list[list[int]] = []
    for row in dataset:
        ids = list(row["input_ids"]) if "input_ids" in columns else tokenizer(row[text_column])["input_ids"]
        requests += [ids[: min(longest, left)]] if len(ids) else []
        left -= len(requests[-1]) if len(ids) else 0
        if left <= 0:
            break
    if not requests:
        raise ValueError(f"the {what} dataset yields no tokens; give texts that are not empty")
    return requests


def first_rows(dataset: Any, count: int) -> list[list[int]]:
    """``input_ids`` of the first ``count`` rows."""
    rows: Iterable[Any] = islice(iter(dataset), count)
    return [list(row["input_ids"]) for row in rows]
