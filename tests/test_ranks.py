"""The process runner that distributed tests stand on: order, errors, deaths and hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
from ranks import RankPool, RanksFailed, run_ranks

PEERS = 2

pytestmark = pytest.mark.ranks


def rank_and_sum(offset: int) -> tuple[int, int]:
    """This rank's value and the group's sum of all."""
    from deepspeed import comm

    value = 1000 * comm.get_rank() + offset
    total = torch.tensor([value])
    comm.all_reduce(total)
    return value, int(total)


def surroundings() -> dict[str, str | int]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {name: os.environ[name] for name in names} | {"pid": os.getpid(), "threads": torch.get_num_threads()}


def raise_on_last_rank() -> None:
    """The last rank raises; the others wait for it in a collective."""
    from deepspeed import comm

    if comm.get_rank() == PEERS - 1:
        print("about to fail")
        raise KeyError("expert 7 has no owner")
    comm.barrier()


def die_on_first_rank() -> None:
    if os.environ["RANK"] == "0":
        os._exit(3)


def hang_on_first_rank() -> int:
    if os.environ["RANK"] == "0":
        sleep_for_ever()
    return os.getpid()


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def own_pid() -> int:
    return os.getpid()


def a_tensor() -> torch.Tensor:
    return torch.full((2,), float(os.environ["RANK"]))


def unpicklable() -> object:
    return lambda: None


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_results_come_in_rank_order_from_one_group(rank_pool):
    assert rank_pool(PEERS).run(rank_and_sum, 7) == [(7, 1014), (1007, 1014)]


def test_a_pool_keeps_its_processes(rank_pool):
    first = rank_pool(PEERS).run(own_pid)
    assert len({*first, os.getpid()}) == PEERS + 1
    assert rank_pool(PEERS).run(own_pid) == first


def test_run_ranks_starts_and_ends_processes_with_a_launchers_environment():
    facts = run_ranks(surroundings, 3)
    for rank, fact in enumerate(facts):
        assert fact.pop("pid") != os.getpid()
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "threads": 1}
        assert fact == own | {"WORLD_SIZE": "3", "LOCAL_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}


def test_run_ranks_leaves_no_process():
    assert not any(is_running(pid) for pid in run_ranks(own_pid, PEERS))


def test_tensors_outlive_the_ranks_that_made_them():
    assert [tensor.tolist() for tensor in run_ranks(a_tensor, PEERS)] == [[0.0, 0.0], [1.0, 1.0]]


def test_one_ranks_exception_surfaces_with_its_traceback_and_the_pool_recovers(rank_pool):
    pool = rank_pool(PEERS)
    before = pool.run(own_pid)
    with pytest.raises(RanksFailed) as failure:
        pool.run(raise_on_last_rank)
    text = str(failure.value)
    raised, waiting = text.index(f"rank 1 of {PEERS}"), text.index(f"rank 0 of {PEERS}")
    assert waiting < raised < text.index("KeyError: 'expert 7 has no owner'")
    assert "in raise_on_last_rank" in text[raised:]
    assert text.endswith("its output ends with\nabout to fail")
    assert "in barrier" in text[waiting:raised]  # where the peer waited
    assert not any(is_running(pid) for pid in before)
    assert pool.run(rank_and_sum, 1) == [(1, 1002), (1001, 1002)]


def test_a_death_is_reported_with_its_exit_code():
    with pytest.raises(RanksFailed, match=r"failed on 1 of 2 ranks\n--- rank 0 of 2 ---\nthe process died with exit code 3"):
        run_ranks(die_on_first_rank, PEERS)


def test_a_hang_is_killed_at_the_limit_and_says_where_it_hung():
    with RankPool(PEERS) as pool:
        pids = pool.run(own_pid)
        started = time.monotonic()
        with pytest.raises(RanksFailed, match="rank 0 of 2.*\nno result within 0.5 s; killed, see below where\n") as failure:
            pool.run(hang_on_first_rank, timeout_s=0.5)
        assert 0.5 <= time.monotonic() - started < 10
        assert "in sleep_for_ever" in str(failure.value)
        assert "rank 1 of 2" not in str(failure.value)  # it did return
        assert not any(is_running(pid) for pid in pids)


def test_a_result_that_does_not_pickle_is_an_error_not_a_hang():
    with pytest.raises(RanksFailed, match="(?s)failed on 2 of 2 ranks.*(PicklingError|AttributeError|TypeError)"):
        run_ranks(unpicklable, PEERS)


def test_a_pool_needs_a_rank():
    with pytest.raises(ValueError, match="num_ranks is 0; it must be 1 or more"):
        RankPool(0)
