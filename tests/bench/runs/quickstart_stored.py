"""The scores of the quickstart from stored targets over several seeds: live, from an exact store, and from a compact one.

For each seed, the quickstart is run as it is; its teacher's targets are then captured in both formats, and two more students
are trained from the stores, with the same steps, data and order.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import harness, record
from distill_rl.demo.material import make_material
from distill_rl.demo.recipe import RECIPE

SEEDS = (0, 1, 2)
FORMATS = ("exact", "compact")
CONFIG = record.ROOT / "configs" / "quickstart.yaml"


def measure_seed(seed: int, root: Path) -> dict[str, Any]:
    """Runs the quickstart for a seed and trains a student from each store.

    Returns exact match and its 95 % interval of the live student, the students from the stores and the control, and the
    bytes per token of each store.
    """
    runs, material = root / "runs", root / "material"
    options = ["--seed", str(seed), "--runs", str(runs), "--material", str(material)]
    subprocess.run([sys.executable, "-m", "distill_rl", "quickstart", *options], check=True)
    summary = json.loads((runs / "quickstart" / "summary.json").read_text())
    settings = _settings(make_material(material, seed, RECIPE).root, seed, runs)
    figures: dict[str, Any] = {
        "seed": seed,
        "live": summary["student_after"],
        "interval": summary["intervals"]["student_after"],
        "control": summary["ce_only"],
    }
    for form in FORMATS:
        store = root / form
        _capture(store, [*settings, f"run.name={form}", f"capture.format={form}"])
        stored = ["teachers.0.backend=store", f"teachers.0.store={store}"]
        harness.train(CONFIG, runs / form, *settings, f"run.name={form}", *stored, environment={})
        score = json.loads((runs / form / "evals" / "student" / "exact_match.json").read_text())
        figures[form], figures[f"{form}_bytes_per_token"] = score["score"], _bytes_per_token(store)
    return figures


def _settings(material: Path, seed: int, runs: Path) -> list[str]:
    """Overrides that set the material of a run."""
    settings = {
        "run.dir": runs,
        "run.seed": seed,
        "student.model": material / "student",
        "teachers.0.model": material / "teacher",
        "data.path": material / "train.jsonl",
        "data.validation.path": material / "validation.jsonl",
        "evaluate.data": material / "test.jsonl",
    }
    return [f"{key}={value}" for key, value in settings.items()]


def _capture(store: Path, settings: Sequence[str]) -> None:
    """Captures the teacher's targets. Raises CalledProcessError if that fails."""
    command = [sys.executable, "-m", "distill_rl", "capture", "-c", str(CONFIG), "--out", str(store), *settings]
    subprocess.run(command, env=os.environ | harness.OFFLINE, check=True)


def _bytes_per_token(store: Path) -> float:
    """As `distill-rl store info` prints it."""
    command = [sys.executable, "-m", "distill_rl", "store", "info", str(store)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    size = re.search(r"^size +([\d.]+) bytes per token", printed, re.MULTILINE)
    assert size is not None, printed
    return float(size[1])


def measure(folder: Path, *, seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    """Runs all students with each seed below `folder`; returns the figures of `measure_seed` for every seed."""
    return {"seeds": [measure_seed(seed, folder / str(seed)) for seed in seeds]}


def verdict(measured: Mapping[str, Any]) -> list[str]:
    """Missed targets, one line each: a student from a store lies outside of the live student's interval."""
    return harness.missed(
        *(
            (
                not of_seed["interval"][0] <= of_seed[form] <= of_seed["interval"][1],
                f"seed {of_seed['seed']}: {form} has {of_seed[form]:.3f}, the live student {of_seed['interval']}",
            )
            for of_seed in measured["seeds"]
            for form in FORMATS
        )
    )


main = harness.program("quickstart_stored", measure, verdict)

if __name__ == "__main__":
    sys.exit(main())
