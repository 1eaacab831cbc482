"""Seconds and processor time from a command to its first step, with the quickstart's models: train, resume, try; and all of eval and check.

With --other, another clone of this repository takes turns, for a comparison on the same machine and load.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from distill_rl.demo.material import make_material
from distill_rl.demo.recipe import RECIPE
from distill_rl.system.environment import ROOT
from tests.bench import harness

_SAMPLE_S = 0.03
_END_S = 120.0
_MATERIAL = ".cache/quickstart/seed-0"
_LEFT_OUT = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
"""Variables of this process without which a user starts a command."""
TARGETS = {"train": 0.5, "resume": 0.5, "try": 0.5, "eval": 0.5, "check": 0.6}
"""Most processor time of a command, relative to that of the other clone."""


def measure(folder: Path, *, runs: int = 3, other: str = "", commands: str = "train,resume,try,eval,check") -> dict[str, Any]:
    """Medians and all runs by command, of this clone and the other one, and the ratio of the processor times.

    One more run of each, the first, is not counted: it fills the caches of files and compiled modules.

    Args:
        runs: number of counted runs of each command.
        other: path of another clone of this repository.
        commands: what is measured, separated by commas.
    """
    make_material(folder / ".cache" / "quickstart", 0, replace(RECIPE, teacher_steps=1))
    clones = {"this": ROOT} | ({"other": Path(other).absolute()} if other else {})
    figures: dict[str, Any] = {}
    for name in commands.split(","):
        rows: dict[str, list[dict[str, float]]] = {clone: [] for clone in clones}
        for turn in range(runs + 1):
            for clone, root in clones.items():
                row = _MEASURED[name](root, folder, folder / f"{name}-{clone}-{turn}")
                if turn:
                    rows[clone].append(row)
        figures[name] = {
            clone: {key: statistics.median(row[key] for row in found) for key in ("wall_s", "cpu_s")} | {"runs": found}
            for clone, found in rows.items()
        }
        if other:
            figures[name]["cpu_ratio"] = round(figures[name]["this"]["cpu_s"] / figures[name]["other"]["cpu_s"], 3)
    return figures


def verdict(figures: dict[str, Any]) -> list[str]:
    """The commands that take more of the other clone's processor time than they are to."""
    ratios = {name: row["cpu_ratio"] for name, row in figures.items() if "cpu_ratio" in row}
    return harness.missed(
        *((ratio > TARGETS[name], f"missed: {name} takes {ratio}, the target is {TARGETS[name]}") for name, ratio in ratios.items())
    )


def _train(root: Path, folder: Path, out: Path, *more: str) -> dict[str, float]:
    command = ["train", "-c", f"{root}/configs/quickstart.yaml", f"run.dir={out}", *more]
    metrics = out / "quickstart" / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    return _timed(root, folder, command, lambda: metrics.exists() and metrics.stat().st_size > before)


def _resume(root: Path, folder: Path, out: Path) -> dict[str, float]:
    first = ("train.steps=1", "schedule.steps=100", "evaluate.suites=[]")
    _timed(root, folder, ["train", "-c", f"{root}/configs/quickstart.yaml", f"run.dir={out}", *first], lambda: False)
    return _train(root, folder, out, "schedule.steps=100", "evaluate.suites=[]", "--resume")


def _try(root: Path, folder: Path, out: Path) -> dict[str, float]:
    material = (f"{_MATERIAL}/student", f"{_MATERIAL}/teacher", f"{_MATERIAL}/train.jsonl")
    metrics = out / "with-teacher" / "metrics.jsonl"
    command = ["try", *material, "--out", str(out)]
    return _timed(root, folder, command, lambda: metrics.exists() and metrics.stat().st_size > 0)


def _eval(root: Path, folder: Path, out: Path) -> dict[str, float]:
    suite = ("--suites", "exact_match", "--data", f"{_MATERIAL}/test.jsonl", "--limit", "8")
    return _timed(root, folder, ["eval", "--model", f"{_MATERIAL}/student", *suite], lambda: False)


def _check(root: Path, folder: Path, out: Path) -> dict[str, float]:
    return _timed(root, folder, ["check", "-c", f"{root}/configs/quickstart.yaml"], lambda: False)


_MEASURED: dict[str, Callable[[Path, Path, Path], dict[str, float]]] = {
    "train": _train, "resume": _resume, "try": _try, "eval": _eval, "check": _check,
}  # fmt: skip


def _timed(root: Path, folder: Path, command: list[str], arrived: Callable[[], bool]) -> dict[str, float]:
    """Runs a command of a clone until `arrived` or its end: elapsed seconds, and processor time of all its processes.

    The latter is sampled, so that what a process does in its last moments is not counted.

    Raises:
        SystemExit: the command failed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    environment |= harness.ONE_THREAD | {"DISTILL_RL_THREADS": "1", "PYTHONPATH": str(root)}
    log = folder / "log"
    used: dict[psutil.Process, float] = {}
    with log.open("wb") as output:
        start = time.perf_counter()
        process = psutil.Popen(
            [sys.executable, "-m", "distill_rl", *command], cwd=folder, env=environment, stdout=output, stderr=output
        )
        while process.poll() is None and not arrived():
            _add_times(process, used)
            time.sleep(_SAMPLE_S)
        wall = time.perf_counter() - start
        _add_times(process, used)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(_END_S)
        elif process.returncode:
            raise SystemExit(log.read_text())
    return {"wall_s": round(wall, 2), "cpu_s": round(sum(used.values()), 2)}


def _add_times(root: psutil.Process, used: dict[psutil.Process, float]) -> None:
    with contextlib.suppress(psutil.Error):
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used[process] = times.user + times.system


main = harness.program("start", measure, verdict)

if __name__ == "__main__":
    sys.exit(main())
