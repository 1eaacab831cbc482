"""The charts of the report as data: curves, thinned, which the page's script draws.

A line chart keeps the lowest and the highest value of every stretch of steps, so that no peak disappears; a stack keeps
means, so that its parts still add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

MAX_POINTS, MIN_POINTS, MAX_AREA_POINTS = 2000, 500, 120
"""Points of a curve that all runs of a page share; those that a run has at least; points of a stacked curve."""
LOG_RATIO = 20.0
"""Positive values that span more than this factor get a logarithmic axis."""
CLIP_RATIO = 4.0
"""A stack whose highest step exceeds this many medians is cut off at CLIP_RATIO / 2 medians."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A metric of a run in a chart."""

    label: str
    """What distinguishes the metric from the others of the chart."""
    points: Sequence[Point]
    """(step, value) by ascending step; a value that is not finite makes a gap."""
    run: int = 0
    """Index of the run."""
    exact: bool = False
    """Never smoothed."""

    @property
    def values(self) -> list[float]:
        """The finite values."""
        return [value for _, value in self.points if math.isfinite(value)]


@dataclass(frozen=True)
class Chart:
    """A figure of the page."""

    title: str
    curves: Sequence[Curve]
    notes: Sequence[str] = ()
    """Shown beside the title."""
    caption: str = ""
    """A sentence below the title."""
    logarithmic: bool = False
    """Whether its axis is logarithmic unless the reader chooses."""
    stacked: bool = False
    ceiling: float | None = None
    """Upper end of the axis; None: the highest value."""

    def data(self, steps: Steps, limit: int) -> dict[str, Any]:
        """The chart as JSON types for the page's script; a value that is not finite is null.

        Args:
            steps: gets the steps of the curves.
            limit: most points of a curve.
        """
        curves = []
        for curve in self.curves:
            points = curve.points if self.stacked else decimate(curve.points, limit)
            entry: dict[str, Any] = {"label": curve.label, "run": curve.run, "exact": curve.exact}
            entry["steps"] = steps.index([step for step, _ in points])
            entry["values"] = [_rounded(value) for _, value in points]
            curves.append(entry)
        return {
            "title": self.title,
            "curves": curves,
            "log": self.logarithmic,
            "stacked": self.stacked,
            "ceiling": self.ceiling,
        }


@dataclass
class Steps:
    """The lists of steps that curves refer to: most curves of a run have the same."""

    indices: dict[tuple[float, ...], int] = field(default_factory=dict)

    def index(self, steps: Sequence[float]) -> int:
        """The index of a list of steps, which is added if it is new."""
        key = tuple(int(step) if step == int(step) else round(step, 1) for step in steps)
        return self.indices.setdefault(key, len(self.indices))


def line_chart(title: str, curves: Iterable[Curve], *, linear: bool = False, caption: str = "") -> Chart | None:
    """A chart with one curve per series that has finite values; None if there is none.

    Positive values that span more than LOG_RATIO get a logarithmic axis, unless `linear`. Values that are not finite
    are counted in a note.
    """
    curves = [curve for curve in curves if curve.values]
    if not curves:
        return None
    finite = [value for curve in curves for value in curve.values]
    gaps = sum(len(curve.points) for curve in curves) - len(finite)
    logarithmic = not linear and min(finite) > 0 and max(finite) / min(finite) > LOG_RATIO
    return Chart(title, curves, [f"{gaps} not finite"] if gaps else [], caption, logarithmic)


def stacked_chart(title: str, curves: Sequence[Curve], unit: str) -> Chart | None:
    """A chart of areas stacked in the given order; None without curves or if their sum is not above 0.

    Each one's label gets its share of the total. A peak far above the median is cut off, which a note says.

    Args:
        curves: all with the same steps and with finite values.
        unit: of the values, for the note.
    """
    steps = [step for step, _ in curves[0].points] if curves else []
    totals = [sum(curve.points[i][1] for curve in curves) for i in range(len(steps))]
    if not totals or not sum(totals) > 0:
        return None
    notes, ceiling = [], None
    peak, usual = max(totals), median(totals)
    if usual > 0 and peak > CLIP_RATIO * usual:
        ceiling = CLIP_RATIO / 2 * usual
        notes = [f"step {steps[totals.index(peak)]:,.0f}: {number(peak)} {unit}, cut off"]
    shown = []
    for curve in curves:
        share = sum(curve.values) / sum(totals)
        label = f"{curve.label} {share:.0%}"
        shown.append(Curve(label, thin(curve.points, MAX_AREA_POINTS), curve.run, exact=True))
    return Chart(title, shown, notes, stacked=True, ceiling=ceiling)


def decimate(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` of the points (4 or more), with the first and last one and, of every stretch between, the lowest
    and the highest.

    A value that is not finite stays if its stretch has no other.
    """
    if len(points) <= limit:
        return list(points)
    first, *inner, last = points
    size = math.ceil(len(inner) / ((limit - 2) // 2))
    kept = [first]
    for start in range(0, len(inner), size):
        stretch = inner[start : start + size]
        finite = [point for point in stretch if math.isfinite(point[1])]
        if finite:
            ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
            kept += sorted(ends)
        else:
            kept.append(stretch[0])
    return [*kept, last]


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: means of runs of neighbours, in step and value.

    The mean of a run's finite values is taken; the value of a run without any is NaN, a gap.
    """
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / limit)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [(_mean(step for step, _ in run), _mean(value for _, value in run)) for run in runs]


def points_per_curve(num_runs: int) -> int:
    """Most points of a curve on a page about so many runs, so that the page does not grow with their number at once."""
    return max(MIN_POINTS, MAX_POINTS // num_runs)


def number(value: float) -> str:
    """A value as short text, such as `0.1235`, `12,346` or `1.2e-5`; a dash if it is not finite.

    Four significant digits; a whole number with thousands separators if its size is 1000 or more; up to three digits
    and an exponent if it is below 0.001, or 10 million or more.
    """
    if not math.isfinite(value):
        return "—"
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _mean(values: Iterable[float]) -> float:
    """The mean of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def _rounded(value: float) -> float | None:
    """The value with six significant digits, as an integer where it is one; None if it is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) and abs(short) < 2**53 else short
