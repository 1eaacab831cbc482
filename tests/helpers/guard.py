"""Ends what a pytest has started when pytest itself is killed: after `kill -9` no fixture is torn down.

Each pytest process (also a worker of xdist and its controller) starts a small guard, and an environment variable marks what it
starts with the guard's name. The guard waits for the end of pytest. Unless pytest has said that it ends by itself, the guard
kills all marked processes with their descendants, since a process that renames itself overwrites its mark (Ray's agents do).
It spares other guards, of pytest processes and of the package (`workers/cluster/reaper.py`): they have work to do then.

The guard runs this file as a script, with the standard library only, so that it starts fast and stays small.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

VARIABLE = "DISTILL_RL_TEST_PROCESS"
_ENDED = b"ended\n"
_POLL_S, _TIMEOUT_S = 0.05, 10.0
_TRACKER, _TRACKERS_END_WITHIN_S = b"multiprocessing.resource_tracker", 5.0
"""Such a process unlinks the shared memory of those that it tracks when all of them are dead, and then ends."""
_GUARDS = (b"/workers/cluster/reaper.py", b"/tests/helpers/guard.py")


def temporary_prefix(pid: int) -> str:
    """What the names of folders in /tmp begin with that the guard of process `pid` removes."""
    return f"test-{pid}-"


def guard() -> Callable[[], None]:
    """Starts the guard of this process and returns a function that ends it. Folders `/tmp/test-<pid>-*` are removed, too."""
    name = f"{os.getpid()}-{time.time_ns()}"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the whole foreground group
        env={},
    )
    os.environ[VARIABLE] = name

    def end() -> None:
        with suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(_ENDED, timeout=_TIMEOUT_S)

    return end


def main(pid: int, name: str) -> None:
    # A process that pytest has forked may hold the pipe open, so the guard waits for pytest's end as well.
    with suppress(ProcessLookupError):
        died = os.pidfd_open(pid)
        alive = os.getppid() == pid
        ready = select.select([sys.stdin, died], [], [])[0] if alive else []
        if sys.stdin in ready and _ENDED in os.read(sys.stdin.fileno(), 100):
            return
    deadline = time.monotonic() + _TRACKERS_END_WITHIN_S
    family: set[Process] = set()
    while family := _with_descendants(family, name):
        for process in family:
            if time.monotonic() > deadline or _TRACKER not in _command(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    for folder in Path("/tmp").glob(f"{temporary_prefix(pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


class Process(NamedTuple):
    pid: int
    started: bytes
    """Time since boot: another process that gets the same id later has another one."""


def _with_descendants(family: set[Process], name: str) -> set[Process]:
    """Those of the family that still run, all processes with this mark, and the descendants of both."""
    parents = _parents()
    found = {process for process in parents if process in family or _has_mark(process.pid, name)}
    while more := {process for process, parent in parents.items() if parent in {one.pid for one in found}} - found:
        found |= more
    return {process for process in found if not any(guard in _command(process.pid) for guard in _GUARDS)}


def _parents() -> dict[Process, int]:
    """All processes of this machine but zombies, and the ids of their parents."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            # The name, in parentheses, may contain spaces; state and parent follow, the start is number 22 of the line.
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] not in b"ZX":
                parents[Process(int(folder.name), fields[19])] = int(fields[1])
    return parents


def _has_mark(pid: int, name: str) -> bool:
    with suppress(OSError):  # ended meanwhile, or of another user
        return f"{VARIABLE}={name}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
