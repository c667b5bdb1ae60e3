"""Runs one program under the limits of ``sandbox.py``; a script of its own, started with ``python -I -S``, for Linux.

Reads ``{"program", "token", "seconds", "memory_mb", "readable", "uid"}`` as JSON from standard input and writes the token
and how the program ended to the descriptor that its argument names. Imports nothing outside the standard library.
"""

import ctypes
import errno
import json
import os
import platform
import re
import resource
import struct
import sys

# System calls that a program which computes never needs, with the kernel's numbers on x86_64 and on aarch64.
DENIED = """
# connections
socket 41 198, socketpair 53 199, io_uring_setup 425 425,
# processes and threads
fork 57 -, vfork 58 -, clone 56 220, clone3 435 435, execve 59 221, execveat 322 281,
# signals and limits of others
kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_open 434 434,
pidfd_send_signal 424 424, prlimit64 302 261, setpriority 141 140, ioprio_set 251 30, sched_setaffinity 203 122,
sched_setparam 142 118, sched_setscheduler 144 119, sched_setattr 314 274,
# memory of others
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, pidfd_getfd 438 438, process_madvise 440 440,
perf_event_open 298 241,
# memory that is not counted
memfd_create 319 279, memfd_secret 447 447, shmget 29 194, semget 64 190, msgget 68 186, mq_open 240 180,
userfaultfd 323 282,
# properties of files
chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
truncate 76 45, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6,
fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, setxattrat 463 463, removexattrat 466 466,
# the kernel
open_by_handle_at 304 265, bpf 321 280, keyctl 250 219, add_key 248 217, request_key 249 218, mount 165 40, umount2 166 39, unshare 272 97,
setns 308 268, chroot 161 51, pivot_root 155 41,
"""
ARCHITECTURES = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}  # of the audit headers, and the column above

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """The result of a C call, or its error."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def denied_numbers(machine: str) -> dict[str, int]:
    """Name -> number of every denied system call that this machine has."""
    entries = re.findall(r"(\w+) (\d+|-) (\d+|-)", DENIED)
    column = ARCHITECTURES[machine][1]
    return {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}


def deny_system_calls() -> None:
    """A seccomp filter: what is in ``DENIED`` fails with "permission denied" (clone3 with "not implemented")."""
    machine = platform.machine()
    arch, _ = ARCHITECTURES[machine]
    load, equal, above, give = 0x20, 0x15, 0x35, 0x06
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x00050000
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    if machine == "x86_64":
        code += [(above, 0, 1, 0x40000000), (give, 0, 0, kill)]  # its second, 32-bit set of numbers
    for name, number in denied_numbers(machine).items():
        error = errno.ENOSYS if name == "clone3" else errno.EACCES
        code += [(equal, 0, 1, number), (give, 0, 0, refuse | error)]
    code.append((give, 0, 0, allow))
    program = b"".join(struct.pack("HBBI", *each) for each in code)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer)))
    checked(libc.prctl(22, 2, header, 0, 0), "seccomp")  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def allow_reading_only(readable: list[str]) -> None:
    """A Landlock rule set: files below ``readable`` can be read, nothing else opened."""
    create, add, restrict = 444, 445, 446
    version = checked(libc.syscall(create, None, ctypes.c_size_t(0), ctypes.c_uint32(1)), "landlock")
    rights = (1 << {1: 13, 2: 14}.get(version, 15 if version < 5 else 16)) - 1  # of files and folders, all that this version knows
    rules = ctypes.create_string_buffer(struct.pack("Q", rights), 8)
    handle = checked(libc.syscall(create, rules, ctypes.c_size_t(8), ctypes.c_uint32(0)), "landlock")
    for path in readable:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", 1 << 2 | 1 << 3, folder))  # read files, list folders
        checked(libc.syscall(add, handle, 1, rule, ctypes.c_uint32(0)), f"landlock for {path}")
        os.close(folder)
    checked(libc.syscall(restrict, handle, ctypes.c_uint32(0)), "landlock")
    os.close(handle)


def become(uid: int) -> None:
    """Give up root for good, but for reading: under Landlock that reaches Python's own library only, wherever it is."""
    checked(libc.prctl(8, 1, 0, 0, 0), "capabilities")  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kept = 1 << 2  # CAP_DAC_READ_SEARCH
    header, sets = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0)
    checked(libc.capset(header, sets), "capabilities")


def main() -> None:
    task = json.loads(sys.stdin.buffer.read())
    result, token = int(sys.argv[1]), task["token"]

    def end(how: str) -> None:
        os.write(result, f"{token} {how[:300]}".encode(errors="replace"))
        os._exit(0)

    try:
        checked(libc.prctl(38, 1, 0, 0, 0), "no new privileges")  # PR_SET_NO_NEW_PRIVS
        allow_reading_only(task["readable"])
        if task["uid"] is not None:
            become(task["uid"])
        checked(libc.prctl(1, 9, 0, 0, 0), "death with the parent")  # PR_SET_PDEATHSIG, SIGKILL
        for limit, value in (
            (resource.RLIMIT_CPU, int(task["seconds"]) + 1),
            (resource.RLIMIT_AS, task["memory_mb"] << 20),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NPROC, 0),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, 64),
        ):
            resource.setrlimit(limit, (value, value))
        deny_system_calls()
    except (OSError, KeyError, ValueError) as error:
        end(f"unavailable {type(error).__name__}: {error}")
    how = "passed"
    try:
        exec(compile(task["program"], "<program>", "exec"), {"__name__": "__main__"})
    except BaseException as error:  # SystemExit, too, ends a program before its checks
        how = f"failed {type(error).__name__}: {error}"
    end(how)


if __name__ == "__main__":
    main()
