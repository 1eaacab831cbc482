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
import subprocess, sys
from pathlib import Path
from distill_rl.workers.cluster.reaper import reaper

directory = Path(sys.argv[1])
directory.mkdir()
shell = ["sh", "-c", "sleep 1000 & wait"]
with reaper(directory):
    raylet = subprocess.Popen([*shell, "/lib/ray/raylet", f"{directory}/session"], start_new_session=True)
    bystander = subprocess.Popen([*shell, f"{directory}/session"], start_new_session=True)
    print(raylet.pid, bystander.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def driver(tmp_path: Path):
    """A driver whose processes have a child each: (driver, Ray's processes, others that name Ray's directory, directory)."""
    folder = tmp_path / "drl"
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    families = []
    for pid in process.stdout.readline().split():
        root, deadline = psutil.Process(int(pid)), time.monotonic() + 30
        while not (children := root.children()) and time.monotonic() < deadline:
            time.sleep(0.01)
        families.append([root, *children])
    yield process, *families, folder
    process.kill()
    for relative in [*families[0], *families[1]]:
        if relative.is_running():
            relative.kill()


def test_a_killed_driver_leaves_no_process_and_no_directory(driver) -> None:
    process, family, others, directory = driver
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    deadline = time.monotonic() + 30
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not directory.exists()
    assert all(other.is_running() for other in others)


def test_a_driver_that_ends_in_order_is_not_reaped(driver) -> None:
    process, family, others, directory = driver
    process.stdin.close()
    assert process.wait(30) == 0
    assert all(relative.is_running() for relative in [*family, *others])
    assert directory.is_dir()


SLOW = """
import subprocess, time
import psutil
from distill_rl.workers.cluster import reaper
look = reaper.with_descendants
def slow(processes):
    time.sleep(0.3)
    return look(processes)
reaper.with_descendants = slow
child = psutil.Process(subprocess.Popen(["sleep", "300"]).pid)
reaper.end([child], 0.1)
print(child.wait(60))
"""


def test_what_is_found_is_killed_even_if_the_looking_takes_longer_than_the_patience() -> None:
    """As on a node with thousands of processes."""
    done = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == f"{-signal.SIGKILL}", done.stderr
