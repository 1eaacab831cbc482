"""Runs the real command line as a child process and forwards signals to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType

from distill_rl.system.processes.parent import end_with

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_cli(arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> int:
    """Runs `distill-rl` with its output on ours, waits for it and returns its exit code (128 + n if signal n ended it).

    SIGINT, SIGTERM and SIGUSR1 to this process are passed on to the child meanwhile. Call it in the main thread. The
    child has its own process group, so that Ctrl-C reaches it once, through this process: a second SIGINT would end it
    before it has stopped the processes that it started. If this process is killed, the child gets SIGTERM (on Linux).

    Args:
        arguments: those of the command line, without the program's name.
        variables: environment variables of the child, where this process's environment does not have them.
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
        child = subprocess.Popen(
            command,
            env={**(variables or {}), **os.environ},
            process_group=0,
            preexec_fn=partial(end_with, os.getpid(), signal.SIGTERM),
        )
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
