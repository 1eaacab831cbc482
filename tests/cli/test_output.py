"""Commands whose stdout cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_signals import PROMISE_S
from tests.helpers.command import DEADLINE_S, environment, running, series, until

pytestmark = pytest.mark.cli
FULL = "distill-rl: error: stdout: must take what is printed; got No space left on device\n"


def printed(command: list[str], stdout: int | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end with stdout as given, and returns its exit code and stderr."""
    output = stdout if isinstance(stdout, int) else os.open(stdout, os.O_WRONLY)
    words, variables = [sys.executable, "-m", "distill_rl", *command], environment() | variables
    done = subprocess.run(words, stdout=output, stderr=subprocess.PIPE, text=True, env=variables, timeout=DEADLINE_S)
    os.close(output)
    return done


def unread_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("command", ["check", "inspect", "--help"])
def test_commands_end_quietly_with_a_broken_pipe_and_with_one_line_on_a_full_device(command, material, tmp_path):
    words = [command] if command == "--help" else [command, "-c", str(material.config(tmp_path))]
    done = printed(words, unread_pipe(), PYTHONUNBUFFERED="")
    assert (done.returncode, done.stderr) == (141, "")
    done = printed(words, Path("/dev/full"), PYTHONUNBUFFERED="")
    assert (done.returncode, done.stderr) == (1, FULL)


def test_a_run_trains_to_its_end_without_stdout_and_its_log_has_all(material, cluster, tmp_path):
    """The name of its folder has a letter that the encoding of stdout lacks."""
    for name, stdout, warnings in (("pipe", unread_pipe(), 0), ("full", Path("/dev/full"), 1)):
        config = material.config(tmp_path / f"{name}-中")
        variables = cluster.variables | {"PYTHONIOENCODING": "ascii"}
        command = ["train", "-c", str(config), "aligner.workers=0", *cluster.settings]
        done = printed(command, stdout, **variables)
        run = config.parent / "runs" / "tiny"
        assert (done.returncode, len(series(run, "train/loss"))) == (0, 8), done.stderr
        assert done.stderr.count("stdout cannot be written") == warnings
        assert "Traceback" not in done.stderr
        log = (run / "logs" / "latest" / "driver.log").read_text("utf-8")
        assert f"training  steps 1 to 8 in {run}" in log
        assert f"exported  {run / 'export'}" in log


def test_nohup_keeps_a_run_whose_terminal_is_lost(material, cluster, tmp_path):
    config, run, log = material.config(tmp_path), tmp_path / "runs" / "tiny", tmp_path / "log"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which children inherit, as those of nohup
    try:
        settings = ("train.steps=100000", "aligner.workers=0", *cluster.settings)
        with running("train", "-c", config, *settings, log=log, cluster=cluster) as process:
            signal.signal(signal.SIGHUP, before)
            until(lambda: series(run, "train/loss") or process.poll() is not None, "a step")
            process.send_signal(signal.SIGHUP)
            steps = len(series(run, "train/loss"))
            until(lambda: len(series(run, "train/loss")) > steps + 2 or process.poll() is not None, "more steps")
            assert process.poll() is None, log.read_text()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=2 * PROMISE_S) == 85, log.read_text()
    finally:
        signal.signal(signal.SIGHUP, before)
