"""What a user sees: log messages, tables, and progress as a bar or as lines of text."""

from __future__ import annotations

import logging
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.errors import ConfigError
from distill_rl.system.output import safe
from distill_rl.system.redact import in_text

if TYPE_CHECKING:
    from rich.console import Console


ROOT = "distill_rl"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
VARIABLE = "DISTILL_RL_LOG"


def get(name: str = "") -> logging.Logger:
    """The package's logger, or its child called `name`."""
    return logging.getLogger(f"{ROOT}.{name}" if name else ROOT)


def setup_console() -> None:
    """Sends the package's log messages to stderr, from the level that the environment variable DISTILL_RL_LOG names.

    The levels are debug, info, warning (the default) and error. Calling it again changes the level and adds no second
    handler.

    Raises:
        ConfigError: the variable names no level.
    """
    level = os.environ.get(VARIABLE, "warning").strip().lower()
    if level not in LEVELS:
        raise ConfigError(VARIABLE, f"must be one of {', '.join(LEVELS)}", level)
    logger = get()
    logger.setLevel(logging.DEBUG)
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Console)]:
        logger.removeHandler(handler)
    logger.addHandler(_Console("%(levelname)s: %(message)s", LEVELS[level]))


@contextmanager
def console() -> Iterator[None]:
    """`setup_console` while the block runs, unless the program has handlers of its own for these messages."""
    logger = get()
    if logger.hasHandlers():
        yield
        return
    level = logger.level
    setup_console()
    try:
        yield
    finally:
        for handler in [handler for handler in logger.handlers if isinstance(handler, _Console)]:
            logger.removeHandler(handler)
        logger.setLevel(level)


def say(text: str) -> None:
    """Prints one line for the user on stdout, made safe by `printable`, and logs it at level info.

    A stdout that does not take it is no error (`distill_rl.system.output`).
    """
    print(printable(text), file=safe(sys.stdout), flush=True)
    get("run").info(text)


def say_of_data(text: str) -> None:
    """`say` a line about what is found when data are opened."""
    say(f"data      {text}")


@contextmanager
def status(text: str) -> Iterator[None]:
    """Shows a line on stderr while the block runs, and then erases it; writes nothing if stderr is no terminal."""
    stderr = safe(sys.stderr)
    if stderr is None or not stderr.isatty():
        yield
        return
    print(printable(text), end="\r", file=stderr, flush=True)
    try:
        yield
    finally:
        print("\x1b[2K", end="\r", file=stderr, flush=True)


class _File(logging.FileHandler):
    """A log that cannot be written must neither end a run nor hide why it ends."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # of what is still in the buffer; the file is closed all the same
            super().close()


def log_to_stderr() -> None:
    """Writes the package's messages of level info and above to stderr, which Ray keeps in a file for each of its workers."""
    logger = get()
    if not any(isinstance(handler, _Console) for handler in logger.handlers):
        logger.addHandler(_Console(_FORMAT))
        logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))


@contextmanager
def log_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Appends the package's log messages of level info and above to a file while the block runs; creates its folder.

    If the console shows debug messages, the file gets them too. The package logger's level is lowered meanwhile if
    necessary. What cannot be written, because the disk is full for example, is dropped. Yields the path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _File(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_Printable(_FORMAT))
    debug = os.environ.get(VARIABLE, "").strip().lower() == "debug"
    handler.setLevel(logging.DEBUG if debug else logging.INFO)
    logger = get()
    previous_level = logger.level
    if logger.getEffectiveLevel() > handler.level:
        logger.setLevel(handler.level)
    logger.addHandler(handler)
    try:
        yield path
    finally:
        logger.removeHandler(handler)
        logger.setLevel(previous_level)
        handler.close()


def printable(text: object) -> str:
    """`text` as one line that is safe on a terminal and in a log.

    Escapes every control, format and line-breaking character and removes secrets (`distill_rl.system.redact`). Run
    names, data rows and generated text are untrusted: an escape sequence in them could repaint the terminal, and a
    newline could forge a log line.
    """
    return "".join(_escape(char) for char in in_text(str(text)))


