"""Workers killed before the first step: they are started again like any other, within the same budgets."""

import contextlib
import os
import signal
import threading

import psutil
import pytest

from tests.faults.conftest import RESTART_S, assert_same_student
from tests.helpers.command import actor_pid, distill_rl, running, series, until

LENGTH = ("train.steps=6", "schedule.steps=6", "student.parallel.dp=2", "aligner.workers=2")
ROLES = {"StudentWorker": "student", "TeacherWorker": "teacher", "AlignerWorker": "aligner"}
COMING_UP, LOADING = "starting  student", "loading   the models"


def kill(process: psutil.Popen, log, worker: str, phase: str) -> None:
    """Kills a worker of this class as soon as it is there, in this phase of the start."""

    def is_there() -> bool:
        try:
            os.kill(actor_pid(process.pid, worker), signal.SIGKILL)
        except AssertionError:
            return False
        return True

    until(lambda: phase in log.read_text() or process.poll() is not None, phase)
    until(is_there, worker)


@pytest.mark.parametrize(("worker", "phase"), [("StudentWorker", COMING_UP), *((worker, LOADING) for worker in ROLES)])
def test_a_worker_that_is_killed_at_the_start_is_replaced_and_no_bit_changes(
    material, tmp_path, undisturbed, worker, phase
):
    expected, log = undisturbed(*LENGTH), tmp_path / "log"
    with running("train", "-c", material.config(tmp_path), *LENGTH, log=log) as process:
        kill(process, log, worker, phase)
        assert process.wait(timeout=2 * RESTART_S) == 0, log.read_text()
    run, text = tmp_path / "runs" / "tiny", log.read_text()
    assert f"(1 of faults.{ROLES[worker]}_restarts=" in text
    assert "died during loading the models" in text or (phase == COMING_UP and "died during the start" in text)
    assert series(run, f"faults/{ROLES[worker]}_restarts")[-1][1] == 1
    assert_same_student(run, expected)


def test_a_rank_that_is_killed_while_rings_open_and_the_checkpoint_loads_is_replaced(material, tmp_path, undisturbed):
    settings = (*LENGTH, "evaluate.every=3")
    expected, log, config = undisturbed(*settings), tmp_path / "log", material.config(tmp_path)
    first = distill_rl("train", "-c", config, *settings, "train.steps=3")
    assert first.code == 0, first.err
    with running("train", "-c", config, *settings, "--resume", log=log) as process:
        kill(process, log, "StudentWorker", "transport ")
        assert process.wait(timeout=2 * RESTART_S) == 0, log.read_text()
    run = tmp_path / "runs" / "tiny"
    assert series(run, "faults/student_restarts")[-1][1] == 1
    assert_same_student(run, expected)


def test_without_a_budget_the_start_ends_with_one_line_that_says_to_start_again(material, tmp_path):
    log = tmp_path / "log"
    settings = (*LENGTH, "faults.student_restarts=0")
    with running("train", "-c", material.config(tmp_path), *settings, log=log) as process:
        kill(process, log, "StudentWorker", LOADING)
        assert process.wait(timeout=2 * RESTART_S) == 1
    (error,) = [line for line in log.read_text().splitlines() if line.startswith("distill-rl: error:")]
    assert "student-dp" in error
    assert error.endswith("no step is recorded: start it again")


def start_with_a_slow_ray(material, folder, until_told, *settings) -> tuple[int, str]:
    """The exit code and output of a run whose raylet is stopped, as if the machine was busy, until its output has this text.

    Ray waits 30 s for its node and lets nobody change that.
    """
    log, ended = folder / "log", threading.Event()

    def stop_raylet(root: int) -> None:
        while not ended.wait(0.002) and until_told not in log.read_text():
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(root).children(recursive=True):
                    if child.name() == "raylet":
                        child.suspend()

    with running("train", "-c", material.config(folder), *settings, log=log) as process:
        thread = threading.Thread(target=stop_raylet, args=(process.pid,), daemon=True)
        thread.start()
        try:
            return process.wait(timeout=2 * RESTART_S), log.read_text()
        finally:
            ended.set()
            thread.join(30)


def test_a_ray_that_is_slow_to_start_is_started_again(material, tmp_path):
    code, text = start_with_a_slow_ray(material, tmp_path, "starting  Ray again")
    assert code == 0, text
    assert "starting  Ray again: the machine was too busy for it to start within 30 s" in text


def test_a_ray_that_stays_slow_is_said(material, tmp_path):
    code, text = start_with_a_slow_ray(material, tmp_path, "never", "ray.start_timeout_s=1")
    assert code == 1
    (error,) = [line for line in text.splitlines() if line.startswith("distill-rl: error:")]
    assert "Ray: must start on this machine; got " in error
    assert "start again when the machine is less busy, or raise ray.start_timeout_s" in error
