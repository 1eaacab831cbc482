"""Ends the Ray processes of a driver that was killed: after `kill -9` none of its own handlers runs.

A small process of its own waits for the end of a pipe that only the driver holds. If the driver closes the pipe without a
word, it is dead: all descendants of Ray's root processes are killed and Ray's directory is removed. A driver that has
ended Ray itself says so first.

Runs as `python -I -S reaper.py DIRECTORY PID:START_TIME...`, with the standard library only, so that it starts at once and
stays small.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TIMEOUT_S = 10.0


@contextmanager
def reaper(directory: Path, roots: Iterable[int]) -> Iterator[None]:
    """While the block runs, the death of this process ends these processes with all their descendants, and removes the
    directory."""
    known = [f"{pid}:{started}" for pid in roots if (started := _start_time(pid))]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(directory), *known],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the whole foreground group
    )
    try:
        yield
    finally:
        with suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(b"ended", timeout=_TIMEOUT_S)


def main(directory: str, *roots: str) -> None:
    if sys.stdin.buffer.read():
        return
    pids = [int(pid) for pid, _, started in (root.partition(":") for root in roots) if _start_time(int(pid)) == started]
    while family := _descendants(pids):  # until a look finds no new child
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pids = [pid for pid in family if _runs(pid)]
    shutil.rmtree(directory, ignore_errors=True)


def _descendants(roots: Iterable[int]) -> list[int]:
    """The processes that run among these and their descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found, open_ = [], list(roots)
    while open_:
        pid = open_.pop()
        found.append(pid)
        open_ += children.get(pid, [])
    return [pid for pid in found if _runs(pid)]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _start_time(pid: int) -> str:
    """Distinguishes a process from a later one with the same pid; empty if there is none."""
    stat = _stat(pid)
    return stat[19] if stat else ""


def _runs(pid: int) -> bool:
    stat = _stat(pid)
    return bool(stat) and stat[0] != "Z"


if __name__ == "__main__":
    main(*sys.argv[1:])
