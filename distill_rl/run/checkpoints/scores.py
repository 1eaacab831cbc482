"""What validation and evaluations measured at each step, kept beside the checkpoints that are compared by it.

A suite's score arrives after the checkpoint of its step is complete, so it cannot be a part of that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from distill_rl.system.files import write_json


class ScoreFile:
    """The file `scores.json`: step → metric → value. One process writes it; other threads may read the object.

    Args:
        path: a damaged file counts as empty.
    """

    def __init__(self, path: Path):
        self._path = path
        self._by_step: dict[str, dict[str, float]] = {}
        try:
            stored = json.loads(path.read_bytes())
            self._by_step = {str(int(step)): dict(scores) for step, scores in stored.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            pass

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds what was measured at a step; values that are not finite are left out."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        key = str(step)
        # Replaced, not changed, because a thread may be reading it.
        self._write({**self._by_step, key: self._by_step.get(key, {}) | finite})

    def get(self, step: int, metric: str) -> float | None:
        """Returns what was measured; None if it was not."""
        return self._by_step.get(str(step), {}).get(metric)

    def drop_after(self, step: int) -> None:
        """Forgets later steps, which a run that resumes from `step` trains again."""
        kept = {key: scores for key, scores in self._by_step.items() if int(key) <= step}
        if kept != self._by_step:
            self._write(kept)

    def _write(self, by_step: dict[str, dict[str, float]]) -> None:
        """Replaces the content, here and on disk."""
        self._by_step = by_step
        write_json(self._path, by_step)
