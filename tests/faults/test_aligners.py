"""Aligners that are killed or stopped (R8) are replaced, and no bit changes."""

import os
import signal

import pytest
import torch

from tests.cli.test_train import weights
from tests.faults.conftest import STEPS, assert_same_student
from tests.helpers.command import actor_pid, distill_rl, records, running, series, until

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


def test_cross_tokenizer_aligners_killed_twice_change_no_bit(material, tmp_path):
    """Whatever the killed aligner was working on is done again by its replacement."""
    steps = ("train.steps=80", "schedule.steps=80")
    calm, hit = tmp_path / "calm" / "runs" / "tiny", tmp_path / "hit" / "runs" / "tiny"
    ended = distill_rl("train", "-c", material.config(tmp_path / "calm", "foreign"), *steps, "aligner.workers=0")
    assert ended.code == 0, ended.err
    config, log = material.config(tmp_path / "hit", "foreign"), tmp_path / "log"
    with running("train", "-c", config, *steps, "aligner.workers=2", log=log) as process:
        for step in (2, 12):
            until(lambda step=step: len(series(hit, "train/loss")) >= step or process.poll() is not None, "a step")
            os.kill(actor_pid(process.pid, "AlignerWorker"), signal.SIGKILL)
        assert process.wait(timeout=120) == 0, log.read_text()
    assert series(hit, "train/loss") == series(calm, "train/loss")
    assert "is replaced" in (hit / "logs" / "latest" / "driver.log").read_text()
    assert all(torch.equal(ours, weights(calm)[name]) for name, ours in weights(hit).items())
