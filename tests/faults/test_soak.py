"""Five hundred steps (R24): memory, shared memory and open files stay as they were."""

import statistics
from pathlib import Path

import psutil

from tests.helpers.command import shared_memory, until

STEPS, SETTLED = 500, 100
MEMORY_GROWTH = 1.05
"""of a process's resident memory between step 100 and 500: allocators settle within a few percent"""


def _measure(processes: dict[str, psutil.Process]) -> dict[str, tuple[int, int]]:
    return {name: (process.memory_info().rss, process.num_fds()) for name, process in processes.items()}


def test_nothing_grows_over_five_hundred_steps(disturb):
    settings = (
        f"train.steps={STEPS}", f"schedule.steps={STEPS}", "transport=shared_memory", "prefetch.depth=2",
        "checkpoint.every=50", "checkpoint.keep_last=1", "evaluate.every=50", "observe.tensorboard=true",
    )  # fmt: skip
    with disturb(*settings) as run:
        watched = {name: psutil.Process(pid) for name, pid in run.actors.items()}
        watched["driver"] = psutil.Process(run.process.pid)
        seen: dict[str, list[tuple[int, int]]] = {name: [] for name in watched}
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
        for index, (what, factor) in enumerate((("memory", MEMORY_GROWTH), ("open files", 1.0))):
            early, late = (statistics.median(each[index] for each in part) for part in (numbers[:half], numbers[half:]))
            assert late <= early * factor, f"{what} of {name}: {early} at first, {late} later"
    assert len(list((run.run / "checkpoints").iterdir())) == 1
    assert not list(Path("/tmp").glob(f"drl-{run.process.pid}-*"))
