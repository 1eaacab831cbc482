"""Runs that share a cluster wait for each other: first come, first served, and nobody waits for a run that is gone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from distill_rl.config.schema import RayConfig
from distill_rl.errors import ConfigError
from distill_rl.workers.cluster.placement import Holder, PlacementPlan, Queue, reserve
from tests.helpers.command import until

pytestmark = pytest.mark.ray

SETTINGS = RayConfig(address="auto", placement_timeout_s=60, queue_timeout_s=60)


def plan(cpus: int) -> PlacementPlan:
    return PlacementPlan(({"CPU": float(cpus)},), {})


class Run:
    """A run that wants some CPUs, in a thread; it leaves when it is told to."""

    def __init__(self, name: str, cpus: int, settings: RayConfig = SETTINGS, nodes: tuple[str, ...] = ()):
        self.name, self.told, self.error = name, [], None
        self.plan = replace(plan(cpus), nodes=nodes)
        self.placed, self.leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, args=(settings,), daemon=True)
        self._thread.start()

    def _work(self, settings: RayConfig) -> None:
        try:
            with reserve(
                lambda: self.plan, settings, self.name, interrupted=self._interrupted, waiting=self.told.append
            ):
                self.placed.set()
                self.leave.wait()
        except ConfigError as error:
            self.error = error

    def _interrupted(self) -> None:
        if self.leave.is_set():
            raise ConfigError("stopped")

    def end(self) -> None:
        self.leave.set()
        self._thread.join(60)

    @property
    def behind(self) -> tuple[list[str], list[str]]:
        """Names of those that wait before it, and of those that work, as it was told last."""
        last: Queue = self.told[-1]
        return [other.run for other in last.ahead], [other.run for other in last.working]


@pytest.fixture
def start(ray_cluster) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*arguments) -> Run:
        runs.append(Run(*arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


@pytest.fixture
def line_up(start) -> Callable[[int, int], tuple[Run, Run, Run]]:
    """A run at work that leaves two CPUs free, and two that wait: a large one, then a small one, of so many CPUs."""

    def line_up(large_cpus: int, small_cpus: int) -> tuple[Run, Run, Run]:
        first = start("first", 6)
        assert first.placed.wait(60)
        large = start("large", large_cpus)
        until(lambda: large.told, "the large run to wait")
        small = start("small", small_cpus)
        until(lambda: small.told, "the small run to wait")
        return first, large, small

    return line_up


def test_a_small_run_does_not_overtake_a_large_one(line_up):
    first, large, small = line_up(6, 1)
    assert large.behind == ([], ["first"])
    assert small.behind == (["large"], ["first"])
    assert not small.placed.is_set(), "two CPUs are free, but it is not its turn"
    first.end()
    assert large.placed.wait(60)
    assert small.placed.wait(60)
    assert first.told == []
    assert str(small.told[0]).startswith("number 2 in the queue; before it: large (")


def test_a_run_that_gives_up_lets_the_next_one_through(line_up):
    _, large, small = line_up(8, 2)
    large.end()
    assert small.placed.wait(60)
    assert not large.placed.is_set()


def test_a_run_that_must_not_wait_says_for_whom_it_would(start):
    first = start("first", 8)
    assert first.placed.wait(60)
    impatient = start("impatient", 1, RayConfig(address="auto", queue_timeout_s=0))
    until(lambda: impatient.error, "the refusal")
    for word in ("queue_timeout_s=0", "number 1 in the queue; at work: first (", "CPU: asked 1, cluster has 8, free 0"):
        assert word in str(impatient.error)


def test_what_the_cluster_does_not_have_is_not_waited_for(start):
    first = start("first", 1)
    assert first.placed.wait(60)
    huge = start("huge", 100, RayConfig(address="auto", placement_timeout_s=0.5))
    until(lambda: huge.error, "the refusal")
    assert huge.told == []
    assert "placement_timeout_s=0.5" in str(huge.error)


def test_a_run_that_waits_follows_the_nodes(start):
    """It has asked for a node that is lost; what it plans then is what it gets."""
    first = start("first", 8)
    assert first.placed.wait(60)
    run = start("run", 1, SETTINGS, ("f" * 56,))
    until(lambda: run.told, "the run to wait")
    first.end()
    run.plan = replace(run.plan, nodes=())
    assert run.placed.wait(60)


OTHER_DRIVER = """
import sys, time
import ray
from tests.ray.test_turns import SETTINGS, plan
from distill_rl.workers.cluster.placement import reserve
ray.init(address=sys.argv[1], namespace="other", logging_level="ERROR", log_to_driver=False)
with reserve(lambda: plan(8), SETTINGS, "other", interrupted=lambda: None):
    print("placed", flush=True)
    time.sleep(600)
"""


def test_a_driver_that_is_killed_is_not_waited_for(ray_cluster, start):
    address = ray_cluster.get_runtime_context().gcs_address
    with subprocess.Popen([sys.executable, "-c", OTHER_DRIVER, address], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "placed\n"
            run = start("run", 2)
            until(lambda: run.told, "the run to wait")
            assert run.behind == ([], ["other"])
        finally:
            other.kill()
    assert run.placed.wait(120)


@pytest.mark.parametrize("name", ["a", 'a "b", c', "läuft"])
def test_the_name_of_a_group_tells_its_holder(name):
    holder = Holder(1_790_000_000_000_000_000, "me", name, works=True)
    assert Holder.of(holder.group) == holder
    assert Holder.of("distill_rl:nonsense") is None
    assert Holder.of(name) is None
