"""The signals with which schedulers stop a run: the step is finished and saved, and --resume continues. And an error."""

import os
import signal

import pytest

from tests.cli.test_signals import PROMISE_S, training
from tests.helpers.command import distill_rl, series

pytestmark = pytest.mark.cli


@pytest.fixture(autouse=True)
def heard():
    """SIGHUP is not ignored, as it is below `nohup`; a run ignores what it inherits as ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_stop_signal_finishes_the_step_saves_and_exits_85(material, tmp_path):
    """SIGTERM stops the run, SIGUSR1 and SIGHUP the resumed run."""
    before: set[str] = set()
    for number, resume in ((signal.SIGTERM, ()), (signal.SIGUSR1, ("--resume",)), (signal.SIGHUP, ("--resume",))):
        with training(material, tmp_path, *resume) as (process, run, log):
            os.killpg(process.pid, number)  # to every process of the job, as a scheduler does
            assert process.wait(timeout=2 * PROMISE_S) == 85, log.read_text()
        last = series(run, "train/loss")[-1][0]
        saved = {path.name for path in (run / "checkpoints").iterdir()}
        assert saved - before == {f"step-{last}"}
        assert f"after step {last}" in log.read_text()
        before = saved
    more = (f"train.steps={last + 2}", "aligner.workers=0")
    ended = distill_rl("train", "-c", tmp_path / "tiny.yaml", *more, "--resume")
    assert ended.code == 0, ended.err
    assert [step for step, _ in series(run, "train/loss")] == list(range(1, last + 3))


def test_a_worker_exception_ends_the_run_with_name_and_cause(material, tmp_path):
    settings = ("optimizer.lr=1e30", "schedule.warmup_steps=0", "aligner.workers=0")
    ended = distill_rl("train", "-c", material.config(tmp_path), *settings)
    assert ended.code == 1
    assert len(ended.errors) == 1
    assert "student-dp0-tp0" in ended.errors[0]
    assert "must be finite" in ended.errors[0]
    assert "Traceback" not in ended.err
    assert "Traceback" in (tmp_path / "runs" / "tiny" / "logs" / "latest" / "driver.log").read_text()
