"""From answers to measures: accuracy and what is more sensitive, each against p = 0. Pure functions.

A record holds what one task gave at one setting:
``{"items": {id: {"answer", "scores": {name: value}, "loglikelihood", "tokens", "words"}}, "divergence": [[nats, positions]], ...}``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["SURE", "Change", "measures", "paired_change", "sign_test"]

Record = Mapping[str, Any]
SURE = 0.05
"""A p-value below it is more than chance."""


class Change(NamedTuple):
    """A change per token over paired items, and whether it is real."""

    change: float
    change_stderr: float | None
    """None for a single item."""
    p_value: float | None
    """Two-sided, of Student's t; 1 where nothing changed at all."""

    @property
    def is_sure(self) -> bool:
        """More than chance; a single item is taken as it is."""
        return self.p_value is None or self.p_value < SURE


def measures(record: Record, unpruned: Record) -> dict[str, float | None]:
    """Everything that a table shows of one record; None where a measure has no meaning.

    Returns:
        For each score (accuracy) ``name``: ``name`` and ``name_stderr``, ``name_flips`` (share of items that turned right or
        wrong) and ``name_p_value`` of the exact sign test on them. ``changed``: share of other answers. ``nats_per_token``
        of the reference answers or the text, its ``_change``, ``_change_stderr`` and ``_p_value`` (paired t-test over items,
        each weighted by its tokens), where references were scored; ``perplexity``; ``word_perplexity`` of texts;
        ``divergence``: mean KL to p = 0 in nats per position.

    Raises:
        ValueError: the records are of different items or prompts.
    """
    items, base = record["items"], unpruned["items"]
    if record.get("requests") != unpruned.get("requests"):
        raise ValueError("the records answer other prompts (requests differ); evaluate both in one run")
    if list(items) != list(base):
        raise ValueError(f"{len(items)} items cannot be compared with {len(base)} others; evaluate both with the same limit and data")
    result: dict[str, float | None] = {"items": len(items)}
    first = next(iter(items.values()))
    for name in first["scores"]:
        now, before = (np.array([item["scores"][name] for item in each.values()], dtype=float) for each in (items, base))
        result[name] = float(now.mean())
        result[f"{name}_stderr"] = float(now.std(ddof=1) / math.sqrt(len(now))) if len(now) > 1 else None
        result[f"{name}_flips"] = float((now != before).mean())
        result[f"{name}_p_value"] = sign_test(int((now < before).sum()), int((now > before).sum()))
    if first["scores"]:
        result["changed"] = float(np.mean([items[key]["answer"] != base[key]["answer"] for key in items]))
    gaps = record.get("divergence") or []
    result["divergence"] = float(sum(gap for gap, _ in gaps) / max(sum(count for _, count in gaps), 1)) if gaps else None
    if "loglikelihood" not in first:
        return result
    tokens = np.array([item["tokens"] for item in items.values()], dtype=float)
    now, before = (-np.array([item["loglikelihood"] for item in each.values()]) for each in (items, base))
    result["nats_per_token"] = float(now.sum() / tokens.sum())
    result |= {f"nats_per_token_{key}": value for key, value in paired_change(now - before, tokens)._asdict().items()}
    if not first["scores"]:
        result["perplexity"] = math.exp(min(now.sum() / tokens.sum(), 700.0))
        result["word_perplexity"] = math.exp(min(now.sum() / sum(item["words"] for item in items.values()), 700.0))
    return result


def sign_test(worse: int, better: int) -> float:
    """Two-sided exact p-value of ``worse`` against ``better`` items under equal chances (McNemar's exact test)."""
    from scipy.stats import binomtest

    return float(binomtest(worse, worse + better).pvalue) if worse + better else 1.0


def paired_change(difference: Sequence[float] | np.ndarray, tokens: Sequence[float] | np.ndarray) -> Change:
    """Change per token and whether it is real, from each item's change and tokens: ratio of sums, its error by linearisation.

    ``change`` = sum(difference) / sum(tokens).
    """
    from scipy.stats import t

    difference, tokens = np.asarray(difference, dtype=float), np.asarray(tokens, dtype=float)
    count, change = len(difference), float(difference.sum() / tokens.sum())
    if count < 2:
        return Change(change, None, None)
    residual = difference - change * tokens
    stderr = float(np.sqrt(residual @ residual * count / (count - 1)) / tokens.sum())
    if stderr == 0:
        return Change(change, 0.0, 1.0 if change == 0 else 0.0)
    return Change(change, stderr, float(2 * t.sf(abs(change) / stderr, count - 1)))
