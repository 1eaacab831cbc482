"""What an evaluation says of itself while it runs: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from distill_rl.evals.results.result import Row, worked_tokens
from distill_rl.observe.log import printable

if TYPE_CHECKING:
    from rich.console import Console


class SuiteProgress(Protocol):
    """A suite that is being run."""

    def add(self, rows: Iterable[Row]) -> None: ...


class Progress(Protocol):
    """Listens to an evaluation."""

    def suite(self, model: str, suite: str, total: int, rows: Iterable[Row]) -> AbstractContextManager[SuiteProgress]:
        """A suite starts, with these of its rows there already."""
        ...

    def found(self, model: str, suite: str, result: Mapping[str, Any]) -> None:
        """A suite was finished by an earlier run."""
        ...

    def warn(self, text: str) -> None: ...


class SilentProgress:
    """Says nothing, but for warnings, which go to the log."""

    def suite(self, model: str, suite: str, total: int, rows: Iterable[Row]) -> AbstractContextManager[SuiteProgress]:
        return nullcontext(self)

    def add(self, rows: Iterable[Row]) -> None:
        pass

    def found(self, model: str, suite: str, result: Mapping[str, Any]) -> None:
        pass

    def warn(self, text: str) -> None:
        from distill_rl.observe.log import get

        get("evals").warning(text)


class ConsoleProgress:
    """For a person: items done, the score so far and the time left.

    Args:
        console: where to write; None: stdout.
        interval_s: seconds between lines where there is no terminal.
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

        self._console = console or Console()
        self._interval, self._clock = interval_s, clock

    @contextmanager
    def suite(self, model: str, suite: str, total: int, rows: Iterable[Row]) -> Iterator[SuiteProgress]:
        tally = _ConsoleSuite(printable(f"{suite}  {model}"), total, self)
        tally.count(rows)
        if tally.items:
            self._say(f"{tally.name}: {tally.items} of {total} items are there already")
        with self._bar(tally):
            yield tally

    def found(self, model: str, suite: str, result: Mapping[str, Any]) -> None:
        self._say(printable(f"{suite}  {model}: all {result.get('num_items')} items are there already"))

    def warn(self, text: str) -> None:
        self._say(printable(f"warning: {text}"))

    @contextmanager
    def _bar(self, tally: _ConsoleSuite) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            self._say(tally.line())
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn())
        facts = TextColumn("score {task.fields[score]}", markup=False)
        with Bars(*columns, facts, TimeRemainingColumn(), console=self._console) as bars:
            task = bars.add_task(tally.name, total=tally.total, completed=tally.items, score="-")
            tally.changed = lambda: bars.update(task, completed=tally.items, score=f"{tally.score:.3f}")
            yield

    def _say(self, text: str) -> None:
        # Rich would wrap and colour a line that is meant for a log file.
        if self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._console.file, flush=True)

    def now(self) -> float:
        return self._clock()

    def due(self, written: float) -> bool:
        return not self._console.is_terminal and self._clock() - written >= self._interval

    def line(self, text: str) -> None:
        self._say(text)


class _ConsoleSuite:
    """Items done and their scores."""

    def __init__(self, name: str, total: int, printed: ConsoleProgress):
        self.name, self.total, self._printed = name, total, printed
        self.items, self.tokens, self._sum = 0, 0, 0.0
        self._first = self._written = printed.now()
        self.changed: Callable[[], None] = lambda: None

    @property
    def score(self) -> float:
        return self._sum / max(self.items, 1)

    def count(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.items += 1
            self._sum += row["score"]

    def add(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self.count(rows)
        self.tokens += worked_tokens(rows)
        self.changed()
        if self._printed.due(self._written) and self.items < self.total:
            self._written = self._printed.now()
            self._printed.line(self.line())

    def line(self) -> str:
        seconds = max(self._printed.now() - self._first, 1e-9)
        width = len(str(self.total))
        speed = f"{self.tokens / seconds:,.0f} tokens/s"
        return f"{self.name}  {self.items:>{width}}/{self.total}  score {self.score:.3f}  {speed}"
