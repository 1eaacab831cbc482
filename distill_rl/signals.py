"""Stopping on request.

A handler that raises inside `ray.get` is swallowed, so handlers only set flags and the driver looks
at them: `preempted` after each step, `raise_if_interrupted` at every poll of a wait.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_PREEMPT = (signal.SIGTERM, signal.SIGUSR1)

EXIT_PREEMPTED = 85
EXIT_INTERRUPTED = 130


class Signals:
    """While entered: SIGTERM and SIGUSR1 ask for a stop after the step, Ctrl-C for a stop now; the second of either forces it."""

    def __init__(self) -> None:
        self.preempted = False
        self._interrupted = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Signals:
        self._previous = self._install()
        return self

    def install_again(self) -> None:
        """Ray puts handlers of its own in place when it starts: call this afterwards."""
        self._install()

    def _install(self) -> dict[int, object]:
        return {number: signal.signal(number, self._on_signal) for number in (*_PREEMPT, signal.SIGINT)}

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def raise_if_interrupted(self) -> None:
        """
        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, or a second SIGTERM came.
        """
        if self._interrupted:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number in _PREEMPT and not self.preempted:
            self.preempted = True
        elif not self._interrupted:
            self._interrupted = True
        else:
            os._exit(EXIT_INTERRUPTED)
