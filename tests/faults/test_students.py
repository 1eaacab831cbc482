"""Student ranks killed or stopped (R9, R10, R28): the run goes on from the newest checkpoint, or ends at once and can be resumed."""

import os
import re
import signal
from operator import mul

import pytest

from tests.faults.conftest import STEPS, assert_resumes, assert_same_student
from tests.helpers.command import records, series, until

LENGTH = (f"train.steps={STEPS}", f"schedule.steps={STEPS}", "evaluate.every=60", "student.parallel.dp=2")
CHECKPOINTS = ("checkpoint.every=1", "faults.stopped_s=2")
NO_RESTART = "faults.student_restarts=0"
STUDENTS = ("student-dp0-tp0", "student-dp1-tp0")
CAUSES = [
    (signal.SIGKILL, "Worker unexpectedly exits"),
    (signal.SIGSTOP, "it was stopped (SIGSTOP) for 2 s, and killed"),
]


@pytest.mark.parametrize(("number", "cause", "relays"), [(*CAUSES[0], "off"), (*CAUSES[1], "on")])
def test_a_lost_rank_is_replaced_and_no_bit_changes(disturb, undisturbed, number, cause, relays):
    expected = undisturbed(*LENGTH)
    with disturb(*LENGTH, *CHECKPOINTS, f"ray.relays={relays}") as run:
        before = run.actors
        run.wait_for_checkpoint()
        os.kill(run.actors["student-dp1-tp0"], number)
        run.wait_for_output("restarting the student (1 of faults.student_restarts=3): student-dp1-tp0 on ")
        run.wait_for_output("going on  from ")
        run.look_again_after(run.steps)
        kept = {name: pid for name, pid in before.items() if not name.startswith(STUDENTS)}
        assert kept == {name: run.actors[name] for name in kept}, "teachers and aligners stay"
        assert {f"{name}.1" for name in STUDENTS} <= run.actors.keys()
        assert run.end() == 0, run.text
    assert cause in run.text
    stack = (run.run / "logs" / "latest" / "stacks" / "student-dp0-tp0.txt").read_text()
    assert "most recent call first" in stack
    assert series(run.run, "faults/student_restarts")[-1][1] == 1
    assert_same_student(run.run, expected)


def test_records_of_several_steps_count_every_step_once_after_a_restart(disturb, undisturbed):
    """A record is cut short by a checkpoint, and what was recorded after the one to which the run goes back is recorded again."""
    expected = undisturbed(*LENGTH)
    single = {record["step"]: record for record in records(expected) if "train/steps" in record}
    with disturb(*LENGTH, "checkpoint.every=10", "observe.every=7") as run:
        run.wait_for_checkpoint()
        os.kill(run.actors["student-dp1-tp0"], signal.SIGKILL)
        assert run.end() == 0, run.text
    several = [record for record in records(run.run) if "train/steps" in record]
    first = 1
    for record in several:
        steps = [single[step] for step in range(first, record["step"] + 1)]
        first = record["step"] + 1
        assert record["train/steps"] == len(steps)
        tokens = [step["train/tokens"] for step in steps]
        assert record["train/tokens"] == sum(tokens)
        assert record["align/tokens"] == sum(step["align/tokens"] for step in steps)
        losses = [step["train/loss"] for step in steps]
        assert record["train/loss"] == pytest.approx(sum(map(mul, losses, tokens)) / sum(tokens), rel=1e-12)
        assert record["train/grad_norm"] == steps[-1]["train/grad_norm"]
    assert first == max(single) + 1
    recovered = [record for record in records(run.run) if "timing/recovery" in record]
    assert len(recovered) == 1, "the restart took its seconds once"
    assert recovered[0]["timing/recovery"] > 0


def test_without_a_checkpoint_the_run_begins_again(disturb, undisturbed):
    settings = (*LENGTH, "evaluate.at_start=true")
    expected = undisturbed(*settings)
    with disturb(*settings, "checkpoint.every=0") as run:
        os.kill(run.actors["student-dp0-tp0"], signal.SIGKILL)
        run.wait_for_output("going on  from step 0: there is no checkpoint yet")
        assert run.end() == 0, run.text
    assert_same_student(run.run, expected)


def test_a_teacher_that_is_lost_at_the_same_time_is_replaced_too(disturb, undisturbed):
    expected = undisturbed(*LENGTH)
    with disturb(*LENGTH, *CHECKPOINTS) as run:
        run.wait_for_checkpoint()
        os.kill(run.process.pid, signal.SIGSTOP)
        for name in ("student-dp1-tp0", "big/dp0-tp0"):
            os.kill(run.actors[name], signal.SIGKILL)
        os.kill(run.process.pid, signal.SIGCONT)
        run.wait_for_output("restarting big/dp0-tp0 (1 of faults.teacher_restarts=3)")
        assert run.end() == 0, run.text
    assert "restarting the student (1 of faults.student_restarts=3)" in run.text
    assert_same_student(run.run, expected)


