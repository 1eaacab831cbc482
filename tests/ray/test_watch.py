"""The watch over a node that is not the driver's: two raylets on this machine."""

import os
import signal

import psutil
import pytest

from distill_rl.config.schema import FaultsConfig
from distill_rl.workers import watch
from distill_rl.workers.rank import identify
from distill_rl.workers.watch import Watch
from tests.helpers.command import until
from tests.helpers.ray_nodes import ray_nodes

pytestmark = pytest.mark.ray


class Worker:
    def identify(self):
        return identify()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An actor's process on the node that this driver is not on."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with ray_nodes(tmp_path, monkeypatch, nodes=2, cpus=1) as address:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="watch")
        try:
            own = ray.get_runtime_context().get_node_id()
            (other,) = {node["NodeID"] for node in ray.nodes()} - {own}
            there = NodeAffinitySchedulingStrategy(other, soft=False)
            actor = ray.remote(Worker).options(scheduling_strategy=there, num_cpus=0).remote()
            process = ray.get(actor.identify.remote(), timeout=60)
            assert process.node_id == other
            yield process
        finally:
            ray.shutdown()


def watchers() -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if process.name().startswith("ray::NodeWatch")]


def test_a_worker_of_another_node_that_stands_still_is_killed_and_a_silent_watcher_is_replaced(
    elsewhere, tmp_path, monkeypatch
):
    monkeypatch.setattr(watch, "_ANSWER_WITHIN_S", 3.0)
    monkeypatch.setattr(watch, "_LOOK_EVERY_S", 0.1)
    made = Watch(FaultsConfig(stopped_s=1.0), {"worker": elsewhere}, tmp_path)

    def seen(state: str) -> bool:
        made.look()
        return made._states.get("worker") == state

    try:
        until(lambda: seen("sleeping"), "the first answer")
        (first,) = watchers()
        first.suspend()
        until(lambda: not seen("sleeping") and "worker" not in made._states, "its silence to be noticed")
        until(lambda: seen("sleeping"), "another watcher's answer")
        os.kill(elsewhere.pid, signal.SIGSTOP)
        until(lambda: seen(watch.GONE), "the end of what stands still")
        assert made.fate("worker") == "it was stopped (SIGSTOP) for 1 s, and killed"
    finally:
        made.close()
        for process in watchers():
            process.kill()
