"""The sandbox of generated code: hostile programs fail, and nothing outside them changes."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from cap_hf.evaluation.sandbox import Limits, Outcome, SandboxError, check_sandbox, run_programs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def run(program: str, **limits: float) -> Outcome:
    (outcome,) = run_programs([program], Limits(**limits))  # type: ignore[arg-type]
    return outcome


def test_programs_that_compute_pass_and_wrong_ones_fail_with_their_error() -> None:
    check_sandbox()
    right, wrong, broken = run_programs(["import math\nassert math.sqrt(4) == 2", "assert 1 == 2, 'no'", "def f(:"])
    assert right == Outcome(True, "passed")
    assert wrong == Outcome(False, "failed AssertionError: no")
    assert not broken.passed and "SyntaxError" in broken.how


@pytest.mark.parametrize("leaving", ["import sys; sys.exit(0)", "raise SystemExit", "import os; os._exit(0)", "exit()"])
def test_leaving_before_the_end_is_no_pass(leaving: str) -> None:
    assert not run(f"{leaving}\nassert False").passed


def test_an_endless_loop_ends_in_time() -> None:
    start = time.monotonic()
    looping, deaf = run_programs(
        ["while True: pass", "while True:\n  try:\n    while True: pass\n  except BaseException: pass"], Limits(seconds=0.5), workers=2
    )
    assert looping == deaf == Outcome(False, "timed out")
    assert time.monotonic() - start < 10


def test_a_memory_hog_is_stopped_at_its_limit() -> None:
    assert "MemoryError" in run("x = bytearray(1 << 30)", memory_mb=256).how
    assert run("x = bytearray(1 << 27)", memory_mb=256).passed
    assert not run("import os\nfd = os.memfd_create('x')\nfor _ in range(4096): os.write(fd, bytes(1 << 20))").passed


@pytest.mark.parametrize(
    "bomb",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['/bin/true'])",
        "import os\nos.execv('/bin/true', ['true'])",
        "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
    ],
)
def test_no_other_process_or_thread_starts(bomb: str) -> None:
    assert not run(bomb).passed


def test_files_are_neither_written_nor_deleted_nor_read(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    for parent in list(tmp_path.parents)[:3]:
        if parent.stat().st_uid == os.getuid() and parent.name.startswith("pytest"):
            os.chmod(parent, 0o755)  # so that not a parent's mode is what protects the file
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.chmod(victim, 0o666)
    attempts = [
        f"import os\nos.remove({str(victim)!r})",
        f"import os\nos.rename({str(victim)!r}, {str(tmp_path / 'away')!r})",
        f"import os\nos.truncate({str(victim)!r}, 0)",
        f"import os\nos.chmod({str(victim)!r}, 0)",
        f"import os\nos.utime({str(victim)!r}, (0, 0))",
        f"import shutil\nshutil.rmtree({str(tmp_path)!r})",
        f"open({str(victim)!r}, 'w')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"open({str(victim)!r}).read()",
        "open('/etc/passwd').read()",
        "import os\nos.mkdir('/tmp/cap_hf_test_made')",
        f"import os\nos.symlink('/etc', {str(tmp_path / 'link')!r})",
    ]
    before = victim.stat()
    outcomes = run_programs(attempts)
    assert [outcome.how for outcome in outcomes if outcome.passed] == []
    after = victim.stat()
    assert victim.read_text() == "precious" and (before.st_mode, before.st_mtime) == (after.st_mode, after.st_mtime)
    assert [path.name for path in tmp_path.iterdir()] == ["victim"] and not Path("/tmp/cap_hf_test_made").exists()


def test_the_environment_and_other_processes_stay_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAP_HF_TEST_SECRET", "xyzzy")
    assert run("import os\nassert not [name for name in os.environ if name != 'LC_CTYPE'], dict(os.environ)").passed
    assert not run("import os\nopen(f'/proc/{os.getppid()}/environ').read()").passed
    assert not run("import os\nopen('/proc/self/environ').read()").passed
    assert not run("import os\nos.listdir('/proc')").passed


def test_no_signal_reaches_another_process() -> None:
    assert "PermissionError" in run(f"import os\nos.kill({os.getpid()}, 0)").how
    assert not run("import os\nos.kill(-1, 9)").passed


def test_no_connection_leaves_it() -> None:
    arrived = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            server.settimeout(2)
            try:
                server.accept()
                arrived.set()
            except OSError:
                pass

        listener = threading.Thread(target=listen)
        listener.start()
        port = server.getsockname()[1]
        assert not run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))").passed
        listener.join()
    assert not arrived.is_set()
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        assert "PermissionError" in run(f"import socket\nsocket.socket(socket.{family}, socket.SOCK_DGRAM)").how


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root has another user to drop to")
def test_root_runs_them_as_nobody_without_a_way_back() -> None:
    assert run("import os\nassert os.getresuid() == (65534,) * 3 and os.getresgid() == (65534,) * 3 and os.getgroups() == []").passed
    assert not run("import os\nos.setuid(0)").passed


def test_nothing_runs_where_the_limits_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(SandboxError, match=r"x86_64 or aarch64 only, not on linux on riscv64"):
        run("pass")


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="seconds is 0"):
        Limits(seconds=0)
