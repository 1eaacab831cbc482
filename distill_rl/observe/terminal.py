"""What a user sees on the terminal: tables on a console, and progress as a bar or as lines of text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from distill_rl.system.output import safe

if TYPE_CHECKING:
    from rich.console import Console

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
