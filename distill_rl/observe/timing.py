"""Measures where the driver's wall time goes during a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
        self._inside: list[float] = []
        """One entry per open block: the seconds covered by the blocks inside it so far."""

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Times one optimizer step while the block runs; a step that raises is not counted.

        Args:
            step: its number, for the error message.

        Raises:
            RuntimeError: a step or a part is still open.
        """
        if self._inside:
            raise RuntimeError(f"step {step} was started inside another step or part")
        if self._cpu_clock is not None and self._cpu_since is None:
            self._cpu_since = self._cpu_clock()
        with self._block() as measured:
            yield
        total, covered = measured
        self._add("step", total)
        self._add("other", total - covered)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times one part while the block runs, without the parts inside it; a part that raises is not counted.

        If a part is entered several times before a flush, its times are added.

        Args:
            name: the metric will be `timing/<name>`.
        """
        with self._block() as measured:
            yield
        total, covered = measured
        self._add(name, total - covered)

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
    def _block(self) -> Iterator[list[float]]:
        """Measures the block; yields a list that afterwards holds its seconds and those of the blocks inside it.

        The seconds also count as covered for the block around it. A block that raises is closed as well, so that a
        caller who recovers can go on measuring.
        """
        measured: list[float] = []
        self._inside.append(0.0)
        start = self._clock()
        try:
            yield measured
        finally:
            total = self._clock() - start
            covered = self._inside.pop()
            if self._inside:
                self._inside[-1] += total
            measured += [total, covered]

    def _add(self, name: str, seconds: float) -> None:
        """Adds seconds to the metric `timing/<name>` of the next flush."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
