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
from distill_rl.observe.sinks.sinks import SECONDS, STEPS, broken_lines, read_records
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
        return {name for record in self.records for name in record} - {"step", "time", STEPS}

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

    def per_step(self, metric: str) -> list[Point]:
        """(step, value / number of the record's steps) of a metric that is a sum."""
        steps = [record.get(STEPS, 1) for record in self.records if metric in record]
        return [(step, value / count) for (step, value), count in zip(self.points(metric), steps)]

    def total(self, metric: str) -> float:
        """What a metric per step adds up to over all steps, without values that are not finite."""
        steps = [record.get(STEPS, 1) for record in self.records if metric in record]
        return sum(value * count for (_, value), count in zip(self.points(metric), steps) if math.isfinite(value))

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
    timed = 0
    for record in records:
        step = record["step"]
        if SECONDS in record:
            record.setdefault(STEPS, max(step - timed, 1))  # files of before have no number of steps
            timed = step
        by_step[step] = _joined(by_step[step], record) if step in by_step else record
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


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two records of a step as one; seconds outside steps, in the second, are spread over the steps of the first."""
    joined = first | second
    if STEPS in first and STEPS not in second:
        for name in second:
            if name.startswith("timing/") and second[name] is not None:
                joined[name] = (first.get(name) or 0.0) + second[name] / first[STEPS]
    return joined


def _environment(paths: RunPaths) -> dict[str, Any]:
    """The environment that the newest attempt has recorded; empty if there is none or the file is damaged."""
    try:
        environment = json.loads((paths.root / "logs" / "latest" / paths.environment.name).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return environment if isinstance(environment, dict) else {}
