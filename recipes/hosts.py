"""Several "hosts" on one machine, for trying and measuring what crosses the wire between them: network namespaces.

Each host is a network namespace with an interface of its own, the interfaces are joined by a bridge, and each link sends at
a limited rate. A script is launched on every host as on real ones, by accelerate's multi-node options:

    python recipes/hosts.py --num_hosts 2 --ranks_per_host 2 --rate 200mbit recipes/generate.py --layout layout.json

On real machines, the same command runs on every host, without namespaces (NCCL on GPUs, chosen by cap_hf):

    accelerate launch --use_deepspeed --zero_stage 0 --deepspeed_multinode_launcher standard \\
        --num_machines 2 --machine_rank <0 or 1> --num_processes 16 --main_process_ip <host 0> --main_process_port 29500 \\
        recipes/generate.py --model Qwen/Qwen3-30B-A3B --layout layout.json

with NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME on CPUs) set where a host has several interfaces.

Hardware: Linux, root (or CAP_NET_ADMIN), the ``ip`` and ``tc`` tools; no GPU. Starting 4 ranks on 2 cores takes about 20
seconds, the whole example under 1 minute.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Hosts", "reason_against_hosts"]

NETWORK = "10.213.77"  # addresses of the hosts, .1 and up
INTERFACE = "eth0"
GRACE_S = 90.0  # for the other hosts to end, once one has failed


def reason_against_hosts() -> str | None:
    """Why this machine cannot build hosts; None if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} on this machine"
    try:
        with Hosts(1, "200mbit"):
            return None
    except RuntimeError as error:
        return f"network namespaces with a limited link are not allowed here ({error})"


class Hosts:
    """Context manager: ``num_hosts`` namespaces on one bridge; everything is removed at the end, whatever happened inside.

    Args:
        num_hosts: 1 or more.
        rate: of each host's link in both directions, in the words of ``tc`` (200mbit); None does not limit it.
    """

    def __init__(self, num_hosts: int, rate: str | None = None) -> None:
        if num_hosts < 1:
            raise ValueError(f"num_hosts is {num_hosts}; it must be 1 or more")
        if rate is not None and not re.fullmatch(r"[1-9][0-9]*[kmg]bit", rate):
            raise ValueError(f"rate is {rate!r}; write it as tc does: 500kbit, 200mbit, 1gbit")
        self.num_hosts, self.rate = num_hosts, rate
        self._tag = f"cap{os.getpid() % 100_000}"

    def __enter__(self) -> Hosts:
        try:
            _run("ip", "link", "add", f"{self._tag}b", "type", "bridge")
            _run("ip", "link", "set", f"{self._tag}b", "up")
            for host in range(self.num_hosts):
                self._add(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, host: int) -> None:
        name, outside = self.name(host), f"{self._tag}v{host}"
        inside = ("ip", "-n", name)
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _run("ip", "link", "set", outside, "master", f"{self._tag}b", "up")
        _run(*inside, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
        for interface in (INTERFACE, "lo"):
            _run(*inside, "link", "set", interface, "up")
        if self.rate is not None:
            limit = ("root", "tbf", "rate", self.rate, "burst", "8kb", "latency", "400ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *limit)
            _run("tc", "qdisc", "add", "dev", outside, *limit)

    def __exit__(self, *_: object) -> None:
        for host in range(self.num_hosts):
            _try("ip", "netns", "del", self.name(host))
            _try("ip", "link", "del", f"{self._tag}v{host}")
        _try("ip", "link", "del", f"{self._tag}b")

    def name(self, host: int) -> str:
        """Namespace of a host."""
        return f"{self._tag}h{host}"

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"{NETWORK}.{host + 1}"

    def bytes_sent(self, host: int) -> int:
        """Bytes that a host has put on its link since it exists, headers included."""
        table = subprocess.run(
            ["ip", "netns", "exec", self.name(host), "cat", "/proc/net/dev"], capture_output=True, text=True, check=True
        ).stdout
        line = next(line for line in table.splitlines() if line.strip().startswith(f"{INTERFACE}:"))
        return int(line.split(":")[1].split()[8])

    def launch(self, ranks_per_host: int, script: Sequence[str], timeout_s: float = 600.0, grace_s: float = GRACE_S) -> str:
        """Run a Python script on every host by ``accelerate launch``; returns the output of host 0.

        Once a host has failed, the others have ``grace_s`` seconds left to end by themselves.

        Raises:
            RuntimeError: a host failed or took longer than ``timeout_s``; holds the end of its output.
        """
        files = [tempfile.TemporaryFile("w+") for _ in range(self.num_hosts)]  # noqa: SIM115 (closed below)
        processes = [
            subprocess.Popen(
                self._command(host, ranks_per_host, script), env=_environment(), stdout=file, stderr=file, start_new_session=True
            )
            for host, file in enumerate(files)
        ]
        limit = time.monotonic() + timeout_s
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() < limit:
                if any(process.poll() for process in processes):  # the others have their own limit, and no more to do
                    limit = min(limit, time.monotonic() + grace_s)
                time.sleep(0.1)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        outputs = []
        for file in files:
            file.seek(0)
            outputs.append(file.read())
            file.close()
        failed = [host for host, code in enumerate(codes) if code != 0]
        if failed:
            ends = "\n".join(f"--- host {host}, exit code {codes[host]} ---\n{outputs[host][-3000:]}" for host in failed)
            raise RuntimeError(f"{len(failed)} of {self.num_hosts} hosts failed\n{ends}")
        return outputs[0]

    def _command(self, host: int, ranks_per_host: int, script: Sequence[str]) -> list[str]:
        return [
            *("ip", "netns", "exec", self.name(host), sys.executable, "-m", "accelerate.commands.launch"),
            *("--use_deepspeed", "--zero_stage", "0", "--deepspeed_multinode_launcher", "standard"),
            *("--mixed_precision", "no", "--dynamo_backend", "no"),
            *("--num_machines", str(self.num_hosts), "--machine_rank", str(host), "--num_processes", str(self.num_hosts * ranks_per_host)),
            *("--main_process_ip", self.address(0), "--main_process_port", "29507", *script),
        ]


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path}


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def _try(*command: str) -> None:
    subprocess.run(command, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_hosts", type=int, default=2)
    parser.add_argument("--ranks_per_host", type=int, default=2)
    parser.add_argument("--rate", default="200mbit", help="of each host's link, as tc writes it; 'none' for no limit")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a Python script and its arguments")
    args = parser.parse_args()
    reason = reason_against_hosts()
    if reason:
        raise SystemExit(f"hosts cannot be built: {reason}")
    if not args.script:
        raise SystemExit("give a script to run on the hosts, recipes/generate.py for one")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    with Hosts(args.num_hosts, None if args.rate == "none" else args.rate) as hosts:
        print(hosts.launch(args.ranks_per_host, args.script))
        for host in range(args.num_hosts):
            print(f"host {host} ({args.ranks_per_host} ranks) sent {hosts.bytes_sent(host):,} bytes over its link")


if __name__ == "__main__":
    main()
