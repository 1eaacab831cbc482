"""A pytest that is killed leaves nothing behind: neither the processes that it started nor Ray's folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.command import leftovers, names, survivors, told, until
from tests.helpers.guard import temporary_prefix

ROOT = Path(__file__).parents[2]

MODULE = """
import os, signal, subprocess, sys
from pathlib import Path
import pytest
from tests.cli.conftest import cluster

def wait():
    Path("waits").write_text(str(os.getpid()))
    signal.pause()

def test_with_a_process():
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    wait()

def test_with_a_cluster_and_a_session(cluster, ray_cluster):
    wait()
"""


def family_of_killed(
    test: str, folder: Path, *, kill_worker: bool = False, xdist: bool = False, raylets: int = 0
) -> tuple[list[psutil.Process], int]:
    """Kills a pytest while its test waits.

    Returns all that it had started, and the id of the process in which the test ran.
    """
    (folder / "conftest.py").write_text("from tests.ray.conftest import ray_cluster\n")
    (folder / "test_waits.py").write_text(MODULE)
    options = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", f"--rootdir={folder}", *(["-n", "1"] * xdist)]
    command = [sys.executable, "-m", "pytest", *options, f"{folder}/test_waits.py::{test}"]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / "log").open("wb") as log:
        process = psutil.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log, start_new_session=True)
    try:
        waits = folder / "waits"
        until(lambda: (waits.exists() and waits.read_text()) or process.poll() is not None, "the test to wait")
        assert process.poll() is None, (folder / "log").read_text()
        family, worker = list(leftovers(process.pid).values()), int(waits.read_text())
        assert names(family).count("raylet") == raylets
        if kill_worker:
            family = psutil.Process(worker).children(recursive=True)
            psutil.Process(worker).kill()
            until(lambda: not survivors(family, 0), "the end of what the worker had started")
        return family, worker
    finally:
        process.kill()
        process.wait(30)


def assert_nothing_left(family: list[psutil.Process], worker: int) -> None:
    left = survivors(family, deadline_s=60)
    assert not left, told(left)
    folders = [f"{temporary_prefix(worker)}*", f"drl-{worker}-*"]
    until(lambda: not [path for name in folders for path in Path("/tmp").glob(name)], "Ray's folder removed")


def test_ray_of_a_killed_pytest_ends(tmp_path: Path) -> None:
    family, worker = family_of_killed("test_with_a_cluster_and_a_session", tmp_path, raylets=2)
    assert_nothing_left(family, worker)


@pytest.mark.parametrize("kill_worker", [False, True], ids=["controller", "worker"])
def test_processes_of_a_killed_xdist_process_end(kill_worker: bool, tmp_path: Path) -> None:
    family, worker = family_of_killed("test_with_a_process", tmp_path, kill_worker=kill_worker, xdist=True)
    assert len(family) >= 2, "a process and a guard"
    assert_nothing_left(family, worker)
