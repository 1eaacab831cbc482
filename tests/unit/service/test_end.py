"""The driver of one job is found by what Ray put into its environment, and nobody else is touched."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from distill_rl.service import end

WAITING = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); print('ready', flush=True); sys.stdin.read()"


def driver(submission: str, module: str = "distill_rl.service.entry") -> subprocess.Popen:
    environment = os.environ | {
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"metadata": {"job_submission_id": submission}})
    }
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, module], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_only_the_driver_of_the_job_is_ended():
    wanted, other, actor = driver("mine"), driver("mine.2"), driver("mine", module="other.module")
    try:
        assert [process.pid for process in end.drivers("mine")] == [wanted.pid]
        assert end.end("mine")
        assert not psutil.pid_exists(wanted.pid)
        assert other.poll() is None
        assert actor.poll() is None
        assert not end.end("mine")
    finally:
        for process in (wanted, other, actor):
            process.kill()
            process.wait()


@pytest.mark.parametrize(("arguments", "code"), [(["-c", "/no/such.yaml"], 2)])
def test_the_entry_says_its_exit_code_last(arguments, code):
    command = [sys.executable, "-m", "distill_rl.service.entry", arguments[1]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code
    assert ended.stdout.splitlines()[-1] == f"ended     exit code {code}"
    assert "no such file" in ended.stderr