def test_a_rank_that_is_lost_during_a_save_costs_that_checkpoint_only(disturb, undisturbed):
    expected = undisturbed(*LENGTH)
    with disturb(*LENGTH, *CHECKPOINTS, "checkpoint.async_save=false") as run:
        run.wait_for_checkpoint()
        saved = run.run / "checkpoints"
        until(lambda: list(saved.glob(".tmp-step-*")), "a save")
        os.kill(run.actors["student-dp1-tp0"], signal.SIGKILL)
        run.wait_for_output("going on  from ")
        assert run.end() == 0, run.text
    assert not list(saved.glob(".tmp-*"))
    assert_same_student(run.run, expected)


def test_a_rank_that_is_lost_during_validation_validates_again(disturb, undisturbed):
    """Most of the rows are held out, so that validation takes longer than a step."""
    settings = (*LENGTH, "train.steps=20", "schedule.steps=20", "evaluate.every=1", "data.validation.fraction=0.8")
    expected = undisturbed(*settings)
    with disturb(*settings, *CHECKPOINTS) as run:
        run.wait_for_checkpoint()
        step = run.steps + 2
        until(lambda: run.steps >= step, f"step {step}", every_s=0.001)
        os.kill(run.actors["student-dp1-tp0"], signal.SIGKILL)
        run.wait_for_output("restarting the student (1 of faults.student_restarts=3)")
        assert series(run.run, "validation/kl_loss")[-1][0] < run.steps, "it must have died before the validation's end"
        assert run.end() == 0, run.text
    assert_same_student(run.run, expected)


def test_a_rank_that_is_lost_during_the_export_exports_again(disturb, undisturbed):
    settings = (*LENGTH, "train.steps=20", "schedule.steps=20")
    expected = undisturbed(*settings)
    with disturb(*settings, *CHECKPOINTS) as run:
        until(lambda: list(run.run.glob(".export.*")), "the export", every_s=0.001)
        os.kill(run.actors["student-dp0-tp0"], signal.SIGKILL)
        assert not (run.run / "export").exists(), "it must have died before the export's end"
        run.wait_for_output("restarting the student (1 of faults.student_restarts=3)")
        assert run.end() == 0, run.text
    assert not list(run.run.glob(".export.*"))
    assert_same_student(run.run, expected)


def test_a_rank_that_is_lost_when_the_last_step_is_chosen_trains_to_that_step(disturb):
    with disturb(*LENGTH, "train.steps=null", "schedule.steps=null", "train.minutes=0.5", *CHECKPOINTS) as run:
        until(lambda: " in all, by the speed of " in run.text, "the choice of the last step", every_s=0.001)
        os.kill(run.actors["student-dp1-tp0"], signal.SIGKILL)
        run.wait_for_output("restarting the student (1 of faults.student_restarts=3)")
        assert run.end() == 0, run.text
    (last,) = re.findall(r"^steps +([\d,]+) in all", run.text, re.MULTILINE)
    assert run.steps == int(last.replace(",", ""))
    rates = dict(series(run.run, "train/lr"))
    assert rates[run.steps] < rates[run.steps // 2], "the schedule ends with the run"


def test_restarts_have_a_budget_after_which_the_run_ends_and_can_be_resumed(disturb, undisturbed):
    expected, settings = undisturbed(*LENGTH), (*LENGTH, *CHECKPOINTS, "faults.student_restarts=1")
    with disturb(*settings) as run:
        run.wait_for_checkpoint()
        os.kill(run.actors["student-dp1-tp0"], signal.SIGKILL)
        run.wait_for_output("restarting the student (1 of faults.student_restarts=1)")
        run.look_again_after(run.steps)
        os.kill(run.actors["student-dp0-tp0.1"], signal.SIGKILL)
        assert run.end() == 1, run.text
    (error,) = run.errors
    assert "student-dp0-tp0 on " in error
    assert_resumes(run, *settings)
    assert_same_student(run.run, expected)


@pytest.mark.parametrize(("number", "cause"), CAUSES)
def test_a_lost_rank_ends_a_run_without_restarts_with_stacks_and_it_can_be_resumed(disturb, undisturbed, number, cause):
    expected = undisturbed(*LENGTH)
    with disturb(*LENGTH, *CHECKPOINTS, NO_RESTART) as run:
        run.wait_for_checkpoint()
        os.kill(run.actors["student-dp1-tp0"], number)
        assert run.end() == 1, run.text
    (error,) = run.errors
    for word in ("student-dp1-tp0 on ", "its process died during ", cause):
        assert word in error, error
    saved = max(int(folder.name.removeprefix("step-")) for folder in (run.run / "checkpoints").glob("step-*"))
    assert error.endswith(f"--resume continues from the checkpoint of step {saved}")
    logs = run.run / "logs" / "latest"
    stack = (logs / "stacks" / "student-dp0-tp0.txt").read_text()
    assert "most recent call first" in stack
    assert (logs / "big-dp0-tp0.err").exists(), "the output of the other workers is kept"
    assert_resumes(run, *LENGTH, *CHECKPOINTS)
    assert_same_student(run.run, expected)


def test_the_error_contains_the_last_words_of_the_rank(disturb):
    with disturb(*LENGTH, NO_RESTART) as run:
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
