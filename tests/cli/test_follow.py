"""`distill-rl follow` beside a run, in a process that knows only its folder."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

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


SAID = "2026-11-28 19:12:44,911 INFO distill_rl.run: "
STORED = SAID + "stored    71,571 tokens, 0.1 MiB; 0 tokens were already stored\n"
STOPPED = SAID + "stopped   what was computed is stored; run the same command again to continue\n"
STORE = SAID + "store     /targets\n"


def capture_folder(folder: Path, log: str, *, lock: str = "") -> Path:
    """What a capture leaves in STORE/captures/NAME."""
    attempt = folder / "logs" / "attempt_1"
    attempt.mkdir(parents=True)
    (folder / "logs" / "latest").symlink_to("attempt_1")
    (attempt / "driver.log").write_text(f"{SAID}loading   the models\n{log}")
    (folder / ".lock").write_text(lock)
    return folder


def test_a_capture_is_told_by_its_log_and_has_no_steps(tmp_path):
    captures = tmp_path / "store" / "captures"
    done = capture_folder(captures / "done", STORED + STORE)
    stopped = capture_folder(captures / "stopped", STORED + STOPPED + STORE)
    early = capture_folder(captures / "early", STOPPED.replace("what was computed is stored", "before anything"))
    failed = capture_folder(captures / "failed", SAID + "the capture failed\n")
    alive = capture_folder(captures / "alive", "", lock="7 on n7")
    assert distill_rl("follow", done).out.splitlines() == ["state     finished"] * 2
    assert distill_rl("follow", stopped, "--once").out == "state     ended before its last document\n"
    assert distill_rl("follow", alive, "--once").out == "state     running, as process 7 on n7\n"
    assert distill_rl("follow", done, stopped, early, failed).out.splitlines() == [
        "done     finished",
        "stopped  ended before its last document",
        "early    ended before its last document",
        "failed   ended before its last document",
    ]
    training = capture_folder(captures / "training", "")
    (training / "metrics.jsonl").write_text('{"step": 3}\n')
    assert distill_rl("follow", ".", "--once", cwd=training).out.splitlines() == [
        "state     ended before its last step",
        "step      3 of an unknown number",
    ]
    assert distill_rl("follow", ".", "--once", cwd=done).out == "state     finished\n"
