"""Progress of an evaluation: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from distill_rl.evals.results.result import Row, processed_tokens
from distill_rl.observe.log import get, printable
from distill_rl.observe.terminal import ProgressBar, print_line

if TYPE_CHECKING:
    from rich.console import Console


class SuiteProgress:
    """Progress of one suite on one model; this one shows nothing."""

    def add(self, rows: Iterable[Row]) -> None:
        """Receives newly graded rows, each of which must be passed once; does nothing with them here."""


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
        """Called for a suite that an earlier run finished, in place of `suite`; does nothing here.

        Args:
            model, suite: names to show.
            result: the stored result.
        """

    def warn(self, text: str) -> None:
        """Reports a warning about the evaluation; here as a warning in the log."""
        get("evals").warning(text)


class ConsoleProgress(Progress):
    """Shows the items done, the score so far, tokens per second and the time left.

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
        self._interval_s, self._clock = interval_s, clock

    @contextmanager
    def suite(self, model: str, suite: str, total: int, rows: Iterable[Row]) -> Iterator[SuiteProgress]:
        """Shows one suite's progress while the block runs: a bar on a terminal, otherwise a line after the first rows,
        at intervals and when all items are done. Yields the object whose `add` takes newly graded rows.

        Args:
            model, suite: names to show.
            total: items of the suite.
            rows: graded rows that an earlier, interrupted run left; they count as done, and their number is printed.
        """
        name, done = f"{suite}  {model}", list(rows)
        if done:
            self._print(f"{name}: {len(done)} of {total} items are already done")
        options: Any = {"console": self.console, "interval_s": self._interval_s, "clock": self._clock}
        with closing(ProgressBar(printable(f"{name}:"), total, done=len(done), **options)) as bar:
            yield _ConsoleSuite(bar, done, self._clock)

    def already_finished(self, model: str, suite: str, result: Mapping[str, Any]) -> None:
        self._print(f"{suite}  {model}: all {result.get('num_items')} items are already done")

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}")

    def _print(self, text: str) -> None:
        print_line(self.console, printable(text))


class _ConsoleSuite(SuiteProgress):
    """Counts the items of one suite, their scores, and the tokens of those that were graded here."""

    def __init__(self, bar: ProgressBar, done: Sequence[Row], clock: Callable[[], float]):
        self._bar, self._clock, self._start = bar, clock, clock()
        self._num_items, self._num_tokens = len(done), 0
        self._score_sum = sum(row["score"] for row in done)

    def add(self, rows: Iterable[Row]) -> None:
        """Counts newly graded rows with their scores and tokens and shows the new figures: in the bar, or, without a
        terminal, as a line at the first call, when the interval has passed, and when all items are done."""
        rows = list(rows)
        self._num_items += len(rows)
        self._num_tokens += processed_tokens(rows)
        self._score_sum += sum(row["score"] for row in rows)
        speed = self._num_tokens / max(self._clock() - self._start, 1e-9)
        figures = f"score {self._score_sum / max(self._num_items, 1):.3f}", f"{speed:,.0f} tokens/s"
        self._bar.update(self._num_items, figures)
