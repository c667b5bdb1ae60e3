"""Two hosts of two ranks each as network namespaces, launched by accelerate's multi-node options."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "recipes"))
from hosts import Hosts, reason_against_hosts  # noqa: E402

SCRIPT = str(ROOT / "tests" / "on_hosts.py")


def names_in_use() -> str:
    listed = [subprocess.run(["ip", *what], capture_output=True, text=True).stdout for what in (["netns"], ["-br", "link"])]
    return "\n".join(listed)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    reason = reason_against_hosts()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(2, "200mbit") as two:
        yield two
    assert two._tag not in names_in_use()  # nothing is left behind


@pytest.mark.timeout(240)
def test_two_hosts_equal_plain_transformers_and_nodes_save_bytes(hosts: Hosts) -> None:
    output = hosts.launch(2, [SCRIPT], timeout_s=200)
    result: dict[str, Any] = json.loads(output.split("RESULT ")[1].splitlines()[0])
    assert result["local_ranks"] == 2
    for dispatch in ("flat", "auto"):
        assert result[dispatch]["difference"] <= 1e-5
        assert result[dispatch]["seconds"] >= (result[dispatch]["bytes"] - 2**13) / 25e6  # the link is limited; 8 KB may go at once
    rows = 2 * 128 * 4  # of both ranks and four layers; most of them go to the other host, and as many results come back
    assert rows * 768 < result["auto"]["bytes"] < 1.1 * (2 * rows * (768 + 8 * 6 + 9))
    assert result["auto"]["bytes"] < 0.8 * result["flat"]["bytes"]
    assert hosts.bytes_sent(0) > result["flat"]["bytes"] + result["auto"]["bytes"]


def test_a_failing_host_is_reported_with_its_words(hosts: Hosts) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)of 2 hosts failed.*this rank was asked to fail"):
        hosts.launch(2, [SCRIPT, "3"], timeout_s=200, grace_s=2)