def _escape(char: str) -> str:
    """The character itself if it is printable or a blank, otherwise its escape sequence."""
    if char.isprintable() or unicodedata.category(char) == "Zs":
        return char
    return char.encode("unicode_escape").decode("ascii")


class _Printable(logging.Formatter):
    """Escapes each line, and indents all lines of a message or traceback but the first."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(printable(line) for line in super().format(record).split("\n"))


class _Console(logging.StreamHandler[Any]):
    """Looks `sys.stderr` up for every message, because a progress bar replaces it while it is on the screen."""

    def __init__(self, form: str, level: int = logging.NOTSET) -> None:
        logging.Handler.__init__(self, level)
        self.setFormatter(_Printable(form))

    @property
    def stream(self) -> Any:
        return safe(sys.stderr)


# What a user sees on the terminal: tables on a console, and progress as a bar or as lines of text.

_WIDE = 100
"""Terminal columns needed for a wide bar and all figures beside it."""


def open_console(least_width: int) -> Console:
    """A console on stdout that highlights nothing.

    Args:
        least_width: columns that a file or pipe gets at least, since it has no width.
    """
    from rich.console import Console

    console = Console(highlight=False, file=safe(sys.stdout))
    if not console.is_terminal:
        console.width = max(console.width, least_width)
    return console


def print_line(console: Console, text: str) -> None:
    """Prints one line as it is, without markup or colours; on a terminal, above a bar that is on the screen.

    Elsewhere the line is not wrapped.

    Args:
        text: must be printable (`distill_rl.observe.log`).
    """
    if console.is_terminal:
        console.print(text, markup=False, highlight=False)
    else:  # rich would wrap and colour a line that goes to a log file
        print(text, file=console.file, flush=True)


class ProgressBar:
    """Steps done, figures and the time left.

    On a terminal it is a bar; elsewhere a line is printed at the first step, at intervals and at the end.

    Args:
        name: printed before the steps; must be printable.
        total: number of steps; None: not known yet.
        done: steps done before this process began.
        console: where to write; None: stdout.
        interval_s: seconds between two lines of text.
        clock: seconds from any origin.
    """

    def __init__(
        self,
        name: str,
        total: int | None,
        *,
        done: int = 0,
        console: Console | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._name, self.total, self._interval, self._clock = name, total, interval_s, clock
        self._console = console or Console(file=safe(sys.stdout))
        self._printed = 0.0
        self._first: tuple[int, float] | None = None
        """The first step seen and its time. It includes compiling and warm-up, so the speed is measured from its end."""
        self.is_wide = not self._console.is_terminal or self._console.width >= _WIDE
        """Whether there is room for many figures."""
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24 if self.is_wide else 6),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=total, completed=done, figures="")
        self._bar.start()

    def update(self, done: int, figures: Iterable[str]) -> bool:
        """Shows that `done` steps are done, with figures beside them and, after the first one, the time left.

        Without a terminal a line is printed only at the first call, at the end, or if `interval_s` has passed.

        Args:
            done: steps of the whole run that are done, including those before this process began.

        Returns:
            Whether a line was printed, or on a terminal would have been.
        """
        now = self._clock()
        total = self.total
        is_last = total is not None and done >= total
        is_due = self._first is None or is_last or now - self._printed >= self._interval
        self._first = self._first or (done, now)
        first, start = self._first
        left = []
        if total is not None and done > first:
            left = [f"{clock_time((now - start) / (done - first) * (total - done))} left"]
        text = "  ".join([*figures, *left])
        self._bar.update(self._task, completed=done, total=total, figures=text)
        if is_due:
            self._printed = now
            if not self._console.is_terminal:
                print_line(self._console, f"{self._name} {done:>{len(str(total or 0))}}/{total or '?'}  {text}")
        return is_due

    def close(self) -> None:
        """Ends the bar, whose last state stays on the screen, and restores the cursor."""
        if self._console.is_terminal:  # elsewhere the oldest supported rich would print an empty line
            self._bar.stop()


def clock_time(seconds: float) -> str:
    """Seconds, rounded, as `M:SS`, or as `H:MM:SS` from one hour on; `0:00` if negative."""
    minutes, second = divmod(round(max(seconds, 0)), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
