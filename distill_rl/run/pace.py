"""How many steps a run takes that is to train for `train.minutes`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from distill_rl.config.schema import Config

MEASURED_SHARE = 0.15
"""Share of the time, or of the most steps that a run may take, during which its speed is measured."""
_FEWEST = 3
"""Steps that a run takes at least, so that its speed is known. The first one does not count: it waits for the first batch."""


class Pace:
    """Chooses the last step of a run from the speed of its first steps, so that all of them take a given time.

    Call `begin` before the first step and `last_step` after every step. Whatever comes between two steps counts as
    part of them.

    Args:
        minutes: for all steps together.
        most: steps that the run may take.
        clock: monotonic seconds from any origin.
    """

    def __init__(self, minutes: float, *, most: int, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._most, self._clock = 60 * minutes, most, clock
        self._start = self._after_first = 0.0

    def begin(self) -> None:
        """Starts the clock."""
        self._start = self._clock()

    def last_step(self, done: int) -> int | None:
        """The number of steps in all, at least `done`; None as long as too little is measured.

        Args:
            done: steps that have been taken, from 1.
        """
        now = self._clock()
        if done == 1:
            self._after_first = now
        left = self._seconds - (now - self._start)
        long_enough = left <= (1 - MEASURED_SHARE) * self._seconds or done >= MEASURED_SHARE * self._most
        if done < _FEWEST or not long_enough:
            return None
        per_step = (now - self._after_first) / (done - 1)
        return done + round(min(max(left, 0.0) / max(per_step, 1e-9), self._most))


def settled(config: Config, *, done: int, last: int) -> Config:
    """The configuration of a run whose last step has been chosen: one that takes the same steps without `train.minutes`.

    Until the choice the learning rate was that of a run without end, which stays at its peak after the warm-up; and a
    run that ends within its warm-up keeps the rates of the longer one. A schedule with an end of its own
    (`schedule.steps`) is not changed.

    Args:
        done: steps that have been taken.
        last: the last step.
    """
    schedule = config.schedule
    if schedule.steps is None and last < schedule.warmup_steps:
        schedule = replace(schedule, steps=schedule.warmup_steps, hold_steps=0)
    elif schedule.steps is None and schedule.kind != "constant":
        schedule = replace(schedule, hold_steps=max(schedule.hold_steps, done - schedule.warmup_steps))
    return replace(config, schedule=schedule, train=replace(config.train, steps=last, minutes=None))
