"""Ranks that are killed, stuck, failing or out of step: every survivor ends soon, with an error that names rank and layer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RanksFailed, free_port, run_ranks
from test_parallel import layout_named, own_ids

from cap_hf import CAPConfig, CAPMoEModel
from cap_hf.models import EMBEDDED_MODELS, embedded_model
from cap_hf.parallel import experts
from cap_hf.parallel.groups import RankError, init_expert_group

NAME, LIMIT_S = EMBEDDED_MODELS[0], 2.5


def load(timeout_s: float = LIMIT_S) -> CAPMoEModel:
    layout = layout_named("permuted", NAME, init_expert_group().size)
    return CAPMoEModel.from_pretrained(embedded_model(NAME), cap_config=CAPConfig(layout=layout, timeout_s=timeout_s), dtype=torch.float32)


def strike(model: CAPMoEModel, what: str, where: str) -> None:
    """Let this rank die, hang or fail in MoE layer 2: before its exchange, or in the middle of it."""

    def act(*_: Any) -> None:
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "stuck":
            time.sleep(LIMIT_S + 4)
            os._exit(3)
        raise RuntimeError("this rank's own failure")

    if where == "before the exchange":
        model.model.model.layers[2].register_forward_pre_hook(act)
        return
    run = experts._run_local_experts

    def run_or_act(module: Any, work: Any) -> torch.Tensor:
        if module.cap_layer == 2:
            act()
        return run(module, work)

    experts._run_local_experts = run_or_act


def rank_strike(what: str, where: str, loop: str, victim: int) -> Any:
    """What a rank saw: its error and the seconds that it took; the victim of a kill sees nothing."""
    group = init_expert_group()
    model = load()
    ids = own_ids(NAME, group.rank)
    if group.rank == victim:
        strike(model, what, where)
    started = time.monotonic()
    try:
        with torch.no_grad():
            if loop == "generate":
                model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
            else:
                model(input_ids=ids)
    except (RankError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "no error", time.monotonic() - started


def survivors_of(what: str, where: str, loop: str, size: int, victim: int, folder: Path) -> dict[int, tuple[str, float]]:
    """Results of all ranks that end by themselves, from files, for the pool reports the victim's end only."""
    with contextlib.suppress(RanksFailed):
        run_ranks(rank_write_strike, size, what, where, loop, victim, str(folder), timeout_s=20)
    found = {}
    for path in folder.glob("*.txt"):
        message, seconds = path.read_text().rsplit("\n", 1)
        found[int(path.stem)] = message, float(seconds)
    return found


def rank_write_strike(what: str, where: str, loop: str, victim: int, folder: str) -> None:
    message, seconds = rank_strike(what, where, loop, victim)
    Path(folder, f"{init_expert_group().rank}.txt").write_text(f"{message}\n{seconds}")
    if what == "killed":
        time.sleep(1)  # let slower survivors write, too


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("where", "loop"), [("before the exchange", "forward"), ("inside the exchange", "generate")])
def test_a_killed_rank_is_named_at_once(where: str, loop: str, victim: int, tmp_path: Path) -> None:
    found = survivors_of("killed", where, loop, 3, victim, tmp_path)
    assert set(found) == {0, 1, 2} - {victim}
    for message, seconds in found.values():
        assert message.startswith("RankError") and re.search(r"waited in MoE layer 2 \(decoder layer 2\)", message), message
        assert re.search(rf"rank {victim} of 3 (has ended|closed its connection)", message), message
        assert seconds < LIMIT_S + 4


@pytest.mark.parametrize(("where", "loop"), [("before the exchange", "forward"), ("inside the exchange", "generate")])
def test_a_stuck_rank_is_named_at_the_time_limit(where: str, loop: str, tmp_path: Path) -> None:
    found = survivors_of("stuck", where, loop, 3, 1, tmp_path)
    assert set(found) == {0, 2}
    for message, seconds in found.values():
        assert "waited in MoE layer 2 (decoder layer 2)" in message
        assert f"rank 1 of 3 gave no sign of life for {LIMIT_S:g} s" in message and "raise timeout_s" in message
        assert LIMIT_S - 0.5 < seconds < LIMIT_S + 4


