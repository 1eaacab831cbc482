"""What a killed driver leaves behind: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

DRIVER = """
import os, subprocess, sys
import psutil
from pathlib import Path
from distill_rl.workers.cluster.reaper import reaper

directory = Path(sys.argv[1])
directory.mkdir()
child = subprocess.Popen(["sh", "-c", "sleep 1000 & wait"], start_new_session=True)
with reaper(directory, [psutil.Process(child.pid)]):
    print(child.pid, flush=True)
    sys.stdin.read()
if sys.argv[2] == "ends Ray itself":
    child.kill()
"""


@pytest.fixture
def driver(tmp_path: Path, request: pytest.FixtureRequest):
    """A driver with a process that has a child of its own: (driver, its two descendants, directory)."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "ray"), request.param],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    root = psutil.Process(int(process.stdout.readline()))
    deadline = time.monotonic() + 30
    while not (children := root.children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    yield process, [root, *children], tmp_path / "ray"
    process.kill()
    for relative in [root, *children]:
        if relative.is_running():
            relative.kill()


@pytest.mark.parametrize("driver", ["is killed"], indirect=True)
def test_a_killed_driver_leaves_no_process_and_no_directory(driver) -> None:
    process, family, directory = driver
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    deadline = time.monotonic() + 30
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not directory.exists()


@pytest.mark.parametrize("driver", ["leaves them running"], indirect=True)
def test_a_driver_that_ends_in_order_is_not_reaped(driver) -> None:
    process, family, directory = driver
    process.stdin.close()
    assert process.wait(30) == 0
    assert all(relative.is_running() for relative in family)
    assert directory.is_dir()
