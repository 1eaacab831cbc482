"""The CPU time of `distill-rl check` on the quickstart's configuration, most of which imports take."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill_rl.demo.material import make_material
from distill_rl.demo.recipe import RECIPE
from distill_rl.system.environment import ROOT
from tests.bench import harness

TARGET_S = 3.0


def check(config: Path, root: Path) -> dict[str, float]:
    """Runs `distill-rl check` in a process of its own, with the material in the folder `root`.

    Returns:
        seconds: user and system time of the process and its children (`cpu_s`), and elapsed time (`wall_s`).

    Raises:
        SystemExit: the command failed; with its output.
    """
    command = [sys.executable, "-m", "distill_rl", "check", "-c", str(config)]
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, cwd=root, env=os.environ | harness.OFFLINE, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"cpu_s": round(cpu, 2), "wall_s": round(wall, 2)}


def measure(folder: Path, *, runs: int = 7) -> dict[str, Any]:
    """The median of the CPU and elapsed seconds of several processes, and all runs.

    One more, the first, is not measured: it fills the caches of files and compiled modules.

    Args:
        runs: number of measured processes.
    """
    # The check reads the headers of weights only, so the teacher need not be trained.
    make_material(folder / ".cache" / "quickstart", 0, replace(RECIPE, teacher_steps=1))
    config = ROOT / "configs" / "quickstart.yaml"
    check(config, folder)
    rows = [check(config, folder) for _ in range(runs)]
    medians = {name: statistics.median(row[name] for row in rows) for name in ("cpu_s", "wall_s")}
    return {"median": medians, "runs": rows}


def verdict(figures: dict[str, Any]) -> list[str]:
    """The missed target, if the median of the CPU time is not below it."""
    found = figures["median"]["cpu_s"]
    return harness.missed((found >= TARGET_S, f"missed: {found} s of CPU time, the target is below {TARGET_S:g} s"))


main = harness.program("check", measure, verdict)

if __name__ == "__main__":
    sys.exit(main())
