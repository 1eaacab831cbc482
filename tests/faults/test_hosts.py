"""What hosts the workers dies: a daemon of the run's own Ray, /dev/shm runs full, a node of a cluster is lost (R40 to R42)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import assert_resumes
from tests.helpers.command import Cluster, distill_rl, environment, leftovers, running, series, until
from tests.helpers.ray_nodes import ray_nodes

pytestmark = pytest.mark.cli

LENGTH = ("train.steps=400", "schedule.steps=400")
WITHIN_S = 60


def kill_daemon(root: int, name: str) -> None:
    (daemon,) = [process for process in leftovers(root).values() if process.name() == name]
    daemon.kill()


@pytest.mark.parametrize("aligners", [0, 1])
def test_without_gcs_the_step_is_saved_before_ray_ends_the_driver(disturb, aligners):
    with disturb(*LENGTH, "checkpoint.every=0", f"aligner.workers={aligners}") as run:
        kill_daemon(run.process.pid, "gcs_server")
        assert run.process.wait(WITHIN_S) == 1, run.text
    (error,) = run.errors
    last = run.steps
    assert re.search(r"Ray on node \S+: its gcs_server on this machine must run .*killed by SIGKILL", error)
    assert error.endswith(f"--resume continues from the checkpoint of step {last}")
    assert_resumes(run, f"train.steps={last + 2}")
    assert [step for step, _ in series(run.run, "train/loss")] == list(range(1, last + 3))


@pytest.mark.parametrize("aligners", [0, 1])
def test_without_raylet_the_run_ends_with_one_line_and_no_restart(disturb, aligners):
    with disturb(*LENGTH, "checkpoint.every=1", f"aligner.workers={aligners}") as run:
        run.wait_for_checkpoint()
        kill_daemon(run.process.pid, "raylet")
        assert run.process.wait(WITHIN_S) == 1, run.text
    (error,) = run.errors
    assert re.search(r"Ray on node \S+: its raylet on this machine must run .*killed by SIGKILL", error)
    assert "--resume continues from the checkpoint of step " in error
    assert "restarting" not in run.text
    assert "is replaced" not in run.text


def test_an_actor_does_not_start_again_without_its_node(disturb):
    """The student dies, and while it starts again its raylet."""
    with disturb(*LENGTH, "checkpoint.every=1") as run:
        run.wait_for_checkpoint()
        os.kill(run.actors["student-dp0-tp0"], 9)
        run.wait_for_output("restarting the student (1 of")
        kill_daemon(run.process.pid, "raylet")
        assert run.process.wait(WITHIN_S) == 1, run.text
    assert "its raylet on this machine must run" in run.errors[0]
    assert "(2 of" not in run.text


FULL = """
import os, sys
from pathlib import Path
from tests.helpers.command import running, series, until
config, folder = sys.argv[1:3]
run = Path(folder) / "runs" / "tiny"
with running("train", "-c", config, "train.steps=100", "transport=object_store", log=Path(folder, "log")) as process:
    until(lambda: series(run, "train/loss") or process.poll() is not None, "a step")
    file, room = os.open("/dev/shm/other", os.O_CREAT | os.O_RDWR), os.statvfs("/dev/shm")
    os.posix_fallocate(file, 0, room.f_bavail * room.f_bsize)
    sys.exit(process.wait(200))
"""


def test_a_dev_shm_that_another_program_fills_changes_nothing(material, tmp_path):
    """In a mount namespace of its own, with 600 MB of it."""
    space = ["unshare", "--mount", "--", "sh", "-c", 'mount -t tmpfs -o size=600m tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*space, "true"], capture_output=True).returncode:
        pytest.skip("a mount namespace needs root")
    command = [sys.executable, "-c", FULL, str(material.config(tmp_path)), str(tmp_path)]
    done = subprocess.run([*space, *command], env=environment(), timeout=400, capture_output=True, text=True)
    assert done.returncode == 0, (tmp_path / "log").read_text() + done.stderr
    assert len(series(tmp_path / "runs" / "tiny", "train/loss")) == 100


@contextmanager
def on_nodes(
    nodes: int, material, folder: Path, monkeypatch, *settings: str
) -> Iterator[tuple[psutil.Popen, Path, Path]]:
    """A run of a student with two ranks on nodes of two CPUs, and one of its nodes killed, with all that runs there."""
    log, run, config = folder / "log", folder / "runs" / "tiny", material.config(folder)
    with ray_nodes(folder, monkeypatch, nodes=nodes, cpus=2) as address:
        variables = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
        cluster = Cluster(address, variables)
        words = ("train", "-c", config, "checkpoint.every=1", "aligner.workers=0", *settings, *cluster.settings)
        with running(*words, log=log, cluster=cluster) as process:
            until(lambda: len(series(run, "train/loss")) > 3 or process.poll() is not None, "steps")
            assert process.poll() is None, log.read_text()
            (own,) = re.findall(r"the driver is on node (\w+)", (run / "logs" / "latest" / "driver.log").read_text())
            for victim in _node_with_worker(address, but=own):
                victim.kill()
            yield process, run, log


def _node_with_worker(address: str, but: str) -> list[psutil.Process]:
    """The processes of another node that has a rank of the student, or else of the teacher: the other may be on the driver's."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter(["name", "cmdline"]):
        words = process.info["cmdline"] or []
        of_cluster = process.info["name"] == "raylet" and any(address in word for word in words)
        if of_cluster and f"--node_id={but}" not in words:
            family = [process, *process.children(recursive=True)]
            found |= {child.name()[: len("ray::TeacherWor")]: family for child in family}
    return found.get("ray::StudentWor") or found["ray::TeacherWor"]


