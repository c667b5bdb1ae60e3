"""Shared fixtures, the environment that tests run in, and a summary that names every skipped tier."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before torch, tokenizers and huggingface_hub are imported. Tests never need the Hub, so that they pass without one.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)

from ranks import RankPool, warm_up  # noqa: E402

from cap_hf.corpora import find_data_dir  # noqa: E402


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real texts; skips where there is none."""
    found = find_data_dir()
    if found is None:
        pytest.skip("real text: no local data folder; set CAP_HF_DATA to one")
    return found


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """``rank_pool(R).run(function, *args)``: R real processes on loopback, kept for the whole session."""
    pools: dict[int, RankPool] = {}
    yield lambda num_ranks: pools.setdefault(num_ranks, RankPool(num_ranks))
    for pool in pools.values():
        pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the fixture that makes them slow, and start the ranks' imports while other tests run."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "rank_pool" in fixtures:
            item.add_marker("ranks")
        if "data_dir" in fixtures:
            item.add_marker("data")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ranks are forked from a process that takes seconds to start: start it behind the tests that need none."""
    if not session.config.option.collectonly and any(item.get_closest_marker("ranks") for item in session.items):
        warm_up()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not tested, or that everything was."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()) if isinstance(report.longrepr, tuple))
    if not reasons:
        terminalreporter.write_line("no tier skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"NOT TESTED, {count} skipped: {reason.removeprefix('Skipped: ')}", yellow=True)
