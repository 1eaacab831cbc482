"""Student ranks killed or stopped (R9, R10): the run ends at once, names rank and cause, and can be resumed."""

import os
import signal

import pytest

from tests.faults.conftest import STEPS, assert_resumes, assert_same_student

LENGTH = (f"train.steps={STEPS}", f"schedule.steps={STEPS}", "evaluate.every=60", "student.parallel.dp=2")
CHECKPOINTS = ("checkpoint.every=1", "faults.stopped_s=2")


@pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGKILL, "Worker unexpectedly exits"), (signal.SIGSTOP, "it was stopped (SIGSTOP) for 2 s, and killed")],
)
def test_a_lost_rank_ends_the_run_with_stacks_and_it_can_be_resumed(disturb, undisturbed, number, cause):
    expected = undisturbed(*LENGTH)
    with disturb(*LENGTH, *CHECKPOINTS) as run:
        run.wait_for_checkpoint()
        os.kill(run.actors["student-dp1-tp0"], number)
        assert run.end() == 1, run.text
    (error,) = run.errors
    for word in ("student-dp1-tp0 on ", "its process died during ", cause, "--resume"):
        assert word in error, error
    logs = run.run / "logs" / "latest"
    stack = (logs / "stacks" / "student-dp0-tp0.txt").read_text()
    assert "most recent call first" in stack
    assert (logs / "big-dp0-tp0.err").exists(), "the output of the other workers is kept"
    assert_resumes(run, *LENGTH, *CHECKPOINTS)
    assert_same_student(run.run, expected)


def test_the_error_contains_the_last_words_of_the_rank(disturb):
    with disturb(*LENGTH) as run:
        os.kill(run.actors["student-dp1-tp0"], signal.SIGABRT)  # the fault handler prints the stack
        assert run.end() == 1, run.text
    (error,) = run.errors
    assert "its last words: " in error
    assert "student-dp1-tp0" in error


def test_a_long_wait_is_reported_with_the_awaited_worker(disturb):
    with disturb(*LENGTH, "faults.report_after_s=1", "faults.stopped_s=60") as run:
        os.kill(run.actors["student-dp1-tp0"], signal.SIGSTOP)
        run.wait_for_output("waiting 1 s for step ")
        run.wait_for_output("student-dp1-tp0 on ")
        run.wait_for_output(" is stopped")
        os.kill(run.actors["student-dp1-tp0"], signal.SIGCONT)
        assert run.end() == 0, "a worker that continues in time does no harm"