APART = ("student.parallel.dp=2", "teachers.0.parallel.dp=2")
PINNED = ("ray.placement=disaggregated",)
"""Every actor has a node that it may not leave by itself."""


@pytest.mark.ray
@pytest.mark.parametrize("placement", [APART, PINNED])
def test_a_lost_node_is_replaced_by_one_that_has_room_and_no_bit_changes(material, tmp_path, monkeypatch, placement):
    settings = ("train.steps=40", "schedule.steps=40", *placement)
    with on_nodes(3, material, tmp_path / "nodes", monkeypatch, *settings) as (process, run, log):
        assert process.wait(300) == 0, log.read_text()
    assert re.search(r"restarting (the student|big/dp0-tp0) \(1 of ", log.read_text()), log.read_text()
    config = material.config(tmp_path / "alone")
    ended = distill_rl("train", "-c", config, "checkpoint.every=1", "aligner.workers=0", *settings)
    assert ended.code == 0, ended.err
    assert series(run, "train/loss") == series(tmp_path / "alone" / "runs" / "tiny", "train/loss")


CALLED = """
import sys, threading, time
import psutil, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from distill_rl.errors import WorkerError
from distill_rl.workers.cluster.calls import Calls

class Worker:
    def identify(self):
        return None

    def work(self):
        time.sleep(600)

ray.init(sys.argv[1], log_to_driver=False)
own = ray.get_runtime_context().get_node_id()
(other,) = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != own]
on_other = NodeAffinitySchedulingStrategy(other, soft=False)
worker = ray.remote(Worker).options(num_cpus=1, max_concurrency=2, scheduling_strategy=on_other).remote()
ray.get(worker.identify.remote())
calls = Calls(lambda: None)
calls.register("worker", worker)

def kill():
    found = [process for process in psutil.process_iter(["cmdline"]) if f"--node_id={other}" in (process.info["cmdline"] or [])]
    (raylet,) = found
    for process in (raylet, *raylet.children(recursive=True)):
        process.kill()

threading.Timer(1, kill).start()
try:
    calls.gather({worker.work.remote(): "worker"}, what="saving step 4", timeout_s=60)
except WorkerError as error:
    print("failed:", error)
    print("lost:", *calls.lost(error, ["worker"], "saving step 4"))
"""


@pytest.mark.ray
def test_an_actor_in_a_call_is_lost_with_its_node(tmp_path, monkeypatch):
    """Nobody is left to report its death: for some 15 s Ray says of it only that it is unavailable."""
    with ray_nodes(tmp_path, monkeypatch, nodes=2, cpus=1) as address:
        command = [sys.executable, "-c", CALLED, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert "failed: worker: its process died during saving step 4" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("lost: worker\n")


@pytest.mark.ray
def test_a_lost_node_that_no_other_can_replace_ends_the_run(material, tmp_path, monkeypatch):
    with on_nodes(2, material, tmp_path / "nodes", monkeypatch, "train.steps=400", *APART) as (process, _, log):
        assert process.wait(2 * WITHIN_S) == 1, log.read_text()
    (error,) = [line for line in log.read_text().splitlines() if line.startswith("distill-rl: error:")]
    assert re.search(r"Ray on node \S+: is lost, and another node must take over .*; got none with 2 CPU free", error)
    assert "--resume continues from the checkpoint of step " in error
    assert "(2 of" not in log.read_text()
