from __future__ import annotations

import sys

import pytest

from distill_rl.config.schema import Config, ScheduleConfig, TrainConfig
from distill_rl.run.steps import Pace, settled
from distill_rl.student.optim import Schedule


def chosen(first_s: float, each_s: float, *, minutes: float, most: int = sys.maxsize) -> tuple[int, int]:
    """Steps that were taken when the last one was chosen, and the choice; every step takes `each_s`, the first `first_s`."""
    now = 100.0
    pace = Pace(minutes, most=most, clock=lambda: now)
    pace.begin()
    for done in range(1, 10_000):
        now += first_s if done == 1 else each_s
        last = pace.last_step(done)
        if last is not None:
            return done, last
    raise AssertionError("it never chooses")


@pytest.mark.parametrize(
    ("first_s", "each_s", "minutes", "most", "expected"),
    [
        (1.0, 1.0, 1.0, sys.maxsize, (9, 60)),  # a seventh of the time is measured
        (21.0, 1.0, 1.0, sys.maxsize, (3, 40)),  # the first step does not count, but its time has passed
        (1.0, 0.5, 1.0, sys.maxsize, (17, 119)),
        (1.0, 40.0, 1.0, sys.maxsize, (3, 3)),  # no time is left
        (90.0, 30.0, 1.0, sys.maxsize, (3, 3)),
        (1.0, 0.01, 60.0, 100, (15, 115)),  # the run ends earlier for another reason, and the loader sees to that
    ],
)
def test_the_last_step_follows_from_the_speed_of_the_first(first_s, each_s, minutes, most, expected):
    assert chosen(first_s, each_s, minutes=minutes, most=most) == expected


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("done", "last"), [(9, 60), (2, 40), (3, 3), (9, 9)])
@pytest.mark.parametrize("fixed", [None, 50])
def test_the_settled_run_has_the_rates_that_were_taken_before_the_choice(kind, done, last, fixed):
    """The repeated run is the same bit for bit only if its first rates are those of the run that did not know its end."""
    before = ScheduleConfig(kind=kind, warmup_steps=4, min_lr_ratio=0.3, steps=fixed)
    config = Config(schedule=before, train=TrainConfig(minutes=1.0, epochs=5.0))
    after = settled(config, done=done, last=last)
    endless = Schedule(before, peak=0.3, total_steps=sys.maxsize)
    repeated = Schedule(after.schedule, peak=0.3, total_steps=last)
    assert [repeated(step) for step in range(1, done + 1)] == [endless(step) for step in range(1, done + 1)]
    assert (after.train.steps, after.train.minutes, after.train.epochs) == (last, None, 5.0)
    if kind != "constant" and fixed is None and last - done > 5:
        assert repeated(last) < 0.5 * 0.3, "the schedule ends with the run"
