"""Tables, CSV, pictures' contents, and the sentences about order, from records whose answers are known."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from cap_hf._files import read_json
from cap_hf.evaluation.tables import checks, csv_text, main_table, panels_of, report_text, rows_of, write_report

ITEMS = 40
FACTS = {"model": "a model", "versions": {"torch": "2"}}


def record(rule: str, threshold: float, nats: float, right: int, task: str = "gsm8k", **changes: Any) -> dict[str, Any]:
    """``right`` of 40 items are right; each loses about ``nats`` per token over 10 tokens; routing shrinks with p."""
    scores = [{"strict-match": float(number < right)} for number in range(ITEMS)]
    if task == "wikitext":
        scores = [{} for _ in range(ITEMS)]
    items = {
        f"{task}/{number}": {
            "answer": f"{score.get('strict-match')}",
            "scores": score,
            "loglikelihood": -10 * (2.0 + nats * (1 + 0.1 * (number % 3))),
            "tokens": 10,
            "words": 5,
        }
        for number, score in enumerate(scores)
    }
    routing = {
        "devices_per_token": 5 - 4 * threshold,
        "rows_per_token": 4 - 4 * threshold,
        "experts_kept": 8 - threshold,
        "score_kept": 1 - threshold,
    }
    divergence = [[10 * nats * (1 + 0.1 * (number % 3)), 10] for number in range(ITEMS)] if threshold else []
    made = {"task": task, "rule": rule, "threshold": threshold, "items": items, "divergence": divergence, "routing": routing}
    return {**made, "truncated": 0, "notes": [], "checksum": "c", "requests": "r", **changes}


def well_behaved() -> list[dict[str, Any]]:
    return [
        record("none", 0.0, 0.0, 30),
        record("expert", 0.2, 0.03, 28),
        record("expert", 0.3, 0.06, 25),
        record("device", 0.2, 0.02, 29),
        record("device", 0.3, 0.05, 26),
    ]


def test_the_main_table_has_a_line_per_setting_and_a_column_per_benchmark() -> None:
    records = [
        each for task in ("gsm8k", "wikitext") for each in [record("none", 0.0, 0.0, 30, task), record("device", 0.3, 0.05, 26, task)]
    ]
    header, _, unpruned, pruned = main_table(rows_of(records)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, unpruned, pruned)]
    assert cells[0][:4] == ["p", "pruning", "gsm8k strict", "wikitext PPL"] and cells[0][-4:] == [
        "devices/token",
        "rows/token",
        "experts kept",
        "score kept",
    ]
    assert cells[1][:4] == ["0", "none", "0.750 ± 0.069", "7.39"]  # 30 of 40; exp(2)
    assert cells[2][:5] == ["0.3", "device", "0.650 ± 0.076", "7.81", "10.0%"]  # 26 of 40; exp(2.0549); 4 turned


def test_all_is_well_where_measures_rise_evenly() -> None:
    assert checks(well_behaved()) == []
    text = report_text(well_behaved(), FACTS)
    assert "Every measure is monotone in p within its error" in text and "- versions: torch 2" in text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (record("device", 0.3, 0.01, 26), "device pruning, p = 0.2 to 0.3: nats per token fall by 0.0110"),
        (record("device", 0.3, 0.05, 38), "device pruning, p = 0.2 to 0.3: strict rises: 9 items turn right, 0 wrong"),
        (record("device", 0.3, 0.09, 26), "p = 0.3: device pruning loses 0.0329 nats per token more than expert pruning"),
        (record("device", 0.3, 0.05, 26, divergence=[[0.1, 10]] * ITEMS), "the divergence from p = 0 falls by 0.0119"),
        (
            record("device", 0.3, 0.05, 26, routing=record("none", 0.1, 0, 0)["routing"]),
            "devices/token rises from 4.200 to 4.600",
        ),
    ],
)
def test_what_goes_the_wrong_way_is_said(changed: dict[str, Any], words: str) -> None:
    found = checks([*well_behaved()[:-1], changed])
    assert any(words in sentence for sentence in found), found
    assert f"- {found[0]}" in report_text([*well_behaved()[:-1], changed], FACTS)


def test_answers_that_return_are_said() -> None:
    """Of 30 answers that differ at 0.2, 20 are again as at p = 0 at 0.3."""
    changed = well_behaved()
    for number, item in enumerate(changed[3]["items"].values()):
        item["answer"] = "other" if number < 30 else item["answer"]
    for (key, item), number in zip(changed[4]["items"].items(), range(ITEMS), strict=True):
        item["answer"] = "other" if number < 10 else changed[0]["items"][key]["answer"]
    assert checks(changed) == ["gsm8k, device pruning, p = 0.2 to 0.3: 20 answers return to those of p = 0, 0 leave them"]


def test_references_that_were_not_scored_leave_no_columns() -> None:
    records = well_behaved()
    for each in records:
        each["divergence"] = []
        for item in each["items"].values():
            del item["loglikelihood"]
    assert "nats/token" not in report_text(records, FACTS) and "gsm8k strict" in main_table(rows_of(records))
    assert checks(records) == []


def test_chance_is_not_reported() -> None:
    luck = record("device", 0.3, 0.05, 31)  # two more right than at 0.2
    assert checks([*well_behaved()[:-1], luck]) == []


def test_what_was_cut_is_noted() -> None:
    records = [{**each, "truncated": 3, "notes": ["generations end early"]} for each in well_behaved()]
    text = report_text(records, FACTS)
    assert "Note: generations end early." in text and "Note: 3 requests are longer than the model's context" in text


def test_files_hold_the_rows_and_pictures_start_at_no_pruning(tmp_path: Path) -> None:
    rows = rows_of(well_behaved())
    lines = list(csv.DictReader(csv_text(rows).splitlines()))
    assert [float(line["strict-match"]) for line in lines] == [0.75, 0.7, 0.625, 0.725, 0.65]
    panels = panels_of(rows)
    assert panels["strict"] == {"expert": [(0.0, 0.75), (0.2, 0.7), (0.3, 0.625)], "device": [(0.0, 0.75), (0.2, 0.725), (0.3, 0.65)]}
    assert {"strict: share of flips", "nats per token of the references", "KL to p = 0, nats", "devices/token"} <= panels.keys()
    assert all(line[0] == (0.0, 0.0) and len(line) == 3 for line in panels["KL to p = 0, nats"].values())
    written = write_report(well_behaved(), FACTS, tmp_path)
    assert [path.name for path in written] == ["accuracy.md", "accuracy.json", "accuracy.csv", "gsm8k.png"]
    assert read_json(tmp_path / "accuracy.json", "eval_report")["rows"] == rows
