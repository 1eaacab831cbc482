"""Where the time of a step goes: its measurement, and a table of it in the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import fmean, median

from distill_rl.observe.log import get
from distill_rl.observe.metrics import Metric


class StepTimer:
    """Measures steps and their named parts, in seconds.

        with timer.step(step):
            with timer.part("student"):
                ...
        observer.log(step, ..., timer.flush())

    The time of a part excludes the parts inside it, and time outside any part is `timing/other`, so the parts of a
    step add up to `timing/step` exactly. A part entered between steps (a checkpoint, a validation pass) is reported
    by the next flush and is not included in `timing/step`; the sum over a run is what the part took in all.

    The work of other processes is not measured here. Workers report their times under names with one more slash,
    `timing/<worker>/<part>`, and the report draws those separately.

    Args:
        clock: monotonic seconds from any origin; tests pass their own.
        cpu_clock: CPU seconds of this process. With it `timing/driver/cpu` is what was used since the flush before, or since the
            first step began.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, cpu_clock: Callable[[], float] | None = None):
        self._clock, self._cpu_clock = clock, cpu_clock
        self._cpu_since: float | None = None
        self._seconds: dict[str, float] = {}
        self._last_end = 0.0
        """Of a step."""
        self._inside: list[float] = []
        """One entry per open block: the seconds covered by the blocks inside it so far."""

    @contextmanager
    def step(self, step: int, *, follows: bool = False) -> Iterator[None]:
        """Times one optimizer step while the block runs; a step that raises is not counted.

        Args:
            step: its number, for the error message.
            follows: the workers have been in it since the step before ended, and so it is timed from there.

        Raises:
            RuntimeError: a step or a part is still open.
        """
        if self._inside:
            raise RuntimeError(f"step {step} was started inside another step or part")
        if self._cpu_clock is not None and self._cpu_since is None:
            self._cpu_since = self._cpu_clock()
        with self._block("other", whole="step", start=self._last_end if follows else None):
            yield
        self._last_end = self._clock()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Times one part while the block runs, without the parts inside it; a part that raises is not counted.

        If a part is entered several times before a flush, its times are added.

        Args:
            name: the metric will be `timing/<name>`.
        """
        return self._block(name)

    def flush(self) -> dict[str, Metric]:
        """Returns the seconds since the last flush as `timing/<part>` and `timing/step`, and starts anew.

        They are reduced per step. Empty if nothing was timed.
        """
        if self._cpu_clock is not None and self._cpu_since is not None:
            now = self._cpu_clock()
            self._add("driver/cpu", now - self._cpu_since)
            self._cpu_since = now
        metrics = {f"timing/{name}": Metric(seconds, "per_step") for name, seconds in self._seconds.items()}
        self._seconds = {}
        return metrics

    @contextmanager
    def _block(self, part: str, *, whole: str = "", start: float | None = None) -> Iterator[None]:
        """Measures the block, from `start` on if given: its seconds are those of `whole`, and `part` has them without the blocks inside it."""
        # The seconds also count as covered for the block around it. A block that raises is closed as well, so that a
        # caller who recovers can go on measuring.
        self._inside.append(0.0)
        start = self._clock() if start is None else start
        ended = False
        try:
            yield
            ended = True
        finally:
            total, covered = self._clock() - start, self._inside.pop()
            if self._inside:
                self._inside[-1] += total
            if ended and whole:
                self._add(whole, total)
            if ended:
                self._add(part, total - covered)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


# A table in the log: where the time of the steps went, and what moved from teachers to student.

STEP, OTHER = "timing/step", "timing/other"
_MOVED: Mapping[str, tuple[str, str, float]] = {
    "transport/bytes": ("MiB of targets", ",.2f", 2.0**-20),
    "transport/bytes_between_nodes": ("MiB between nodes", ",.2f", 2.0**-20),
    "transport/bytes_per_token": ("bytes per token", ",.1f", 1.0),
    "transport/slot_occupancy": ("peak slots in use", ".1%", 1.0),
    "transport/teacher_wait": ("waiting for teachers", ".1%", 1.0),
}
"""Metric → label, format, factor. Metrics of a single teacher end in `/<teacher>`."""
_WORKERS = "in the workers, concurrently"
_DRIVER_CPU = "timing/driver/cpu"
_CPU = "processor time of the driver"
_TRANSPORT = "from teachers to student"

Line = tuple[str, ...]
"""Name, median, mean, share."""


class TableSink:
    """Collects every step, and writes a table every `every` steps and one for the remaining steps on close.

    The driver's parts (`timing/<part>`) add up to 100 %; `step` is less than that if the driver also did something
    between steps, such as validation. Workers' times (`timing/<worker>/<part>`) run concurrently: their share says how
    busy a worker was during a step, and may exceed 100 % if a worker runs ahead. A metric that is missing from a step
    counts as 0.

    Args:
        every: steps per table.
    """

    def __init__(self, every: int):
        self._every = every
        self._steps: list[int] = []
        self._records: list[Mapping[str, float]] = []

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Takes one step's record, and logs a table if the step is a multiple of `every`.

        Ignores records without a step time, such as those of a validation pass.
        """
        if STEP not in record:
            return
        self._steps.append(step)
        self._records.append(dict(record))
        if step % self._every == 0:
            self._flush()

    def close(self) -> None:
        """Logs a table of the steps since the last table, at level info, if there are any."""
        self._flush()

    def _flush(self) -> None:
        """Logs a table of the collected steps at level info and forgets them; does nothing if there are none."""
        if self._steps:
            first, last, records = self._steps[0], self._steps[-1], self._records
            self._steps, self._records = [], []
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            get("observe").info("where the time went, %s\n%s", steps, step_table(records))


