"""Runs the real command line as a child, and lets signals through to it."""

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
    """`distill-rl` with these arguments, its output on ours; returns its exit code (128 + n if signal n ended it).

    The child has a process group of its own, so that Ctrl-C reaches it once, through us, and not twice: the
    second would end it before it has shut down what it started.
    """
    command = [sys.executable, "-m", "distill_rl", *arguments]
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    with _handled_by(forward):
        child = subprocess.Popen(command, env=_environment(), process_group=0)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in FORWARDED}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _environment() -> dict[str, str]:
    """Offline, and few threads: models of this size are slowed down by more."""
    return {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", **os.environ}
