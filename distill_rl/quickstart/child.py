"""Runs the real command line as a child process and forwards signals to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_cli(arguments: Sequence[str]) -> int:
    """Runs `distill-rl` with its output on ours, waits for it and returns its exit code (128 + n if signal n ended it).

    SIGINT, SIGTERM and SIGUSR1 to this process are passed on to the child meanwhile. Call it in the main thread. The
    child has its own process group, so that Ctrl-C reaches it once, through this process: a second SIGINT would end it
    before it has stopped the processes that it started.

    Args:
        arguments: those of the command line, without the program's name.
    """
    command = [sys.executable, "-m", "distill_rl", *arguments]
    child: subprocess.Popen[bytes] | None = None
    before_start: list[int] = []

    def forward(signal_number: int, frame: FrameType | None) -> None:
        if child is None:
            before_start.append(signal_number)
        else:
            child.send_signal(signal_number)

    with _handled_by(forward):
        child = subprocess.Popen(command, env=_environment(), process_group=0)
        for signal_number in before_start:
            child.send_signal(signal_number)
        code = child.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Gives the signals in FORWARDED to `handler` until the block ends, then restores their previous handlers."""
    previous = {signal_number: signal.signal(signal_number, handler) for signal_number in FORWARDED}
    try:
        yield
    finally:
        for signal_number, previous_handler in previous.items():
            signal.signal(signal_number, previous_handler)


def _environment() -> dict[str, str]:
    """The environment of the child: offline, with one thread per process, unless this process's environment says
    otherwise.

    More threads slow down models of this size.
    """
    return {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", **os.environ}
