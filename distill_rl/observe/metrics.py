"""Metrics that carry their own reduction, so that no consumer needs a list of metric names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

Reduction = Literal["sum", "mean", "max", "min", "last"]


class Metric(NamedTuple):  # a dataclass takes longer to read from a pickle, and the driver reads a thousand per step
    """A value, and how it is merged with others of the same name over ranks and steps.

    A `mean` is weighted: `value` is the mean and `weight` the number of items it was taken over (for a loss, labelled
    tokens), so that merged means are exact.
    """

    value: float
    reduction: Reduction = "mean"
    weight: float = 1.0


Metrics = Mapping[str, Metric]

FAULTS = {
    "faults/student_restarts": "student restarted",
    "faults/teacher_restarts": "teachers restarted",
    "faults/aligner_restarts": "aligners restarted",
    "faults/teachers_lost": "teachers lost",
    "faults/skipped_steps": "steps skipped",
    "faults/unlabelled_steps": "steps without labels",
}
"""Metric → its label. Counts since the start of this attempt; absent from a record while they are 0."""


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merges the metrics of several ranks or steps, name by name, in the given order, each with its own reduction.

    A name need not occur in every part; the result has all of them.

    Raises:
        ValueError: a name has two different reductions.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _join(name, merged[name], metric) if name in merged else metric
    return merged


def values(metrics: Metrics) -> dict[str, float]:
    """Name → value of the metrics, without their reductions and weights."""
    return {name: metric.value for name, metric in metrics.items()}


def _join(name: str, a: Metric, b: Metric) -> Metric:
    """Merges two metrics of the same name by their reduction; weights add up.

    For `last` the value of `b` counts; a mean without any weight is 0.

    Args:
        name: for the error.

    Raises:
        ValueError: the two have different reductions.
    """
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
