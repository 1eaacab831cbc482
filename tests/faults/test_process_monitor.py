"""The monitor of a node that is not the driver's: two raylets on this machine."""

import subprocess
import sys

import pytest

from tests.helpers.command import environment
from tests.helpers.ray_nodes import ray_nodes

pytestmark = pytest.mark.ray

DRIVER = """\
import os, signal, sys
from pathlib import Path
import psutil, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from distill_rl.config.schema import FaultsConfig
from distill_rl.workers.cluster import process_monitor
from distill_rl.workers.actors.rank import Worker
from tests.helpers.command import until

process_monitor._ANSWER_WITHIN_S, process_monitor._UPDATE_EVERY_S = 3.0, 0.1

def node_monitors():
    return [process for process in psutil.process_iter(["name"]) if process.info["name"].startswith("ray::NodeMonito")]

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR", namespace="watch")
own = ray.get_runtime_context().get_node_id()
(other,) = {node["NodeID"] for node in ray.nodes()} - {own}
there = NodeAffinitySchedulingStrategy(other, soft=False)
actor = ray.remote(Worker).options(scheduling_strategy=there, num_cpus=0).remote()
process = ray.get(actor.identify.remote(), timeout=60)
monitor = process_monitor.ProcessMonitor(FaultsConfig(stopped_s=1.0), {"worker": process}, Path(sys.argv[2]))

def seen():
    monitor.update()
    return monitor._states.get("worker")

until(lambda: seen() == "sleeping", "the first answer")
(first,) = node_monitors()
first.suspend()
until(lambda: seen() is None, "its silence being noticed")
print("seen: the reports of a silent monitor are forgotten")
until(lambda: seen() == "sleeping", "another monitor's answer")
print("seen: another monitor answers")
os.kill(process.pid, signal.SIGSTOP)
until(lambda: seen() == process_monitor.GONE, "the death of the stopped worker")
print("seen:", monitor.fate("worker"))
monitor.close()
for process in node_monitors():
    process.kill()
"""


def test_a_stopped_remote_worker_is_killed_and_a_silent_monitor_replaced(tmp_path, monkeypatch):
    with ray_nodes(tmp_path, monkeypatch, nodes=2, cpus=1) as address:
        command = [sys.executable, "-c", DRIVER, address, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment())
    assert [line for line in done.stdout.splitlines() if line.startswith("seen: ")] == [
        "seen: the reports of a silent monitor are forgotten",
        "seen: another monitor answers",
        "seen: it was stopped (SIGSTOP) for 1 s, and killed",
    ], done.stderr