def step_table(records: Sequence[Mapping[str, float]]) -> str:
    """A table, as aligned lines of text, of the driver's and workers' times and of what moved to the student.

    It has the median and mean over the steps and, for times, the share.

    Args:
        records: at least one; every one holds `timing/step`, in seconds. A metric that is missing from one counts as 0.
    """
    blocks = {
        "": list(_driver(records)),
        _WORKERS: list(_workers(records)),
        _CPU: [_time(records, _DRIVER_CPU, fmean(_series(records, STEP)))] if _DRIVER_CPU in records[0] else [],
        _TRANSPORT: list(_moved(records)),
    }
    lines: list[Line] = [("", "median", "mean", "share")]
    for title, block in blocks.items():
        if title and block:
            lines.append((title, "", "", ""))
        lines += [(f"  {label}" if title else label, *cells) for label, *cells in block]
    # Titles have a line to themselves, so they do not count towards the width of the name column.
    name_width = max(len(name) for name, *cells in lines if any(cells))
    widths = [max(len(line[column]) for line in lines) for column in (1, 2, 3)]
    rows = []
    for name, *cells in lines:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths)]
        rows.append("  ".join([name.ljust(name_width), *aligned]).rstrip())
    return "\n".join(rows)


def _driver(records: Sequence[Mapping[str, float]]) -> Iterator[Line]:
    """Yields a line for each of the driver's parts, longest first; then `other`, then the whole step."""
    names = {name for record in records for name in record if name.startswith("timing/") and name.count("/") == 1}
    means = {name: fmean(_series(records, name)) for name in names}
    total = sum(mean for name, mean in means.items() if name != STEP)
    for name in sorted(names, key=lambda name: (name == STEP, name == OTHER, -means[name], name)):
        yield _time(records, name, total)


def _workers(records: Sequence[Mapping[str, float]]) -> Iterator[Line]:
    """Yields a line for each of the workers' times (`timing/<worker>/<part>`), by name; shares are of the mean step."""
    names = {name for record in records for name in record if name.startswith("timing/") and name.count("/") > 1}
    names.discard(_DRIVER_CPU)
    step = fmean(_series(records, STEP))
    for name in sorted(names):
        yield _time(records, name, step)


def _moved(records: Sequence[Mapping[str, float]]) -> Iterator[Line]:
    """Yields a line for each of the metrics in `_MOVED` that occurs, and for each teacher that it occurs for."""
    names = sorted({name for record in records for name in record if name.startswith("transport/")})
    for base, (label, form, factor) in _MOVED.items():
        for name in names:
            if name == base or name.startswith(f"{base}/"):
                series = [factor * value for value in _series(records, name)]
                teacher = name.removeprefix(base).removeprefix("/")
                full_label = f"{label}, {teacher}" if teacher else label
                yield full_label, format(median(series), form), format(fmean(series), form), ""


def _time(records: Sequence[Mapping[str, float]], name: str, whole: float) -> Line:
    """The line of a timing metric: its name without `timing/`, median and mean in milliseconds, and share."""
    series = _series(records, name)
    share = f"{fmean(series) / whole:.1%}" if whole > 0 else ""
    times = (f"{1000 * seconds:,.1f} ms" for seconds in (median(series), fmean(series)))
    return name.removeprefix("timing/"), *times, share


def _series(records: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [record.get(name, 0.0) for record in records]
