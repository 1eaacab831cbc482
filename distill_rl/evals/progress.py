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
        """Counts graded rows."""


class Progress:
    """Receives the progress of an evaluation; this one shows nothing but warnings, which go to the log."""

    def suite(self, model: str, suite: str, total: int, rows: Iterable[Row]) -> AbstractContextManager[SuiteProgress]:
        """Starts a suite of `total` items; `rows` are those that an earlier run left."""
        return nullcontext(SuiteProgress())

    def already_finished(self, model: str, suite: str, result: Mapping[str, Any]) -> None:
        """Reports a suite that an earlier run finished."""

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
        from rich.console import Console

        self.console = console or Console()
        self.interval_s, self.clock = interval_s, clock

    @contextmanager
    def suite(self, model: str, suite: str, total: int, rows: Iterable[Row]) -> Iterator[SuiteProgress]:
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
        # Rich would wrap and colour a line that goes to a log file.
        if self.console.is_terminal:
            self.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.console.file, flush=True)

    @contextmanager
    def _bar(self, shown: _ConsoleSuite) -> Iterator[None]:
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
        self.name, self.total, self._progress = name, total, progress
        self.num_items, self.num_tokens, self._score_sum = 0, 0, 0.0
        self._start = self._last_line = progress.clock()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def score(self) -> float:
        return self._score_sum / max(self.num_items, 1)

    def count(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.num_items += 1
            self._score_sum += row["score"]

    def add(self, rows: Iterable[Row]) -> None:
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
        seconds = max(self._progress.clock() - self._start, 1e-9)
        width = len(str(self.total))
        speed = f"{self.num_tokens / seconds:,.0f} tokens/s"
        return f"{self.name}  {self.num_items:>{width}}/{self.total}  score {self.score:.3f}  {speed}"
