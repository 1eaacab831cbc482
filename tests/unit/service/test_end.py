"""Only the driver of the given job is ended, identified by what Ray put into its environment."""

import json
import os
import subprocess
import sys

import psutil

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


def test_entry_prints_its_exit_code_last():
    command = [sys.executable, "-m", "distill_rl.service.entry", "/no/such.yaml"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stdout.splitlines()[-1] == "ended     exit code 2"
    assert "no such file" in ended.stderr
