"""A metric carries its own reduction, so that no consumer keeps a list of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["sum", "mean", "max", "min", "last"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One value and how it joins others of its name, over ranks and over steps.

    A `mean` is weighted: give the *mean* as `value` and the number of things it is a mean of as
    `weight` (labelled tokens for a loss), and merged means are exact.
    """

    value: float
    reduction: Reduction = "mean"
    weight: float = 1.0


Metrics = Mapping[str, Metric]

FAULTS = {
    "faults/teacher_restarts": "teachers restarted",
    "faults/aligner_restarts": "aligners restarted",
    "faults/teachers_lost": "teachers lost",
    "faults/skipped_steps": "steps skipped",
}
"""Counts since the run began, in a record once they are not 0 → what they count."""


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Joins metrics of several ranks or steps, name by name, in the order given.

    Raises:
        ValueError: one name with two reductions.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _join(name, merged[name], metric) if name in merged else metric
    return merged


def values(metrics: Metrics) -> dict[str, float]:
    """Names and plain numbers, as a sink writes them."""
    return {name: metric.value for name, metric in metrics.items()}


def _join(name: str, a: Metric, b: Metric) -> Metric:
    if a.reduction != b.reduction:
        raise ValueError(f"{name}: reduced as {a.reduction} and as {b.reduction}")
    weight = a.weight + b.weight
    match a.reduction:
        case "sum":
            value = a.value + b.value
        case "mean":
            value = (a.value * a.weight + b.value * b.weight) / weight if weight else 0.0
        case "max":
            value = max(a.value, b.value)
        case "min":
            value = min(a.value, b.value)
        case "last":
            value = b.value
    return Metric(value, a.reduction, weight)
