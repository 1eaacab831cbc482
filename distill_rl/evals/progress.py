"""Progress of an evaluation: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from distill_rl.evals.results.result import Row, processed_tokens
from distill_rl.observe.log import get, printable

if TYPE_CHECKING:
    from rich.console import Console


class SuiteProgress:
    """Progress of one suite on one model; this one shows nothing."""

    def add(self, rows: Iterable[Row]) -> None:
        """Counts newly graded rows, each of which must be passed once."""


class Progress:
    """Receives the progress of an evaluation; this one shows nothing but warnings, which go to the log."""

    def suite(self, model: str, suite: str, total: int, rows: Iterable[Row]) -> AbstractContextManager[SuiteProgress]:
        """Returns a context manager around the evaluation of one suite on one model; it yields the object whose `add`
        is to be called with every batch of newly graded rows.

        Args:
            model, suite: names to show.
            total: items of the suite.
            rows: graded rows that an earlier, interrupted run left; they count as done from the start.
        """
        return nullcontext(SuiteProgress())

    def already_finished(self, model: str, suite: str, result: Mapping[str, Any]) -> None:
        """Reports a suite that an earlier run finished, so that nothing is run; `result` is its stored result."""

    def warn(self, text: str) -> None:
        get("evals").warning(text)


class ConsoleProgress(Progress):
    """Shows the items done, the score so far and the time left.

    Args:
        console: where to write; None: stdout.
        interval_s: seconds between two lines, where there is no terminal.
        clock: seconds from any origin.
    """

    def __init__(
        self,
        *,
        console: Console | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Writes to `console` (None: stdout); without a terminal, a line per suite at most every `interval_s` seconds
        of `clock`."""
        from rich.console import Console

        self.console = console or Console()
        self.interval_s, self.clock = interval_s, clock

    @contextmanager
    def suite(self, model: str, suite: str, total: int, rows: Iterable[Row]) -> Iterator[SuiteProgress]:
        """Shows one suite's progress while the block runs: a bar on a terminal, otherwise a line from time to time and
        a last one at the end. Yields the object whose `add` takes newly graded rows.

        Args:
            model, suite: names to show.
            total: items of the suite.
            rows: graded rows that an earlier, interrupted run left; they count as done, and their number is printed.
        """
        shown = _ConsoleSuite(printable(f"{suite}  {model}"), total, self)
        shown.count(rows)
        if shown.num_items:
            self.print_line(f"{shown.name}: {shown.num_items} of {total} items are already done")
        with self._bar(shown):
            yield shown

    def already_finished(self, model: str, suite: str, result: Mapping[str, Any]) -> None:
        self.print_line(printable(f"{suite}  {model}: all {result.get('num_items')} items are already done"))

    def warn(self, text: str) -> None:
        self.print_line(printable(f"warning: {text}"))

    def print_line(self, text: str) -> None:
        """Prints a line of text, above the bar if one is on the screen; no markup in it is interpreted. `text` must be
        safe to print (`observe.log.printable`)."""
        # Rich would wrap and colour a line that goes to a log file.
        if self.console.is_terminal:
            self.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.console.file, flush=True)

    @contextmanager
    def _bar(self, shown: _ConsoleSuite) -> Iterator[None]:
        """Shows a progress bar for a suite while the block runs; `shown` redraws it on every change from then on.

        Without a terminal there is no bar; the suite's final line is printed when the block ends without an error.
        """
        if not self.console.is_terminal:
            yield
            self.print_line(shown.line())
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("score {task.fields[score]}", markup=False),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=self.console) as bars:
            task = bars.add_task(shown.name, total=shown.total, completed=shown.num_items, score="-")
            shown.on_change = lambda: bars.update(task, completed=shown.num_items, score=f"{shown.score:.3f}")
            yield


class _ConsoleSuite(SuiteProgress):
    """Counts the items of one suite and their scores."""

    def __init__(self, name: str, total: int, progress: ConsoleProgress):
        """Starts with no items done and the clock running.

        Args:
            name: text in front of each line.
            total: items of the suite.
            progress: where lines are printed, and whose clock and interval count.
        """
        self.name, self.total, self._progress = name, total, progress
        self.num_items, self.num_tokens, self._score_sum = 0, 0, 0.0
        self._start = self._last_line = progress.clock()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def score(self) -> float:
        """Mean score of the items counted so far; 0 if there are none."""
        return self._score_sum / max(self.num_items, 1)

    def count(self, rows: Iterable[Row]) -> None:
        """Counts rows as done, with their scores but without their tokens; shows nothing. For rows of an earlier
        run."""
        for row in rows:
            self.num_items += 1
            self._score_sum += row["score"]

    def add(self, rows: Iterable[Row]) -> None:
        """Counts newly graded rows with their scores and tokens and shows the change: redraws the bar, or, without a
        terminal, prints a line if the interval has passed and items remain."""
        rows = list(rows)
        self.count(rows)
        self.num_tokens += processed_tokens(rows)
        self.on_change()
        if self._line_is_due() and self.num_items < self.total:
            self._last_line = self._progress.clock()
            self._progress.print_line(self.line())

    def _line_is_due(self) -> bool:
        progress = self._progress
        return not progress.console.is_terminal and progress.clock() - self._last_line >= progress.interval_s

    def line(self) -> str:
        """One line of progress: name, items done of the total, mean score, and tokens per second since the suite was
        started."""
        seconds = max(self._progress.clock() - self._start, 1e-9)
        width = len(str(self.total))
        speed = f"{self.num_tokens / seconds:,.0f} tokens/s"
        return f"{self.name}  {self.num_items:>{width}}/{self.total}  score {self.score:.3f}  {speed}"
