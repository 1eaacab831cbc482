"""A function in a process of its own answers, or fails in one line; the process is gone either way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from distill_rl.errors import ConfigError, WorkerError
from distill_rl.system.processes import call_in_child


@pytest.fixture(autouse=True)
def nothing_left():
    before = set(multiprocessing.active_children())  # other tests keep ranks
    yield
    assert set(multiprocessing.active_children()) <= before


def _pid_and(*values: int) -> tuple[int, ...]:
    return os.getpid(), *values


def _refuse() -> None:
    raise ConfigError("student.model", "must be small", 7)


def _sleep() -> None:
    time.sleep(600)


def _die(how: int) -> None:
    os.kill(os.getpid(), how)


def test_result_comes_from_another_process():
    pid, *values = call_in_child("it", _pid_and, 1, 2, deadline_s=60)
    assert values == [1, 2]
    assert pid != os.getpid()


def test_an_exception_is_raised_here():
    with pytest.raises(ConfigError, match=r"student\.model: must be small; got 7"):
        call_in_child("it", _refuse, deadline_s=60)


def test_a_process_without_answer_is_killed_at_the_deadline():
    with pytest.raises(WorkerError, match=r"^student.model: .* must answer within 0.5 s; got no answer; .*busy$"):
        call_in_child("student.model", _sleep, deadline_s=0.5)


def test_death_is_reported_before_the_deadline():
    with pytest.raises(
        WorkerError, match=r"^student.model: .* got exit code -9 without an answer; .*memory runs out: .*$"
    ):
        call_in_child("student.model", _die, int(signal.SIGKILL), deadline_s=600)
