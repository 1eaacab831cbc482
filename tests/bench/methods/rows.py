"""One row: a training with one setting, learning rate and seed, and what its student scores."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.methods.settings import Overrides

LOWER_IS_BETTER: frozenset[str] = frozenset({"bits per byte"})
"""Of the measures of `scores.py`."""


@dataclass(frozen=True, slots=True)
class Row:
    """What identifies a row."""

    task: str
    setting: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}: {self.setting}, rate {self.rate:g}, seed {self.seed}"


def items_of(record: Mapping[str, Any]) -> np.ndarray:
    """float64 [items]: the items of a row's selection or test, as `scores.as_record` writes them."""
    return np.array([float(item) for item in record["items"]])


def run_row(row: Row, overrides: Overrides, root: Path) -> dict[str, Any]:
    """Trains and measures; returns the record of a row, which JSON can hold.

    Args:
        overrides: of the setting.
        root: folder of models and data.
    """
    import torch

    from distill_rl.config.load import load_config
    from tests.bench.methods.scores import as_record, measure
    from tests.bench.methods.tasks.catalogue import TASKS
    from tests.bench.methods.training import train

    torch.set_num_threads(1)
    task = TASKS[row.task].prepare(root, row.seed)
    given = [*task.overrides, f"run.dir={root / 'runs'}", *overrides, f"optimizer.lr={row.rate}"]
    config = load_config(task.config, given)
    with tempfile.TemporaryDirectory() as folder:
        student = Path(folder) / "student"
        trained = train(config, student)
        teacher = task.teacher if task.same_tokenizer else None
        measured = (
            ("selection", task.selection, teacher),
            ("test", task.test, teacher),
            ("elsewhere", task.elsewhere, None),
        )
        scores = {
            name: as_record(measure(student, held_out, config.data, compared), held_out)
            for name, held_out, compared in measured
            if held_out is not None
        }
    if "selection" in scores:
        scores["selection"].pop("items")
    known = {"task_hash": task.fingerprint[:12], "overrides": list(overrides), "measure": task.test.measure}
    return asdict(row) | known | scores | asdict(trained)
