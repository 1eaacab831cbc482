"""Progress of an evaluation: a bar on a terminal, log lines elsewhere, or counts in a file for another process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.evals.results.result import Row, processed_tokens
from distill_rl.observe.log import get, printable
from distill_rl.observe.terminal import ProgressBar, print_line
from distill_rl.system.files import write_atomic

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
        figures = [f"{speed:,.0f} tokens/s"]
        if self._num_items:
            figures.insert(0, f"score {self._score_sum / self._num_items:.3f}")
        self._bar.update(self._num_items, figures)


@dataclass(frozen=True, slots=True)
class Counts:
    """How far the evaluation of a model has come."""

    suite: str
    done: int
    total: int
    score: float
    """Mean over the items done; 0 before the first."""
    items_per_second: float
    """Since the suite began, without items that an earlier run left."""

    def __str__(self) -> str:
        speed = f"{self.items_per_second:,.1f} items/s"
        score = f", score {self.score:.3f}" if self.done else ""
        return f"{self.suite}: {self.done:,} of {self.total:,} items, {speed}{score}"


class FileProgress(Progress):
    """Keeps the counts of the present suite in a file, which `read_counts` reads in another process.

    As a context manager it removes the file.

    Args:
        path: written at most once per `interval_s` seconds.
    """

    def __init__(self, path: Path, *, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic):
        self._path, self._interval_s, self._clock = path, interval_s, clock
        self._written = -interval_s

    def __enter__(self) -> FileProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)

    @contextmanager
    def suite(self, model: str, suite: str, total: int, rows: Iterable[Row]) -> Iterator[SuiteProgress]:
        yield _FileSuite(self, suite, total, list(rows))

    def write(self, counts: Counts) -> None:
        """Writes the counts, unless the last ones are younger than the interval."""
        if (now := self._clock()) - self._written >= self._interval_s:
            self._written = now
            write_atomic(self._path, json.dumps(asdict(counts)))

    def now(self) -> float:
        """Seconds from any origin."""
        return self._clock()


class _FileSuite(SuiteProgress):
    """Counts the items of one suite for a `FileProgress`."""

    def __init__(self, file: FileProgress, suite: str, total: int, done: Sequence[Row]):
        self._file, self._suite, self._total, self._start = file, suite, total, file.now()
        self._num_resumed = self._done = len(done)
        self._score_sum = sum(row["score"] for row in done)

    def add(self, rows: Iterable[Row]) -> None:
        """Counts newly graded rows."""
        rows = list(rows)
        self._done += len(rows)
        self._score_sum += sum(row["score"] for row in rows)
        speed = (self._done - self._num_resumed) / max(self._file.now() - self._start, 1e-9)
        score = self._score_sum / max(self._done, 1)
        self._file.write(Counts(self._suite, self._done, self._total, score, round(speed, 3)))


def progress_file(folder: Path) -> Path:
    """The file of a `FileProgress`, in the folder of the model's results."""
    return folder / ".progress.json"


def read_counts(path: Path) -> Counts | None:
    """Returns what a `FileProgress` wrote last; None without a file, or if it cannot be read."""
    try:
        return Counts(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
