"""Runs the real command line in child processes and forwards signals to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType
from typing import IO, Any

from distill_rl.system.processes.parent import end_with
from distill_rl.system.signals import requests


class OwnCommands:
    """Children that run `distill-rl`. While entered, SIGINT and requests to stop (`signals.PREEMPT`) go to all of them instead.

    Enter it and start children in the main thread. Every child has its own process group, so that Ctrl-C reaches it once,
    through this process: a second SIGINT would end it before it has stopped the processes that it started. If this process
    is killed, the children get SIGTERM (on Linux). Leaving the block ends no child.
    """

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._received: list[tuple[int, int]] = []
        """Signals, and how many children there were at each."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> OwnCommands:
        """Installs the handlers."""
        self._previous = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, *requests())}
        return self

    def __exit__(self, *exc: object) -> None:
        """Restores the handlers from before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def signalled(self) -> bool:
        """Whether a signal has arrived."""
        return bool(self._received)

    def start(
        self, arguments: Sequence[str], variables: Mapping[str, str] | None = None, output: IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts `distill-rl`, and sends it the signals that have arrived before.

        Args:
            arguments: those of the command line, without the program's name.
            variables: environment variables of the child, where this process's environment does not have them.
            output: for stdout and stderr; None: those of this process.
        """
        child = subprocess.Popen(
            [sys.executable, "-m", "distill_rl", *arguments],
            stdout=output,
            stderr=output,
            env={**(variables or {}), **os.environ},
            process_group=0,
            preexec_fn=partial(end_with, os.getpid(), signal.SIGTERM),
        )
        self._children.append(child)
        # A signal that arrives from here on finds the child in the list.
        for number, children in self._received:
            if children < len(self._children):
                child.send_signal(number)
        return child

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._received.append((number, len(self._children)))
        for child in self._children:
            child.send_signal(number)


def exit_code(code: int) -> int:
    """The exit code that a shell gives for a child: 128 + n if signal n ended it."""
    return code if code >= 0 else 128 - code
