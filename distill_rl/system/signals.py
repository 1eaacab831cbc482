"""Stopping on request.

Ray swallows exceptions that are raised inside `ray.get`, so the handlers only set flags, which every wait polls. While
nothing waits for Ray (reading data, evaluating), `at_once` lets the handlers raise.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

PREEMPT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Requests to stop. SIGHUP is sent when a terminal is lost."""

EXIT_PREEMPTED = 85
EXIT_INTERRUPTED = 130

_ONE_REQUEST_S = 1.0
"""Signals this close together are one request: a scheduler may signal both the process and its script."""


class Preempted(BaseException):
    """SIGTERM, SIGUSR1 or SIGHUP ended a run, or arrived while there was no step to finish. Not an error, like KeyboardInterrupt."""


class Signals:
    """Handles requests to stop while entered.

    | signal | effect |
    |---|---|
    | first SIGTERM, SIGUSR1 or SIGHUP | `preempted` is set: the run stops after the step |
    | SIGTERM or SIGUSR1 again | treated like Ctrl-C |
    | Ctrl-C | the run stops now |
    | Ctrl-C, or either of them again, after that | the process exits at once, with 130 |

    A repeated SIGTERM or SIGUSR1 does not count within a second of the first. The first SIGTERM after a SIGUSR1 or SIGHUP
    never counts: a scheduler sends it at the time limit, a machine when it goes down, while the run is saving. A SIGHUP
    after another request never counts, and none does if the process inherited it as ignored (`nohup`).

    With `embedded` the process belongs to a caller, such as a notebook. It is never ended: the last kind of request goes
    to the handler from before. In another thread than the main one, which alone can handle signals, nothing is handled.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, embedded: bool = False) -> None:
        """Makes the object, without touching any handler; the main thread must then enter it to install its handlers.

        Args:
            clock: seconds, monotonic.
            embedded: see the class.
        """
        self.preempted = False
        self._clock = clock
        self._embedded = embedded
        self._asked_at = 0.0
        self._asked_by = 0
        self._interrupted = False
        self._at_once = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Signals:
        """Installs the handlers for PREEMPT and SIGINT; only the main thread can (see `embedded`)."""
        self._previous = self._install()
        return self

    def __exit__(self, *exc: object) -> None:
        """Restores the handlers from before `__enter__`."""
        for number, handler in self._previous.items():
            # None: set by something other than Python, which cannot set it again
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def install_again(self) -> None:
        """Installs the handlers of this object again. Call it after Ray has started, because Ray installs its own."""
        self._install()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Lets signals raise where they arrive while inside; one that arrived earlier raises on entry.

        Ray must not be waited for in the block, since it would swallow the exception.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, or SIGTERM or SIGUSR1 arrived again.
            Preempted: SIGTERM, SIGUSR1 or SIGHUP arrived once.
        """
        self._at_once = True
        try:
            self.raise_if_stopping()
            yield
        finally:
            self._at_once = False

    def raise_if_interrupted(self) -> None:
        """Raises if the run is to stop now, and does nothing otherwise.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, or SIGTERM or SIGUSR1 arrived again.
        """
        if self._interrupted:
            raise KeyboardInterrupt

    def raise_if_stopping(self) -> None:
        """Raises if the run is to stop now or after its step, and does nothing otherwise.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, or SIGTERM or SIGUSR1 arrived again.
            Preempted: SIGTERM, SIGUSR1 or SIGHUP arrived once.
        """
        self.raise_if_interrupted()
        if self.preempted:
            raise Preempted

    def _install(self) -> dict[int, object]:
        """Installs the handler for all signals that count, and returns the previous handler of each."""
        if self._embedded and threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self._on_signal) for number in (*requests(), signal.SIGINT)}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Notes a request to stop, by the table of the class."""
        # Inside `at_once` it also raises, as `raise_if_stopping` does. Once the run was told to stop now, Ctrl-C, or
        # SIGTERM or SIGUSR1 again, ends the process with 130, or if `embedded` goes to the handler from before.
        # SIGTERM or SIGUSR1 within a second of the first is the same request.
        if number in PREEMPT and not self.preempted:
            self.preempted, self._asked_at, self._asked_by = True, self._clock(), number
        elif number == signal.SIGHUP or (number in PREEMPT and self._clock() - self._asked_at < _ONE_REQUEST_S):
            return
        elif number == signal.SIGTERM and self._asked_by in (signal.SIGUSR1, signal.SIGHUP):
            self._asked_by = number
            return
        elif not self._interrupted:
            self._interrupted = True
        elif self._embedded:
            before = self._previous.get(number)
            if callable(before):
                before(number, frame)
            return
        else:
            os._exit(EXIT_INTERRUPTED)
        if self._at_once:
            self.raise_if_stopping()


def requests() -> tuple[signal.Signals, ...]:
    """PREEMPT, without a SIGHUP that this process inherited as ignored."""
    return tuple(n for n in PREEMPT if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)


@contextmanager
def signals_blocked(*more: signal.Signals) -> Iterator[None]:
    """Defers PREEMPT, and more, until the block ends. Processes started inside never receive them.

    A scheduler signals the whole process group, and a cluster service that died of it could not take part in the final
    save. We end those processes ourselves.
    """
    numbers = (*PREEMPT, *more)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    # The mask is this thread's. Another thread takes what it does not block, and Python still calls the handler in the main thread.
    arrived: dict[int, None] = {}
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: handler for number in numbers if is_main and callable(handler := signal.getsignal(number))}
    for number in handlers:
        signal.signal(number, lambda number, _: arrived.setdefault(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)  # to this thread, which still blocks it
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
