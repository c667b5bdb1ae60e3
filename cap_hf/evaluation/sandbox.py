"""Runs programs that nobody has read: model-written HumanEval solutions with their tests.

Each runs in a process of its own that can compute and read the standard library, and nothing else:

- time: killed after ``Limits.seconds``, or when this process ends;
- memory: ``Limits.memory_mb`` of address space;
- files: none can be written, and none read outside the standard library and the system's shared libraries (Landlock);
- network, other processes, threads, signals, file modes: the system calls fail (seccomp);
- user: nobody, where this process is root; the environment is empty, the output goes nowhere.

A program passes if it runs to its end; leaving early, with exit code 0 too, fails it. Linux on x86_64 and aarch64.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Limits", "Outcome", "SandboxError", "check_sandbox", "run_programs"]

NOBODY = 65534
CHILD = Path(__file__).with_name("_sandbox_child.py")
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")


class SandboxError(RuntimeError):
    """This machine cannot keep the promises above; says which, and what to do."""


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Raises:
        ValueError: a limit that is not positive.
    """

    seconds: float = 3.0
    """Wall-clock time."""

    memory_mb: int = 1024
    """Address space, the interpreter's own of about 20 MB included."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} is {value!r}; it must be positive")


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    passed: bool
    how: str
    """"passed", "timed out", "failed <error>", or "died" where it left without an error of its own."""


def run_programs(programs: Sequence[str], limits: Limits | None = None, workers: int | None = None) -> list[Outcome]:
    """Every program, ``workers`` (default: one per core) at a time.

    Raises:
        SandboxError: the limits cannot be put in force on this machine; nothing has run then.
    """
    limits = limits or Limits()
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        return list(pool.map(lambda program: _run(program, limits), programs))


def check_sandbox() -> None:
    """Run one harmless program.

    Raises:
        SandboxError: the limits cannot be put in force, or the standard library cannot be read under them.
    """
    outcome = _run("import hashlib, math, random, re, typing\nassert math.isqrt(16) == 4", Limits(seconds=30.0))
    if not outcome.passed:
        raise SandboxError(f"a harmless program {outcome.how} in the sandbox; is Python's library ({os.__file__}) readable for everyone?")


def _run(program: str, limits: Limits) -> Outcome:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise SandboxError(f"generated code runs on Linux on x86_64 or aarch64 only, not on {sys.platform} on {platform.machine()}")
    token = secrets.token_hex(16)  # so that nothing written by accident counts as a result
    task = {
        "program": program,
        "token": token,
        "seconds": limits.seconds,
        "memory_mb": limits.memory_mb,
        "readable": _readable(),
        "uid": NOBODY if os.getuid() == 0 else None,
    }
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as result:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(CHILD), str(write_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                pass_fds=[write_end],
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        try:
            process.communicate(json.dumps(task).encode(), timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, "timed out")
        finally:
            process.kill()
            process.communicate()
        said = result.read(1000).decode(errors="replace")
    if not said.startswith(f"{token} "):
        return Outcome(False, f"died with exit status {process.returncode}")
    how = said[len(token) + 1 :]
    if how.startswith("unavailable"):
        raise SandboxError(f"the sandbox is {how}; run on Linux 5.13 or later with Landlock and seccomp, or leave HumanEval out")
    return Outcome(how == "passed", how)


def _readable() -> list[str]:
    """Folders that hold the standard library and what it links to."""
    paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("LIBDIR"), *LIBRARIES}
    return sorted(path for path in paths if path and os.path.isdir(path))
