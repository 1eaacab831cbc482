"""Runs that end after they have taken the run directory and before a step: the corrected command simply starts."""

import shlex
import signal

import pytest

from distill_rl.config.load import load_config
from tests.helpers.command import distill_rl, running, series, until

pytestmark = pytest.mark.cli


@pytest.mark.long_run
def test_after_late_refusals_the_corrected_command_starts(material, cluster, tmp_path):
    config, run, log = material.config(tmp_path), tmp_path / "runs" / "tiny", tmp_path / "log"
    common = ("train", "-c", config, "train.steps=2", "aligner.workers=0", "data.validation.fraction=0")
    refusals = {
        "needs a valid checkpoint": ("--resume",),
        "placement: the actors' resources must be free": ("aligner.workers=30", "ray.placement_timeout_s=1"),
        "must be a folder with a checkpoint": ("--resume", str(tmp_path / "step-3")),
    }
    for number, (words, settings) in enumerate(refusals.items(), start=1):
        ended = distill_rl(*common, *settings, cluster=None if "--resume" in settings else cluster)
        assert ended.code == 2, ended.err
        (error,) = ended.errors
        assert words in error
        assert (run / "logs" / f"attempt_{number}").exists(), "it had the run directory"

    for number in (signal.SIGINT, signal.SIGKILL):
        with running(*common, log=log) as process:
            until(lambda: "loading   the models" in log.read_text() or process.poll() is not None, "a start")
            process.send_signal(number)
            assert process.wait(timeout=60) in (130, -9)
        if number == signal.SIGINT:
            *_, stopped, again, _ = log.read_text().splitlines()
            assert stopped == "stopped   no step was trained, nothing is lost"
            assert shlex.split(again)[-3:] == ["train.steps=2", "aligner.workers=0", "data.validation.fraction=0"]

    ended = distill_rl(*common, "optimizer.lr=0.5", cluster=cluster)
    assert ended.code == 0, ended.err
    assert [step for step, _ in series(run, "train/loss")] == [1, 2]
    assert load_config(run / "config.yaml").optimizer.lr == 0.5
    assert len(list((run / "logs").glob("attempt_*"))) == 6, "the logs of the refused starts are kept"
    assert "in use" in distill_rl(*common).errors[0]
