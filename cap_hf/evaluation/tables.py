"""From records to what people read: tables, pictures, and whether the measures behave as they should.

A *row* is one task under one setting: its name, rule, threshold, everything that ``measures`` gives, and the means of the
routing. All functions here take rows or records and do nothing else.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from cap_hf.evaluation.measures import SURE, Change, measures, paired_change, sign_test
from cap_hf.report import markdown_table

__all__ = ["checks", "csv_text", "main_table", "report_text", "rows_of", "task_table", "write_report"]

Row = Mapping[str, Any]
SCORES = {"acc": "accuracy", "strict-match": "strict", "flexible-extract": "flexible", "pass@1": "pass@1"}
"""What the harness calls a score, and what tables call it."""

ROUTING = {"devices_per_token": "devices/token", "rows_per_token": "rows/token", "experts_kept": "experts kept", "score_kept": "score kept"}


def rows_of(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per record, each compared with its task at p = 0, which must be among them."""
    unpruned = {record["task"]: record for record in records if record["threshold"] == 0}
    return [
        {key: record[key] for key in ("task", "rule", "threshold", "truncated")}
        | measures(record, unpruned[record["task"]])
        | record["routing"]
        for record in records
    ]


def score_names(rows: Sequence[Row]) -> list[str]:
    """The scores (accuracies) of one task, as the harness calls them; none for texts."""
    return [name for name in rows[0] if f"{name}_flips" in rows[0]]


