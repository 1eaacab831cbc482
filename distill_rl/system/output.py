"""What is printed. A terminal, pipe or file that does not take it must not end a run, which keeps a log of its own."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO


class OutputLost(BaseException):
    """stdout does not take what a command prints, so that the command is of no use. Not an error, like KeyboardInterrupt.

    Args:
        cause: why.
    """

    def __init__(self, cause: OSError):
        super().__init__(cause)
        self.cause = cause


class GuardedOutput:
    """A text stream that never raises an error of its file: it drops what cannot be written, and escapes what its encoding lacks.

    Args:
        stream: the stream; everything but `write` and `flush` is its own.
        when_lost: called with the first error of its file that the main thread meets; may raise.
    """

    def __init__(self, stream: TextIO, when_lost: Callable[[OSError], None] = lambda error: None):
        self._stream, self._when_lost, self._is_lost = stream, when_lost, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._lose(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and not self._is_lost and isinstance(error, OSError):
            self._is_lost = True  # first, because what is called may print
            self._when_lost(error)


def safe(stream: TextIO | None) -> Any:
    """The stream as an `GuardedOutput`; None if there is none."""
    return stream if stream is None or isinstance(stream, GuardedOutput) else GuardedOutput(stream)


def guard() -> None:
    """Makes stdout and stderr of this process an `GuardedOutput` each, to the end of the process. Closed descriptors become /dev/null.

    The first error of stdout raises OutputLost in the main thread.
    """
    for descriptor in range(3):  # or the next file that is opened would be the stdout of this process and its children
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    nothing = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stdout = GuardedOutput(sys.stdout or nothing, _raise)  # type: ignore[assignment]
    sys.stderr = GuardedOutput(sys.stderr or nothing)  # type: ignore[assignment]
    atexit.register(_end, sys.stdout, sys.stderr)


def go_on_without() -> None:
    """From now on an error of the guarded stdout is only logged: as a warning, or at level info if nobody reads it any more."""
    sys.stdout._when_lost = _note  # type: ignore[union-attr]


def _raise(error: OSError) -> None:
    raise OutputLost(error)


def _note(error: OSError) -> None:
    level = logging.INFO if isinstance(error, BrokenPipeError) else logging.WARNING
    text = "stdout cannot be written (%s): what it lacks is in the log of the run"
    logging.getLogger("distill_rl").log(level, text, error.strerror)


def _end(*streams: Any) -> None:
    """Lets Python drop what it could not write, or it would complain when it ends."""
    for stream in streams:
        try:
            stream._stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
