"""Teachers that are killed, stopped or lost for good (R6, R7) do not affect the student."""

import os
import signal

import pytest

from tests.cli.test_routed_teachers import write_domains
from tests.faults.conftest import STEPS, assert_resumes, assert_same_student
from tests.helpers.command import records, series

pytestmark = pytest.mark.cli

LENGTH = (f"train.steps={STEPS}", f"schedule.steps={STEPS}", "evaluate.every=60")
TWO = ("{name: big, model: %s/teacher, dtype: fp32%s}", "{name: other, model: %s/teacher2, dtype: fp32%s}")


def two_teachers(material, first: str = "", second: str = "") -> str:
    """The setting for two teachers; the second is a copy of the first with other weights."""
    from tests.helpers.models import write_tiny_model

    if not (material.root / "teacher2").exists():
        write_tiny_model(material.root / "teacher2", hidden=32, seed=9)
    teachers = (text % (material.root, more) for text, more in zip(TWO, (first, second)))
    return f"teachers=[{','.join(teachers)}]"


def by_row(material) -> tuple[str, ...]:
    """Settings for two teachers that are asked for rows of different domains, and for no row of a third."""
    first, second = ", where: {domain: [maths, physics]}", ", where: {domain: code}, weight_column: use"
    write_domains(material.root / "domains.jsonl")
    return two_teachers(material, first, second), f"data.path={material.root}/domains.jsonl"


@pytest.mark.parametrize("transport", ["object_store", "shared_memory"])
def test_a_teacher_killed_idle_or_busy_is_replaced_without_a_trace(disturb, undisturbed, transport):
    settings = (*LENGTH, f"transport={transport}", "prefetch.depth=2")
    expected = undisturbed(*settings)
    with disturb(*settings) as run:
        run.kill_idle("big/dp0-tp0")
        run.wait_for_output("restarting big/dp0-tp0 (1 of faults.teacher_restarts=3)")
        steps = run.steps
        run.look_again_after(steps)
        run.kill_busy("big/dp0-tp0.1")
        assert run.end() == 0, run.text
        assert "restarting big/dp0-tp0 (2 of" in run.text
        assert "Traceback" not in run.text
    assert_same_student(run.run, expected)
    last = [record for record in records(run.run) if "train/loss" in record][-1]
    assert last["faults/teacher_restarts"] == 2


@pytest.mark.parametrize("relays", ["off", "on"])
def test_a_dead_rank_restarts_its_replica_only(disturb, undisturbed, material, relays):
    teachers = two_teachers(material, ", parallel: {dp: 2, tp: 2}", ", export: hidden")
    few = ("train.steps=40", "schedule.steps=40", "evaluate.every=20")
    settings = (*few, teachers, "student.parallel.dp=2", "train.micro_batch_size=1", "transport=shared_memory")
    expected = undisturbed(*settings)
    with disturb(*settings, f"ray.relays={relays}") as run:
        before = dict(run.actors)
        run.kill_busy("big/dp1-tp1")
        run.wait_for_output("restarting big/dp1-tp0, big/dp1-tp1 (1 of")
        run.look_again_after(run.steps)
        assert {run.actors[f"big/dp1-tp{rank}.1"] for rank in (0, 1)}.isdisjoint(before.values())
        assert run.actors["big/dp0-tp0"] == before["big/dp0-tp0"]
        assert run.end() == 0, run.text
    assert_same_student(run.run, expected)


def test_a_stopped_teacher_counts_as_dead(disturb, undisturbed):
    settings = (*LENGTH, "faults.stopped_s=2")
    expected = undisturbed(*LENGTH)
    with disturb(*settings) as run:
        os.kill(run.actors["big/dp0-tp0"], signal.SIGSTOP)
        run.wait_for_output("it was stopped (SIGSTOP) for 2 s, and killed")
        assert run.end() == 0, run.text
    assert_same_student(run.run, expected)


def test_without_a_budget_a_dead_teacher_ends_a_resumable_run(disturb, undisturbed):
    settings = (*LENGTH, "faults.teacher_restarts=0", "checkpoint.every=1")
    expected = undisturbed(*LENGTH)
    with disturb(*settings) as run:
        run.wait_for_checkpoint()
        run.kill_busy("big/dp0-tp0")
        assert run.end() == 1, run.text
        (error,) = run.errors
        for word in (
            "teacher big",
            "faults.teacher_restarts=0",
            "big/dp0-tp0 on ",
            "its process died during",
            "--resume",
        ):
            assert word in error
    assert_resumes(run, *settings)
    assert_same_student(run.run, expected)


def test_a_lost_teacher_can_be_dropped_and_the_others_reweighted(disturb, material):
    teachers = two_teachers(material, ", weight: 3.0")
    settings = (*LENGTH, teachers, "faults.teacher_restarts=0", "faults.lost_teacher=drop_and_reweight")
    with disturb(*settings) as run:
        run.kill_busy("big/dp0-tp0")
        run.wait_for_output("lost      teacher big; going on with other")
        assert run.end() == 0, run.text
    losses = {record["step"]: record for record in records(run.run) if "train/loss" in record}
    alone = [record for record in losses.values() if "faults/teachers_lost" in record]
    assert [record["step"] for record in alone] == list(range(alone[0]["step"], STEPS + 1)), (
        "recorded at every step from then on"
    )
    for step, record in losses.items():
        if "train/kl_loss/big" in record:
            assert step <= alone[0]["step"], "it may die on a later batch while the student takes this step"
            if step == alone[0]["step"]:  # perhaps only a part of it has both teachers
                continue
            expected = 0.75 * record["train/kl_loss/big"] + 0.25 * record["train/kl_loss/other"]
        else:
            assert step >= alone[0]["step"]
            expected = record["train/kl_loss/other"]
        assert record["train/kl_loss"] == pytest.approx(expected, rel=1e-6)
        assert 2.0 < record["train/nll_loss"] < 7.0, "CE is recorded with and without the first teacher"
    assert len(series(run.run, "validation/kl_loss")) >= 2
    driver_log = (run.run / "logs" / "latest" / "driver.log").read_text()
    assert driver_log.count("lost, and without targets from now on: big") >= len(alone)


def test_a_killed_teacher_of_some_rows_is_replaced_without_a_trace(disturb, undisturbed, material):
    settings = (*LENGTH, *by_row(material), "prefetch.depth=2")
    expected = undisturbed(*settings)
    with disturb(*settings) as run:
        run.kill_busy("big/dp0-tp0")
        run.wait_for_output("restarting big/dp0-tp0 (1 of")
        assert run.end() == 0, run.text
    assert_same_student(run.run, expected)


def test_rows_of_a_lost_teacher_are_trained_on_with_ce_alone(disturb, material):
    settings = (*LENGTH, *by_row(material), "faults.teacher_restarts=0", "faults.lost_teacher=drop_and_reweight")
    with disturb(*settings) as run:
        run.kill_busy("big/dp0-tp0")
        run.wait_for_output("lost      teacher big; going on with other")
        assert run.end() == 0, run.text
    steps = [record for record in records(run.run) if "train/loss" in record]
    alone = [record for record in steps if "train/kl_loss/other" in record and "train/kl_loss/big" not in record]
    assert alone
    shares = [record["train/taught/other"] for record in alone]
    assert 0 < sum(shares) / len(shares) < 0.4, "a quarter of the rows, and not all of them"
    assert all(record["train/kl_loss"] == record["train/kl_loss/other"] for record in alone)
    assert all(2.0 < record["train/nll_loss"] < 7.0 for record in steps), "over all rows"