@pytest.mark.parametrize(("where", "loop"), [("before the exchange", "forward"), ("inside the exchange", "generate")])
def test_a_failing_rank_ends_the_others_with_its_own_words(where: str, loop: str, tmp_path: Path) -> None:
    found = survivors_of("failing", where, loop, 3, 1, tmp_path)
    assert set(found) == {0, 1, 2}
    assert found[1][0] == "RuntimeError: this rank's own failure"
    for rank in (0, 2):
        message, seconds = found[rank]
        assert message.startswith("RankError") and "waited in MoE layer 2" in message
        assert "rank 1 of 3 failed with RuntimeError in MoE layer" in message and "this rank's own failure" in message
        assert seconds < LIMIT_S


def rank_different_forwards() -> list[str]:
    """Without ``joined``, rank 0 runs one forward more; afterwards the group refuses to go on."""
    group = init_expert_group()
    model, ids, messages = load(), own_ids(NAME, group.rank), []
    with torch.no_grad():
        model(input_ids=ids)
        if group.rank > 0:
            return []
        for _ in range(2):
            try:
                model(input_ids=ids)
            except RankError as error:
                messages.append(str(error))
    return messages


def test_ranks_that_run_other_forwards_are_named(tmp_path: Path) -> None:
    first, second = run_ranks(rank_different_forwards, 2, timeout_s=30)
    assert second == []
    assert "waited in the vote before a forward" in first[0] and "rank 1 of 2" in first[0] and "runs other forwards" in first[0]
    assert first[1].startswith("the ranks are out of step since an earlier failure")


def rank_fails_everywhere_and_goes_on() -> list[str]:
    """The same failure on every rank leaves them in step."""
    group = init_expert_group()
    model, ids, results = load(), own_ids(NAME, group.rank), []

    def fail(*_: Any) -> None:
        raise RuntimeError("everywhere")

    for step in range(3):
        handle = model.model.model.layers[1].register_forward_pre_hook(fail) if step == 1 else None
        try:
            with torch.no_grad():
                results.append(str(tuple(model(input_ids=ids).logits.shape[:2]) == tuple(ids.shape)))
        except RuntimeError as error:
            results.append(str(error))
        if handle is not None:
            handle.remove()
    return results


def test_a_failure_of_all_ranks_alike_is_no_loss_of_step(rank_pool: Any) -> None:
    assert rank_pool(2).run(rank_fails_everywhere_and_goes_on) == [["True", "everywhere", "True"]] * 2


def rank_other_options() -> str:
    rank = init_expert_group().rank
    try:
        CAPMoEModel.from_pretrained(embedded_model(NAME), cap_config=CAPConfig(timeout_s=30.0 + rank), dtype=torch.float32)
    except ValueError as error:
        return str(error)
    return "no error"


def test_options_that_differ_between_ranks_are_refused(rank_pool: Any) -> None:
    for message in rank_pool(2).run(rank_other_options):
        assert message.startswith(
            "dispatch, wire_dtype or timeout_s differs between ranks (rank 0: auto, None, 30 s, rank 1: auto, None, 31 s)"
        )


SCRIPT = """
import os, sys, time, torch
from cap_hf import CAPConfig, CAPMoEModel
from cap_hf.models import embedded_model
model = CAPMoEModel.from_pretrained(embedded_model("tiny_qwen3_moe"), cap_config=CAPConfig(timeout_s=3), dtype=torch.float32)
ids = torch.arange(8)[None]
with torch.no_grad():
    model(input_ids=ids)
    if sys.argv[1] == "stuck" and model.group.rank == 1:
        time.sleep(9)
        os._exit(0)
    model(input_ids=ids)
print("left the loop", flush=True)
"""


def launch(case: str) -> list[tuple[int, float, str]]:
    """Exit code, seconds and output of two separately started processes, without a launcher that would end one with the other."""
    port, processes = str(free_port()), []
    for rank in range(2):
        environment = os.environ | dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        environment |= dict(
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
            DS_ACCELERATOR="cpu",
            PYTHONPATH=str(Path(__file__).parents[1]),
        )
        command = [sys.executable, "-c", SCRIPT, case]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    started, ends = time.monotonic(), []
    for process in processes:
        output = process.communicate(timeout=120)[0]
        ends.append((process.returncode, time.monotonic() - started, output))
    return ends


def test_processes_end_by_themselves() -> None:
    for code, _, output in launch("fine"):
        assert code == 0 and "left the loop" in output, output


def test_a_process_whose_peer_is_stuck_ends_with_the_error() -> None:
    (code, _, output), _ = launch("stuck")
    assert code != 0 and "left the loop" not in output
    assert "RankError" in output and "rank 1 of 2" in output, output