def _by_task(values: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    tasks: dict[str, list[Any]] = {}
    for value in values:
        tasks.setdefault(value["task"], []).append(value)
    return tasks


def _setting(row: Row) -> dict[str, str]:
    return {"p": f"{row['threshold']:.10g}", "pruning": row["rule"] if row["threshold"] else "none"}


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _with_error(value: float | None, error: float | None, form: str) -> str:
    return _number(value, form) + ("" if error is None else f" ± {format(error, form.lstrip('+'))}")


def main_table(rows: Sequence[Row]) -> str:
    """The paper's Table I: a line per setting, a column per benchmark, with what routing and sensitive measures say beside."""
    tasks, lines = _by_task(rows), []
    for index, first in enumerate(next(iter(tasks.values()))):
        line = _setting(first)
        here = [each[index] for each in tasks.values()]
        for row in here:
            for name in score_names([row]):
                title = f"{row['task']} {SCORES.get(name, name)}"
                line[title] = _with_error(row[name], row[f"{name}_stderr"], ".3f")
            if "perplexity" in row:
                line[f"{row['task']} PPL"] = f"{row['perplexity']:.2f}"
        changed, gaps = ([row[name] for row in here if row.get(name) is not None] for name in ("changed", "divergence"))
        line["other answers"] = f"{sum(changed) / len(changed):.1%}" if changed else ""
        line["KL to p = 0"] = f"{sum(gaps) / len(gaps):.4f}" if gaps else ""
        for name, title in ROUTING.items():
            line[title] = f"{sum(row[name] for row in here) / len(here):.3f}"
        lines.append(line)
    return _table(lines)


def _table(lines: Sequence[Mapping[str, str]]) -> str:
    """Without columns that are empty in every line."""
    shown = [name for name in lines[0] if any(line[name] for line in lines)]
    return markdown_table([{name: line[name] for name in shown} for line in lines])


def task_table(rows: Sequence[Row]) -> str:
    """Everything about one task, a line per setting."""
    lines = []
    for row in rows:
        line = _setting(row)
        if "perplexity" in row:
            line |= {"perplexity": f"{row['perplexity']:.3f}", "per word": f"{row['word_perplexity']:.2f}"}
        for name in score_names(rows):
            title = SCORES.get(name, name)
            line[title] = _with_error(row[name], row[f"{name}_stderr"], ".3f")
            line |= {f"{title}: flips": f"{row[f'{name}_flips']:.1%}", f"{title}: p-value": f"{row[f'{name}_p_value']:.2g}"}
        if row.get("changed") is not None:
            line["other answers"] = f"{row['changed']:.1%}"
        if "nats_per_token" in row:
            line["nats/token"] = f"{row['nats_per_token']:.4f}"
            line["change"] = _with_error(row["nats_per_token_change"], row["nats_per_token_change_stderr"], "+.4f")
            line["p-value"] = _number(row["nats_per_token_p_value"], ".2g")
        line["KL to p = 0"] = _number(row["divergence"], ".4f")
        line |= {title: f"{row[name]:.3f}" for name, title in ROUTING.items()}
        lines.append(line)
    return _table(lines)


def csv_text(rows: Sequence[Row]) -> str:
    """A line per row, a column per measure that any row has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def checks(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where a measure does not behave as it should: sentences, none where all is well.

    Down a rule's thresholds nats per token and the divergence must not fall, nor may routing's measures rise by over 1 %; at one
    threshold device pruning must not lose more nats than expert pruning. Where items can be paired, only what a paired
    test at 5 % calls more than chance is reported.
    """
    found = []
    for task, here in _by_task(records).items():
        of_rule = {
            rule: [here[0], *(each for each in here[1:] if each["rule"] == rule)] for rule in dict.fromkeys(e["rule"] for e in here[1:])
        }
        for rule, line in of_rule.items():
            for before, after in pairwise(line):
                span = f"{task}, {rule} pruning, p = {before['threshold']:g} to {after['threshold']:g}"
                found += [f"{span}: {words}" for words in _steps_back(before, after, here[0])]
        for expert, device in zip(of_rule.get("expert", []), of_rule.get("device", []), strict=False):
            loss = _nats(expert, device)
            if loss.change > 0 and loss.is_sure:
                words = f"device pruning loses {loss.change:.4f} nats per token more than expert pruning"
                found.append(f"{task}, p = {device['threshold']:g}: {words}")
    return found


def _steps_back(before: Mapping[str, Any], after: Mapping[str, Any], unpruned: Mapping[str, Any]) -> list[str]:
    """What got better from one threshold to the next higher one."""
    words = []
    nats = _nats(before, after)
    if nats.change < 0 and nats.is_sure:
        words.append(f"nats per token fall by {-nats.change:.4f}")
    for name in next(iter(after["items"].values()))["scores"]:
        pairs = [(before["items"][key]["scores"][name], item["scores"][name]) for key, item in after["items"].items()]
        better, worse = sum(now > then for then, now in pairs), sum(now < then for then, now in pairs)
        if better > worse and sign_test(worse, better) < SURE:
            words.append(f"{SCORES.get(name, name)} rises: {better} items turn right, {worse} wrong")
    answers = [(item["answer"], before["items"][key]["answer"], after["items"][key]["answer"]) for key, item in unpruned["items"].items()]
    back, away = sum(first == now != then for first, then, now in answers), sum(first == then != now for first, then, now in answers)
    if back > away and sign_test(back, away) < SURE:
        words.append(f"{back} answers return to those of p = 0, {away} leave them")
    gaps = before["divergence"], after["divergence"]
    if all(gaps) and len(gaps[0]) == len(gaps[1]):
        more = paired_change([now - then for (then, _), (now, _) in zip(*gaps, strict=True)], [count for _, count in gaps[0]])
        if more.change < 0 and more.is_sure:
            words.append(f"the divergence from p = 0 falls by {-more.change:.4f}")
    for name, title in ROUTING.items():  # generated texts differ, and with them what is routed
        if after["routing"][name] > before["routing"][name] * 1.01:
            words.append(f"{title} rises from {before['routing'][name]:.3f} to {after['routing'][name]:.3f}")
    return words


def _nats(before: Mapping[str, Any], after: Mapping[str, Any]) -> Change:
    """Change of nats per token of the references, paired by item; none where they were not scored."""
    if any("loglikelihood" not in item for item in after["items"].values()):
        return Change(0.0, None, None)
    pairs = [(before["items"][key], item) for key, item in after["items"].items()]
    return paired_change([then["loglikelihood"] - now["loglikelihood"] for then, now in pairs], [now["tokens"] for _, now in pairs])


def report_text(records: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """The whole report in Markdown; ``facts`` is its provenance."""
    rows = rows_of(records)
    parts = [f"# {facts['model']}", main_table(rows)]
    parts.append("Scores ± standard error. Other answers, KL (nats per position) and what routing keeps: means over the tasks.")
    for task, here in _by_task(rows).items():
        parts += [f"## {task}, {here[0]['items']:,} items", task_table(here)]
        record = next(each for each in records if each["task"] == task)
        notes = list(record["notes"])
        if most := max(row["truncated"] for row in here):
            notes.append(f"{most:,} requests are longer than the model's context and lose their beginning")
        parts += [f"Note: {note}." for note in notes]
    parts.append(
        "P-values: for scores the exact sign test on items that turned right or wrong, for nats a paired t-test, each against p = 0."
    )
    found = checks(records)
    parts += ["## Order", "\n".join(f"- {words}" for words in found) if found else _ALL_WELL]
    parts += ["## Provenance", "\n".join(f"- {name}: {_fact(value)}" for name, value in facts.items())]
    return "\n\n".join(parts) + "\n"


_ALL_WELL = (
    "Every measure is monotone in p within its error, and where both rules were measured, device pruning loses no more nats per token"
    " than expert pruning at the same p."
)


def _fact(value: Any) -> str:
    return ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, Mapping) else str(value)


def panels_of(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """What to draw of one task: title of a measure -> rule -> (p, value), p = 0 being the start of each line."""
    titles = {"perplexity": "perplexity", "word_perplexity": "perplexity per word"}
    for name in score_names(rows):
        titles |= {name: SCORES.get(name, name), f"{name}_flips": f"{SCORES.get(name, name)}: share of flips"}
    titles |= {"changed": "share of other answers", "nats_per_token": "nats per token of the references", "divergence": "KL to p = 0, nats"}
    titles |= ROUTING
    rules = list(dict.fromkeys(row["rule"] for row in rows[1:]))
    panels = {}
    for name, title in titles.items():
        points = {
            rule: [(row["threshold"], row[name]) for row in rows if row["rule"] in ("none", rule) and row.get(name) is not None]
            for rule in rules
        }
        start = [(0.0, 0.0)] if name == "divergence" else []  # by definition
        lines = {rule: start + each for rule, each in points.items() if each}
        if lines:
            panels[title] = lines
    return panels


def report_files(out: Path) -> list[Path]:
    """The report in Markdown, JSON and CSV."""
    return [out / f"accuracy.{kind}" for kind in ("md", "json", "csv")]


def write_report(records: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], out: Path) -> list[Path]:
    """``accuracy.md``, ``.json`` and ``.csv`` and, where matplotlib is installed, one picture per task; returns what was written."""
    from cap_hf._files import write_json
    from cap_hf.evaluation.tasks import file_name
    from cap_hf.plots import plot_panels

    rows = rows_of(records)
    written = report_files(out)
    written[0].write_text(report_text(records, facts), encoding="utf-8")
    write_json(written[1], "eval_report", {"rows": rows, "order": checks(records), "provenance": dict(facts)})
    written[2].write_text(csv_text(rows), encoding="utf-8")
    for task, here in _by_task(rows).items():
        if panels := panels_of(here):
            written.append(out / f"{file_name(task)}.png")
            plot_panels(panels, written[-1], "threshold p")
    return written
