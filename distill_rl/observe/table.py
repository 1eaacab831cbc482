"""A table in the log of where the time of the steps went, and of what moved between teachers and student."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median

from distill_rl.observe.log import get

STEP, OTHER = "timing/step", "timing/other"
_MOVED: Mapping[str, tuple[str, str, float]] = {
    "transport/bytes": ("MiB of targets", ",.2f", 2.0**-20),
    "transport/bytes_between_nodes": ("MiB between nodes", ",.2f", 2.0**-20),
    "transport/bytes_per_token": ("bytes per token", ",.1f", 1.0),
    "transport/slot_occupancy": ("slots held at most", ".1%", 1.0),
    "transport/teacher_wait": ("waited for teachers", ".1%", 1.0),
}
"""Metric → its words, its format, and what it is multiplied by. A teacher's own has `/<teacher>` behind it."""
_WORKERS = "in the workers, at the same time"
_TRANSPORT = "from teachers to student"

Line = tuple[str, ...]
"""name, median, mean, share"""


class TableSink:
    """Collects every step and writes a table per `every` of them, and on close one of those that are left.

    The driver's parts (`timing/<part>`) add up to 100 %; `step` is less than that where the driver also validated
    between steps. Workers' times (`timing/<worker>/<part>`) pass at the same time: their share says how busy a worker
    was over a step, and may exceed it where a worker runs ahead. A metric that a step does not have counts as 0.

    Args:
        every: steps per table.
        emit: takes the table, several lines in one text; by default a message of the log.
    """

    def __init__(self, every: int, emit: Callable[[str], None] | None = None):
        if every < 1:
            raise ValueError(f"every must be 1 or more; got {every}")
        self._every, self._emit = every, emit or get("observe").info
        self._steps: list[int] = []
        self._records: list[Mapping[str, float]] = []

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Takes one step's record; one that times no step (a validation pass) is not of this table."""
        if STEP not in record:
            return
        self._steps.append(step)
        self._records.append(dict(record))
        if step % self._every == 0:
            self._flush()

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        if self._steps:
            first, last, records = self._steps[0], self._steps[-1], self._records
            self._steps, self._records = [], []
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            self._emit(f"where the time went, {steps}\n{step_table(records)}")


def step_table(records: Sequence[Mapping[str, float]]) -> str:
    """Median and mean over some steps' records, as aligned lines of text; each record holds `timing/step`."""
    blocks = {
        "": list(_driver(records)),
        _WORKERS: list(_workers(records)),
        _TRANSPORT: list(_moved(records)),
    }
    lines: list[Line] = [("", "median", "mean", "share")]
    for title, block in blocks.items():
        if title and block:
            lines.append((title, "", "", ""))
        lines += [(f"  {label}" if title else label, *cells) for label, *cells in block]
    # a title may be longer than any name: it has its line to itself
    names = max(len(name) for name, *cells in lines if any(cells))
    columns = [max(len(line[column]) for line in lines) for column in (1, 2, 3)]
    return "\n".join(
        "  ".join([name.ljust(names), *(cell.rjust(width) for cell, width in zip(cells, columns))]).rstrip()
        for name, *cells in lines
    )


def _driver(records: Sequence[Mapping[str, float]]) -> Iterator[Line]:
    """The parts, longest first and what no part covers last, then the whole step."""
    names = {name for record in records for name in record if name.startswith("timing/") and name.count("/") == 1}
    means = {name: fmean(_series(records, name)) for name in names}
    total = sum(mean for name, mean in means.items() if name != STEP)
    for name in sorted(names, key=lambda name: (name == STEP, name == OTHER, -means[name], name)):
        yield _time(records, name, total)


def _workers(records: Sequence[Mapping[str, float]]) -> Iterator[Line]:
    names = {name for record in records for name in record if name.startswith("timing/") and name.count("/") > 1}
    step = fmean(_series(records, STEP))
    for name in sorted(names):
        yield _time(records, name, step)


def _moved(records: Sequence[Mapping[str, float]]) -> Iterator[Line]:
    named = sorted({name for record in records for name in record if name.startswith("transport/")})
    for base, (label, form, factor) in _MOVED.items():
        for name in named:
            if name == base or name.startswith(f"{base}/"):
                series = [factor * value for value in _series(records, name)]
                teacher = name.removeprefix(base).removeprefix("/")
                words = f"{label}, {teacher}" if teacher else label
                yield words, format(median(series), form), format(fmean(series), form), ""


def _time(records: Sequence[Mapping[str, float]], name: str, whole: float) -> Line:
    """Seconds as milliseconds, and the mean's share of `whole`."""
    series = _series(records, name)
    share = f"{fmean(series) / whole:.1%}" if whole > 0 else ""
    times = (f"{1000 * seconds:,.1f} ms" for seconds in (median(series), fmean(series)))
    return name.removeprefix("timing/"), *times, share


def _series(records: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [record.get(name, 0.0) for record in records]
