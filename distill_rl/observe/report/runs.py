"""What the report reads from a run directory: records, configuration, environment, rows left out."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distill_rl.errors import DataError
from distill_rl.observe.report.charts import Point
from distill_rl.observe.sinks.sinks import broken_lines, read_records
from distill_rl.types import RunPaths


@dataclass(frozen=True)
class Run:
    """A run directory. Missing files are skipped, and damaged lines counted."""

    name: str
    records: list[dict[str, Any]]
    """By ascending step; records of the same step are merged."""
    config: str = ""
    """The text of config.yaml."""
    paths: RunPaths = field(default_factory=lambda: RunPaths(Path()))
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Commit, packages and machines of the newest attempt (`system.environment`); empty for runs that did not record it."""
    num_bad_rows: int = 0
    num_broken: int = 0
    """Lines of metrics.jsonl that are no records."""

    @property
    def metrics(self) -> set[str]:
        """The names of all metrics."""
        return {name for record in self.records for name in record} - {"step", "time"}

    def points(self, metric: str, default: float | None = None) -> list[Point]:
        """(step, value) of the records with the metric; a value that is no number, such as null, becomes NaN.

        Args:
            default: value for records without the metric; None: they are left out.
        """
        points = []
        for record in self.records:
            if metric in record or default is not None:
                value = record.get(metric, default)
                points.append((float(record["step"]), float(value) if isinstance(value, int | float) else math.nan))
        return points

    def finite(self, metric: str) -> list[float]:
        """The metric's finite values by ascending step."""
        return [value for _, value in self.points(metric) if math.isfinite(value)]

    def last(self, metric: str) -> float | None:
        """The metric's last finite value; None if it has none."""
        finite = self.finite(metric)
        return finite[-1] if finite else None


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Reads run directories (`read_run`). Runs whose folders have the same name are told apart by the folder above, or
    by a number.

    Raises:
        DataError: a metrics.jsonl is missing or unreadable.
    """
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [
            "/".join(run.paths.root.resolve().parts[-2:]) if names.count(run.name) > 1 else run.name for run in runs
        ]
    if len(set(names)) < len(names):
        names = [
            f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)
        ]
    return [replace(run, name=name) for run, name in zip(runs, names)]


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Reads a run directory, which is named after the folder.

    Of two records of a step, the later one's values replace those of the same name.

    Raises:
        DataError: its metrics.jsonl is missing or unreadable.
    """
    paths = RunPaths(Path(folder))
    try:
        records = read_records(paths.metrics)
    except OSError as error:
        raise DataError(
            f"report of {folder}", "a run directory holds metrics.jsonl", error.strerror, "give the folder of a run"
        ) from error
    by_step: dict[int, dict[str, Any]] = {}
    for record in records:
        by_step[record["step"]] = by_step.get(record["step"], {}) | record
    config = paths.config.read_text("utf-8", errors="replace") if paths.config.is_file() else ""
    return Run(
        paths.root.resolve().name,
        [by_step[step] for step in sorted(by_step)],
        config,
        paths,
        _environment(paths),
        len(paths.bad_rows.read_bytes().splitlines()) if paths.bad_rows.is_file() else 0,
        broken_lines(paths.metrics.read_bytes()),
    )


def _environment(paths: RunPaths) -> dict[str, Any]:
    """The environment that the newest attempt has recorded; empty if there is none or the file is damaged."""
    try:
        environment = json.loads((paths.root / "logs" / "latest" / paths.environment.name).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return environment if isinstance(environment, dict) else {}
