from __future__ import annotations

import pytest

from distill_rl.observe.timing import StepTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timer(clock: Clock) -> StepTimer:
    return StepTimer(clock)


def seconds(timer: StepTimer) -> dict[str, float]:
    return {name: metric.value for name, metric in timer.flush().items()}


def test_parts_and_other_add_up_to_the_step(timer: StepTimer, clock: Clock) -> None:
    with timer.step(1):
        clock.pass_(1)
        with timer.part("teacher_wait"):
            clock.pass_(2)
        with timer.part("student"):
            clock.pass_(4)
        clock.pass_(8)
    assert seconds(timer) == {"timing/teacher_wait": 2, "timing/student": 4, "timing/step": 15, "timing/other": 9}


def test_nested_parts_are_counted_once(timer: StepTimer, clock: Clock) -> None:
    with timer.step(1), timer.part("student"):
        clock.pass_(1)
        with timer.part("fetch"):
            clock.pass_(2)
    assert seconds(timer) == {"timing/student": 1, "timing/fetch": 2, "timing/step": 3, "timing/other": 0}


def test_a_part_entered_twice_adds_up(timer: StepTimer, clock: Clock) -> None:
    with timer.step(1):
        for _ in range(2):
            with timer.part("student"):
                clock.pass_(3)
    assert seconds(timer)["timing/student"] == 6


def test_a_part_between_steps_is_not_in_the_step(timer: StepTimer, clock: Clock) -> None:
    with timer.part("checkpoint"):
        clock.pass_(5)
    with timer.step(2):
        clock.pass_(1)
    assert seconds(timer) == {"timing/checkpoint": 5, "timing/step": 1, "timing/other": 1}


def test_a_step_that_follows_another_is_timed_from_its_end(timer: StepTimer, clock: Clock) -> None:
    with timer.step(1):
        clock.pass_(1)
    timer.flush()
    clock.pass_(2)
    with timer.step(2, follows=True), timer.part("student"):
        clock.pass_(4)
    assert seconds(timer) == {"timing/student": 4, "timing/other": 2, "timing/step": 6}
    clock.pass_(8)
    with timer.step(3):
        clock.pass_(1)
    assert seconds(timer)["timing/step"] == 1


def test_flush_resets_the_timer(timer: StepTimer, clock: Clock) -> None:
    with timer.step(1):
        clock.pass_(1)
    timer.flush()
    assert timer.flush() == {}


def test_a_step_that_raises_leaves_the_timer_usable(timer: StepTimer, clock: Clock) -> None:
    def step_that_fails() -> None:
        with timer.step(1), timer.part("student"):
            clock.pass_(1)
            raise KeyError

    with pytest.raises(KeyError):
        step_that_fails()
    with timer.step(2):
        clock.pass_(2)
    assert seconds(timer) == {"timing/step": 2, "timing/other": 2}


def test_nested_steps_are_refused(timer: StepTimer) -> None:
    with timer.step(1), pytest.raises(RuntimeError, match="step 2 was started inside"), timer.step(2):
        pass


def test_cpu_time_counts_from_the_first_step_and_is_reset_by_a_flush():
    clock = iter(range(100))
    timer = StepTimer(cpu_clock=lambda: next(clock) * 10.0)
    assert timer.flush() == {}
    for _ in range(2):
        with timer.step(1):
            pass
        assert timer.flush()["timing/driver/cpu"].value == 10
