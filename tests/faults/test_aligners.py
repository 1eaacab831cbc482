"""Aligners that are killed or stopped (R8) are replaced, and no bit changes."""

import os
import signal

import pytest

from tests.faults.conftest import STEPS, assert_same_student
from tests.helpers.command import records

LENGTH = (f"train.steps={STEPS}", f"schedule.steps={STEPS}", "evaluate.every=60", "prefetch.depth=2")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_aligner_is_replaced_and_no_bit_changes(disturb, undisturbed, number):
    expected = undisturbed(*LENGTH)
    with disturb(*LENGTH, "faults.stopped_s=2") as run:
        os.kill(run.actors["aligner-0"], number)
        assert run.end() == 0, run.text
    assert "aligner-0 is replaced (1 of faults.aligner_restarts=10)" in run.text
    assert_same_student(run.run, expected)
    last = [record for record in records(run.run) if "train/loss" in record][-1]
    assert last["faults/aligner_restarts"] == 1


def test_without_a_budget_a_dead_aligner_ends_the_run(disturb):
    with disturb(*LENGTH, "faults.aligner_restarts=0") as run:
        os.kill(run.actors["aligner-0"], signal.SIGKILL)
        assert run.end() == 1, run.text
    (error,) = run.errors
    assert "aligner-0" in error
    assert "faults.aligner_restarts=0" in error
