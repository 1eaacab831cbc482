"""Where the wall time of a step goes, as the driver sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distill_rl.observe.metrics import Metric


class StepTimer:
    """Measures steps and their named parts, in seconds of a monotonic clock.

        with timer.step(step):
            with timer.part("student"):
                ...
        observer.log(step, ..., timer.flush())

    A part's time excludes the parts inside it, and what no part covers is `timing/other`: the parts of
    a step add up to `timing/step` exactly. A part entered outside a step (a checkpoint, a validation
    pass) is reported by the next flush and does not belong to `timing/step`.

    Time that passes in other processes while the driver waits is no part of this sum. Workers report it
    under a name with one more slash, `timing/<worker>/<part>`, and the report draws it apart.

    Args:
        clock: seconds from any origin; tests pass their own.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inside: list[float] = []
        """one entry per open block: the seconds already covered by blocks inside it"""

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Times one optimizer step. `step` only serves the error message.

        Raises:
            RuntimeError: a step or a part is still open.
        """
        if self._inside:
            raise RuntimeError(f"step {step} was started inside another step or part")
        with self._block() as measured:
            yield
        total, covered = measured
        self._add("step", total)
        self._add("other", total - covered)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times one part; a part entered several times before a flush adds up."""
        with self._block() as measured:
            yield
        total, covered = measured
        self._add(name, total - covered)

    def flush(self) -> dict[str, Metric]:
        """What was measured since the last flush, as `timing/<part>` and `timing/step`; merges as a mean."""
        metrics = {f"timing/{name}": Metric(seconds) for name, seconds in self._seconds.items()}
        self._seconds = {}
        return metrics

    @contextmanager
    def _block(self) -> Iterator[list[float]]:
        """Yields a list that holds, once the block has ended, its seconds and those of the blocks inside it.

        A block that raises reports nothing, but closes, so that a caller that goes on can go on measuring.
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
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
