"""Stopping on request.

An exception raised inside `ray.get` is swallowed, so handlers set flags, and whoever waits looks at them. Where
nothing of Ray waits (reading data, evaluating), `at_once` lets the handler raise.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

PREEMPT = (signal.SIGTERM, signal.SIGUSR1)

EXIT_PREEMPTED = 85
EXIT_INTERRUPTED = 130


_ONE_REQUEST_S = 1.0
"""A scheduler may signal the process and the script that started it, which hands it on: within this, it is one request."""


class Preempted(BaseException):
    """SIGTERM or SIGUSR1 where there is no step to finish. Like KeyboardInterrupt it is no error."""


class Signals:
    """While entered: SIGTERM and SIGUSR1 ask for a stop after the step, Ctrl-C for a stop now; the second of either forces it.

    The first SIGTERM behind a SIGUSR1 is no second request: a scheduler sends it at the time limit, while the run saves.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.preempted = False
        self._clock = clock
        self._asked_at = 0.0
        self._asked_by = 0
        self._interrupted = False
        self._at_once = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Signals:
        self._previous = self._install()
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def install_again(self) -> None:
        """Ray puts handlers of its own in place when it starts: call this afterwards."""
        self._install()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal raises where it arrives; one that came before raises on entry.

        Raises:
            KeyboardInterrupt, Preempted.
        """
        self._at_once = True
        try:
            self.raise_if_stopping()
            yield
        finally:
            self._at_once = False

    def raise_if_interrupted(self) -> None:
        """
        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, or a second SIGTERM came.
        """
        if self._interrupted:
            raise KeyboardInterrupt

    def raise_if_stopping(self) -> None:
        """
        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, or a second SIGTERM came.
            Preempted: SIGTERM or SIGUSR1 came.
        """
        self.raise_if_interrupted()
        if self.preempted:
            raise Preempted

    def _install(self) -> dict[int, object]:
        return {number: signal.signal(number, self._on_signal) for number in (*PREEMPT, signal.SIGINT)}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number in PREEMPT and not self.preempted:
            self.preempted, self._asked_at, self._asked_by = True, self._clock(), number
        elif number in PREEMPT and self._clock() - self._asked_at < _ONE_REQUEST_S:
            return
        elif number == signal.SIGTERM and self._asked_by == signal.SIGUSR1:
            self._asked_by = number
            return
        elif not self._interrupted:
            self._interrupted = True
        else:
            os._exit(EXIT_INTERRUPTED)
        if self._at_once:
            self.raise_if_stopping()


@contextmanager
def held_back() -> Iterator[None]:
    """Requests to stop wait until the block ends. Processes started inside never hear them: they are stopped by us.

    A scheduler signals a whole process group; a cluster service that died of it could not help to save.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
