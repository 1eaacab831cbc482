"""The scores of the cross-tokenizer quickstart over several seeds: with `hybrid`, the same with a teacher that has two stop tokens, and without a teacher.

For each seed, three students are trained with the same steps, data and order, and one with half of them:

1. to 3. The runs of the quickstart with `--cross`: `hybrid`, the control without a teacher, and `hybrid` on half of the rows in half of the steps.
4. `hybrid` with a teacher that uses different stop tokens for turns and for texts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench import harness, record
from distill_rl.demo.material import make_material
from distill_rl.demo.recipe import TURNS

SEEDS = (0, 1, 2)
CONFIG = record.ROOT / "configs" / "quickstart-cross.yaml"
COLUMNS = {
    "hybrid": "student_after",
    "two_stops": "two_stops",
    "control": "ce_only",
    "teacher": "teacher",
    "half of the rows": "half_rows",
}
"""Heading → name in the figures."""


def measure_seed(seed: int, root: Path) -> dict[str, Any]:
    """Runs the quickstart for a seed and trains the other student; returns its summary with their figures added.

    These are exact match and its interval. `truncated` is the number of answers without a stop token, by student except
    the control. The summary's `tasks` are left out.
    """
    runs, material = root / "runs", root / "material"
    options = ["--cross", "--seed", str(seed), "--runs", str(runs), "--material", str(material)]
    subprocess.run([sys.executable, "-m", "distill_rl", "quickstart", *options], check=True)
    summary = json.loads((runs / "quickstart-cross" / "summary.json").read_text())
    two_stops = make_material(material, seed, TURNS).root
    hybrid, other = _scores(runs / "quickstart-cross", "student_after"), train("two_stops", two_stops, seed, runs)
    summary["two_stops"], summary["intervals"]["two_stops"] = other["score"], other["interval"]
    summary["truncated"] = {"hybrid": hybrid["truncated"], "two_stops": other["truncated"]}
    return {key: value for key, value in summary.items() if key != "tasks"}


def train(name: str, material: Path, seed: int, runs: Path, *overrides: str) -> dict[str, Any]:
    """Trains a student with the quickstart's configuration on this material; returns its evaluation.

    Args:
        name: of the run.
        material: a folder that `make_material` made.
        runs: folder of all runs.
        overrides: further settings, `key=value`.

    Raises:
        SystemExit: the run failed.
    """
    settings = {
        "run.name": name,
        "run.dir": runs,
        "run.seed": seed,
        "student.model": material / "student",
        "teachers.0.model": material / "teacher",
        "data.path": material / "train.jsonl",
        "data.validation.path": material / "validation.jsonl",
        "evaluate.data": material / "test.jsonl",
    }
    fixed = [f"{key}={value}" for key, value in settings.items()]
    harness.train(CONFIG, runs / name, *fixed, *overrides, environment={})
    return _scores(runs / name, "student")


def _scores(run: Path, model: str) -> dict[str, Any]:
    """What a run recorded of its exact-match evaluation.

    Args:
        run: the run's directory.
        model: folder of the evaluation, such as `student` or `student_after`.
    """
    return json.loads((run / "evals" / model / "exact_match.json").read_text())


def measure(folder: Path, *, seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    """Runs all students with each seed below `folder`; returns the figures of `measure_seed` for every seed."""
    return {"seeds": [measure_seed(seed, folder / str(seed)) for seed in seeds]}


main = harness.program("quickstart_cross", measure, columns=("seed", *COLUMNS.values(), "intervals"))

if __name__ == "__main__":
    sys.exit(main())
