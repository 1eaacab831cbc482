"""`distill-rl follow` beside a run, in a process that knows only its folder."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests.helpers.command import distill_rl, running, series, until

pytestmark = pytest.mark.cli

LONG = ("train.steps=3000", "schedule.steps=3000")


def test_a_run_is_followed_to_its_end(material, cluster, tmp_path):
    config, run = material.config(tmp_path), tmp_path / "runs" / "tiny"
    with running("train", "-c", config, *LONG, log=tmp_path / "log", cluster=cluster) as process:
        until(lambda: len(series(run, "train/loss")) > 3 or process.poll() is not None, "steps")
        before = distill_rl("follow", run, "--once")
        state, step = before.out.splitlines()
        assert state == f"state     running, as process {process.pid} on {os.uname().nodename}"
        assert re.fullmatch(r"step      \d+ of 3000, (\d+:)?\d+:\d\d left at [\d.]+ s per step", step)
        with subprocess.Popen(
            [sys.executable, "-m", "distill_rl", "follow", run], stdout=subprocess.PIPE, text=True
        ) as follower:
            lines = iter(follower.stdout.readline, "")
            assert any(re.match(r"step +\d+/3000 .*loss", line) for line in lines)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=120) == 85
            rest = list(lines)
            assert follower.wait(timeout=60) == 0
    assert any("stopped" in line for line in rest), rest
    assert rest[-1] == "state     ended before its last step\n"


def test_a_run_that_was_killed_and_one_that_has_finished_are_told_apart(straight, tmp_path):
    finished = distill_rl("follow", straight)
    assert finished.code == 0
    assert finished.out.splitlines()[:2] == ["state     finished", "step      8 of 8"]
    refused = shutil.copytree(straight, tmp_path / "refused", symlinks=True)
    (refused / "logs" / "attempt_99").mkdir()
    (refused / "logs" / "attempt_99" / "driver.log").write_text("refused before its first step\n")
    (refused / "logs" / "latest").unlink()
    (refused / "logs" / "latest").symlink_to("attempt_99")
    assert distill_rl("follow", refused).out.splitlines()[1] == "step      8 of 8"
    killed = tmp_path / "killed"
    (killed / "logs").mkdir(parents=True)
    (killed / "logs" / "latest").symlink_to(straight / "logs" / "latest")
    (killed / ".lock").write_text("7 on n7")
    os.utime(killed / ".lock", (0, 0))
    assert "died without a word: process 7 on n7 has given no sign of life for" in distill_rl("follow", killed).out
    several = distill_rl("follow", straight, killed).out.splitlines()
    assert several[0] == "tiny    finished, step 8 of 8"
    assert several[1].startswith("killed  died without a word")
    nothing = distill_rl("follow", tmp_path)
    assert nothing.code == 2
    assert "must be a run directory, in which a run has begun" in nothing.err
