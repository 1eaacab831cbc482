"""Five hundred steps (R24): memory, shared memory and open files of our processes and of Ray's do not grow."""

import contextlib
import statistics
from pathlib import Path

import psutil

from tests.helpers.command import shared_memory, until

STEPS, SETTLED = 500, 100
MEMORY_GROWTH = 1.05
"""Limit for a process's resident memory between steps 100 and 500: allocators settle within a few percent."""
SHARED_GROWTH = 1.01
"""Limit for the shared part of it, which includes memfds that have no name in /dev/shm. Slots are allocated once; what
varies are pages of libraries that the kernel drops and reads again."""
RAY = {"raylet": MEMORY_GROWTH, "gcs_server": 1.1}
"""The head remembers the last 10,000 calls (RAY_task_events_max_num_task_in_gcs), 4 KiB each, and this test ends before it does;
`launch/bench.sh soak` goes on for longer, and allows 1 %."""


def _measure(processes: dict[str, psutil.Process]) -> dict[str, tuple[int, int, int]]:
    """(resident bytes, shared bytes, number of open files) of each process."""
    usage = {}
    for name, process in processes.items():
        memory = process.memory_info()
        usage[name] = (memory.rss, memory.shared, process.num_fds())
    return usage


def _of_ray(driver: psutil.Process) -> dict[str, psutil.Process]:
    found = {}
    for process in driver.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.name()] = process
    return {name: found[name] for name in RAY if name in found}


def test_memory_and_files_stay_flat_over_five_hundred_steps(disturb):
    settings = (
        f"train.steps={STEPS}", f"schedule.steps={STEPS}", "transport=shared_memory", "prefetch.depth=2",
        "checkpoint.every=50", "checkpoint.keep_last=1", "evaluate.every=50", "observe.tensorboard=true",
    )  # fmt: skip
    with disturb(*settings) as run:
        watched = {name: psutil.Process(pid) for name, pid in run.actors.items()}
        watched["driver"] = psutil.Process(run.process.pid)
        watched |= _of_ray(watched["driver"])
        assert RAY.keys() <= watched.keys()
        seen: dict[str, list[tuple[int, int, int]]] = {name: [] for name in watched}
        segments: list[int] = []
        at = SETTLED
        while at < STEPS:
            until(lambda at=at: run.steps >= at or run.process.poll() is not None, f"step {at}")
            assert run.process.poll() is None, run.text
            for name, numbers in _measure(watched).items():
                seen[name].append(numbers)
            segments.append(len(shared_memory()))
            at += 40
        assert run.end() == 0, run.text
    half = len(segments) // 2
    assert statistics.median(segments[half:]) <= statistics.median(segments[:half]), "shared memory"
    for name, numbers in seen.items():
        limits = {"memory": RAY.get(name, MEMORY_GROWTH), "shared memory": SHARED_GROWTH, "open files": 1.0}
        for i, (what, factor) in enumerate(limits.items()):
            early, late = (statistics.median(usage[i] for usage in part) for part in (numbers[:half], numbers[half:]))
            assert late <= early * factor, f"{what} of {name}: {early} at first, {late} later"
    assert len(list((run.run / "checkpoints").iterdir())) == 1
    assert not list(Path("/tmp").glob(f"drl-{run.process.pid}-*"))
