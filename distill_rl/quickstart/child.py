"""Runs the real command line as a child, and lets signals through to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_cli(arguments: Sequence[str]) -> int:
    """`distill-rl` with these arguments, its output on ours; returns its exit code (128 + n if signal n ended it).

    The child has a process group of its own, so that Ctrl-C reaches it once, through us, and not twice: the
    second would end it before it has shut down what it started.
    """
    command = [sys.executable, "-m", "distill_rl", *arguments]
    pending: list[int] = []
    with _handled(pending.append), subprocess.Popen(command, env=_environment(), process_group=0) as child:
        with _handled(child.send_signal):
            for number in pending:
                child.send_signal(number)
            code = child.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _handled(act) -> Iterator[None]:
    def handler(number: int, frame: FrameType | None) -> None:
        act(number)

    previous = {number: signal.signal(number, handler) for number in FORWARDED}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _environment() -> dict[str, str]:
    """Offline, and few threads: models of this size are slowed down by more."""
    return {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", **os.environ}
