"""Removes the shared memory that vLLM's processes leave behind.

An engine of several processes keeps files in /dev/shm, most of which it removes when it ends, but not after a SIGKILL; each
run would leave hundreds of MiB. A small process of its own waits for the end of a pipe that only the engine's process holds,
and looks from time to time which files that and its descendants have mapped. If the pipe ends without a word, it removes
them all; if the engine says that it has ended, those that nobody uses any more. It is nobody's descendant, so that what
kills the engine with all its descendants leaves it alone.

The guard runs this file as a script, with the standard library and psutil only, so that it starts fast and stays small.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import psutil

_STARTED, _ENDED = b"started\n", b"ended\n"
_LOOK_EVERY_S, _LOOK_WHILE_STARTING_S = 5.0, 0.2
_TIMEOUT_S = 10.0
_LEAVE_WITHIN_S = 3.0
"""How long the processes of an engine that has ended may still use its files."""
_SHM = Path("/dev/shm")
_NAMES = re.compile(r"psm_|sem\.mp-|vllm_")
"""How names begin: shared memory and semaphores of Python's, and the rings of vLLM's collectives on CPUs."""
_MAPPED = re.compile(r" (\d+) +/dev/shm/", re.MULTILINE)
"""In /proc/PID/maps: the inode of a mapped file. A semaphore is mapped under another name than it has later."""


class SharedMemoryGuard:
    """Guards what this process and its descendants map from now on."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", __file__, str(os.getpid())]
        no_secrets = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        starter = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True, env=no_secrets)
        assert starter.stdin is not None
        assert starter.stdout is not None
        self._pipe, self._answers = starter.stdin, starter.stdout
        starter.wait(_TIMEOUT_S)

    def started(self) -> None:
        """Says that all processes have started, and waits until the guard has looked: fewer looks will do from now on."""
        self._say(_STARTED)
        select.select([self._answers], [], [], _TIMEOUT_S)

    def close(self) -> None:
        """Says that the engine has ended in its own way; does nothing the second time."""
        if not self._pipe.closed:
            self._say(_ENDED)
            for end in (self._pipe, self._answers):
                with suppress(OSError):
                    end.close()

    def _say(self, word: bytes) -> None:
        with suppress(OSError):
            os.write(self._pipe.fileno(), word)


def _files(root: int) -> Iterator[Path]:
    """Yields the files of `_NAMES` that a process and its descendants have mapped."""
    inodes = set[int]()
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        for each in [process, *process.children(recursive=True)]:
            with suppress(OSError):
                inodes.update(map(int, _MAPPED.findall(Path(f"/proc/{each.pid}/maps").read_text("utf-8", "replace"))))
    for entry in os.scandir(_SHM):
        if _NAMES.match(entry.name) and entry.inode() in inodes:
            yield _SHM / entry.name


def _still_used(root: int) -> set[Path]:
    """Waits until a process and its descendants have left their files, or that takes too long; returns those still mapped."""
    deadline = time.monotonic() + _LEAVE_WITHIN_S
    while (used := set(_files(root))) and time.monotonic() < deadline:
        time.sleep(_LOOK_WHILE_STARTING_S)
    return used


def main(pid: str) -> None:
    """Leaves its parent, and waits until the process says that it has ended, or closes the pipe."""
    if os.fork():
        os._exit(0)
    found, interval_s, word = set[Path](), _LOOK_WHILE_STARTING_S, b"?"
    while word and _ENDED not in word:
        if said := bool(select.select([sys.stdin], [], [], interval_s)[0]):
            word = os.read(sys.stdin.fileno(), 100)
            interval_s = _LOOK_EVERY_S
        found.update(_files(int(pid)))
        if said and word:  # it waits for this
            with suppress(OSError):
                os.write(sys.stdout.fileno(), word)
    for file in found - (_still_used(int(pid)) if word else set()):
        with suppress(OSError):
            file.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
