"""The process monitor on real processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from distill_rl.config.schema import FaultsConfig
from distill_rl.workers.actors.rank import Process
from distill_rl.workers.cluster import process_monitor
from distill_rl.workers.cluster.process_monitor import NodeMonitor, ProcessMonitor, keep_logs
from tests.helpers.command import until

SLEEPER = """\
import faulthandler, signal
faulthandler.register(signal.SIGUSR2, all_threads=True)
print("ready", flush=True)
def waits_here():
    signal.pause()
while True:
    waits_here()
"""


@pytest.fixture
def worker(tmp_path):
    """A process that waits, and writes its stacks on SIGUSR2."""
    out, err = tmp_path / "worker.out", tmp_path / "worker.err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=stdout, stderr=stderr)
    until(lambda: out.read_text(), "the process has begun")
    yield Process(process.pid, psutil.Process(process.pid).create_time(), "here", "", "10.0.0.1", (str(out), str(err)))
    process.kill()
    process.wait()


@pytest.fixture
def local_ray(monkeypatch):
    """Makes this process look like the driver of a Ray on this node."""

    class Context:
        def get_node_id(self):
            return "here"

    monkeypatch.setattr(process_monitor.ray, "get_runtime_context", Context)


def update_after(seconds: float, monitor: ProcessMonitor, monkeypatch) -> None:
    """Updates the monitor with a clock that has moved on by so much."""
    monitor.now = getattr(monitor, "now", 1000.0) + seconds
    monkeypatch.setattr(process_monitor.time, "monotonic", lambda: monitor.now)
    monitor.update()


def test_states_and_stacks_of_a_process(worker):
    here = NodeMonitor()
    assert here.states({"it": worker}) == {"it": "sleeping"}
    assert "waits_here" in here.stacks({"it": worker})["it"]
    os.kill(worker.pid, signal.SIGSTOP)
    until(lambda: here.states({"it": worker}) == {"it": "stopped"}, "the stop")
    assert here.stacks({"it": worker}) == {}, "a stopped process cannot write"
    here.kill(worker)
    until(lambda: here.states({"it": worker}) == {"it": "gone"}, "the end")


def test_reused_pid_is_neither_reported_nor_killed(worker):
    other = Process(worker.pid, worker.created - 1, "here")
    assert NodeMonitor().states({"it": other}) == {"it": "gone"}
    NodeMonitor().kill(other)
    assert NodeMonitor().states({"it": worker}) == {"it": "sleeping"}


def test_process_stopped_for_too_long_is_killed(worker, local_ray, monkeypatch, tmp_path):
    monitor = ProcessMonitor(FaultsConfig(stopped_s=5), {"student-dp0-tp0": worker}, tmp_path)
    os.kill(worker.pid, signal.SIGSTOP)
    until(lambda: NodeMonitor().states({"it": worker}) == {"it": "stopped"}, "the stop")
    for _ in range(4):
        update_after(1.3, monitor, monkeypatch)
    assert NodeMonitor().states({"it": worker}) == {"it": "stopped"}
    update_after(1.3, monitor, monkeypatch)
    monkeypatch.undo()
    until(lambda: NodeMonitor().states({"it": worker}) == {"it": "gone"}, "the end")
    assert monitor.fate("student-dp0-tp0") == "it was stopped (SIGSTOP) for 5 s, and killed"
    assert monitor.where("student-dp0-tp0") == "student-dp0-tp0 on 10.0.0.1"


def test_driver_that_was_stopped_itself_kills_nothing(worker, local_ray, monkeypatch, tmp_path):
    monitor = ProcessMonitor(FaultsConfig(stopped_s=5), {"student-dp0-tp0": worker}, tmp_path)
    os.kill(worker.pid, signal.SIGSTOP)
    until(lambda: NodeMonitor().states({"it": worker}) == {"it": "stopped"}, "the stop")
    update_after(1.3, monitor, monkeypatch)
    update_after(3600.0, monitor, monkeypatch)
    assert NodeMonitor().states({"it": worker}) == {"it": "stopped"}
    assert monitor.fate("student-dp0-tp0") == ""


def test_last_words_leave_out_markers_and_escape_codes(worker, local_ray, tmp_path):
    with open(worker.logs[-1], "a") as log:  # noqa: PTH123
        log.write(":actor_name:StudentWorker\nfirst\n\nsecond\n\x1b[31mthird\n:job_id:01\n")
    words = ProcessMonitor(FaultsConfig(), {"a": worker}, tmp_path).last_words("a", lines=2)
    assert words == "second | \\x1b[31mthird"


def test_logs_are_kept_by_name(worker, tmp_path):
    keep_logs([("big/dp0-tp0", worker)], tmp_path / "kept")
    assert (tmp_path / "kept" / "big-dp0-tp0.out").read_text() == "ready\n"
    assert not (tmp_path / "kept" / "big-dp0-tp0.err").exists(), "nothing was printed there"
