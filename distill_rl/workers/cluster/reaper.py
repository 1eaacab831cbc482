"""Ends the Ray processes of a driver that was killed: after `kill -9` none of its own handlers runs.

A small process of its own waits for the end of a pipe that only the driver holds. If the driver closes the pipe without
a word, it is dead: the reaper kills Ray's processes and removes Ray's directory. A driver that has ended Ray itself
says so first. Ray's processes are those that name the directory in their command line, with all their descendants; so
the reaper can be there before Ray starts.

The reaper runs this file as a script, with the standard library and psutil only, so that it starts fast and stays
small.
"""

from __future__ import annotations

import math
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_TIMEOUT_S = 10.0
_LOOK_EVERY_S, _LOOK_WHILE_STARTING_S = 5.0, 0.2
_STARTED, _ENDED, _LOST = b"started\n", b"ended\n", b"lost\n"
_POLL_S = 0.05
_OF_RAY = re.compile(r"/ray/|\bfork_server\b")
"""In the command lines of Ray's programs, and of what forks for them."""


@contextmanager
def reaper(directory: Path, lost: Callable[[], object] = lambda: False) -> Iterator[Callable[[], None]]:
    """Starts a guard process: if this process dies while the block runs, even by SIGKILL, the guard cleans up after it.

    It kills the Ray processes that use `directory`, with all their descendants, and removes `directory`. When the block
    ends in any other way, it ends without doing anything. Yields a function to call once Ray has started.

    Args:
        lost: whether Ray's daemons have died, so that this process cannot find all of their children: at the end of the
            block the guard kills those.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", __file__, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the whole foreground group
        env={name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},  # no secrets
    )
    assert process.stdin is not None

    def started() -> None:
        with suppress(OSError):
            os.write(process.stdin.fileno(), _STARTED)  # type: ignore[union-attr]

    try:
        yield started
    finally:
        with suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(_LOST if lost() else _ENDED, timeout=_TIMEOUT_S)


def with_descendants(roots: Collection[psutil.Process]) -> set[psutil.Process]:
    """Returns those of `roots` and of all their descendants that run at present (no zombies)."""
    processes = set(roots)
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            processes.update(root.children(recursive=True))
    return {process for process in processes if runs(process)}


def runs(process: psutil.Process) -> bool:
    """Returns whether a process exists and is no zombie.

    Reaping a zombie is up to its parent, which may never do it.
    """
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(processes: Collection[psutil.Process], patience_s: float, *, kill: bool = True) -> set[psutil.Process]:
    """Kills the processes and their descendants until none is left, or, if `kill` is false, only waits for that.

    Every call kills what it finds at least once, however long the looking takes.

    Args:
        patience_s: seconds after the first kill after which to give up; may be infinite.

    Returns:
        Those that still run; empty if all have ended.
    """
    family, deadline = with_descendants(processes), math.inf
    while family and time.monotonic() < deadline:
        for process in family if kill else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        deadline = min(deadline, time.monotonic() + patience_s)
        psutil.wait_procs(family, timeout=_POLL_S)
        family = with_descendants(family)
    return family


def ray_processes(directory: str, among: Iterable[psutil.Process] | None = None) -> set[psutil.Process]:
    """Returns the processes of Ray's that name the directory in their command line; of `among`, or of all.

    Actors do not, because they rename themselves, but their parent does.
    """
    found = set()
    for process in psutil.process_iter() if among is None else among:
        with suppress(psutil.Error):
            words = process.cmdline()
            if any(f"{directory}/" in word for word in words) and any(_OF_RAY.search(word) for word in words):
                found.add(process)
    return found


def main(directory: str) -> None:
    """Waits until the driver closes stdin; unless it said that Ray has ended, kills Ray's processes.

    Ray's directory is then removed too.
    """
    # Look again and again while the driver lives, more often while Ray starts. When the driver dies, one of its processes
    # may end by itself first, and the children of that one are then nobody's descendants.
    family: set[psutil.Process] = set()
    driver = psutil.Process(os.getppid())
    interval_s, word = _LOOK_WHILE_STARTING_S, b"?"
    while word:
        if select.select([sys.stdin], [], [], interval_s)[0]:
            word = os.read(sys.stdin.fileno(), 100)
            if _ENDED in word:
                return
            if _LOST in word:
                break
            interval_s = _LOOK_EVERY_S
        with suppress(psutil.NoSuchProcess):
            family |= ray_processes(directory, driver.children())
        family = with_descendants(family)
    while family := with_descendants(family | ray_processes(directory)):
        end(family, math.inf)
    if not word:  # otherwise the driver, which lives, removes it
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
