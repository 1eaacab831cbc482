"""The geometry of the report's charts: turns series into coordinates, which the template draws as SVG.

Coordinates refer to a view box of WIDTH × HEIGHT with the plot between LEFT, RIGHT, TOP and BOTTOM. Steps:

1. Thin the points by averaging, so that a long run does not make a large page (`thin`).
2. Choose the axes: steps are linear; positive values that span more than LOG_RATIO get a logarithmic axis.
3. Draw each curve as one path with gaps at values that are not finite; a noisy one faintly, under its moving average.
4. Cut the plot into strips, each with the values to show while the pointer is over it (`_probes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

WIDTH, HEIGHT = 560, 236
LEFT, RIGHT, TOP, BOTTOM = 52, 548, 32, 206
MAX_POINTS, MAX_AREA_POINTS, MAX_PROBES = 400, 80, 100
LOG_RATIO = 20.0
"""Positive values that span more than this factor get a logarithmic axis."""
CLIP_RATIO = 4.0
"""A stack whose highest step exceeds this many medians is cut off at CLIP_RATIO / 2 medians."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named curve."""

    label: str
    points: Sequence[Point]
    """(step, value) by ascending step; a value that is not finite makes a gap."""
    color: int
    """Index into the palette."""
    noisy: bool = False
    """Drawn faintly, under its moving average."""
    dashed: bool = False


@dataclass(frozen=True)
class Mark:
    """A path with its colour and CSS classes."""

    d: str
    color: int
    classes: str


@dataclass(frozen=True)
class Probe:
    """The text and dots that a chart shows while the pointer is over one strip of it."""

    x: float
    left: float
    width: float
    lines: tuple[str, ...]
    dots: tuple[tuple[float, float, int], ...]
    """(x, y, colour)"""


@dataclass
class Chart:
    title: str
    notes: list[str] = field(default_factory=list)
    legend: list[tuple[str, int, bool]] = field(default_factory=list)
    """(label, colour, dashed)"""
    x_ticks: list[tuple[float, str]] = field(default_factory=list)
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    dots: list[tuple[float, float, int]] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)


def line_chart(title: str, series: Iterable[Series], *, linear: bool = False) -> Chart | None:
    """A chart with one curve per series that has finite values; None if there is none.

    Positive values that span more than LOG_RATIO get a logarithmic axis, unless `linear`. Long series are thinned, and
    noisy ones of more than 20 points get a moving average. Values that are not finite make gaps and are counted in a
    note.
    """
    series = [curve for curve in series if any(math.isfinite(y) for _, y in curve.points)]
    if not series:
        return None
    finite = [y for curve in series for _, y in curve.points if math.isfinite(y)]
    logarithmic = not linear and min(finite) > 0 and max(finite) / min(finite) > LOG_RATIO
    chart = Chart(title, notes=["log scale"] if logarithmic else [])
    gaps = sum(len(curve.points) for curve in series) - len(finite)
    if gaps:
        chart.notes.append(f"{gaps} not finite")
    x, chart.x_ticks = _step_axis([step for curve in series for step, _ in curve.points])
    y, chart.y_ticks = _value_axis(min(finite), max(finite), logarithmic)
    for curve in series:
        points = thin(curve.points, MAX_POINTS)
        smooth = _smooth(points) if curve.noisy and len(points) > 20 else points
        if smooth is not points:
            chart.marks.append(Mark(_path(points, x, y), curve.color, "raw"))
        chart.marks.append(Mark(_path(smooth, x, y), curve.color, "line dashed" if curve.dashed else "line"))
        if len(points) <= 30:
            chart.dots += [(x(step), y(value), curve.color) for step, value in points if math.isfinite(value)]
        chart.legend.append((curve.label, curve.color, curve.dashed))
    chart.probes = _probes(series, x, y)
    return chart


def stacked_chart(title: str, series: Sequence[Series], unit: str) -> Chart | None:
    """A chart of areas stacked in the given order; None without series or if their sum is not above 0.

    The legend shows each one's share of the total. A peak far above the median is cut off, which a note says.

    Args:
        series: all with the same steps and with finite values.
        unit: of the values, for the note.
    """
    steps = [step for step, _ in series[0].points] if series else []
    totals = [sum(curve.points[i][1] for curve in series) for i in range(len(steps))]
    if not totals or not sum(totals) > 0:
        return None
    chart, coarse = Chart(title), [thin(curve.points, MAX_AREA_POINTS) for curve in series]
    heights = [sum(points[i][1] for points in coarse) for i in range(len(coarse[0]))]
    top, usual = max(heights), median(heights)
    if usual > 0 and top > CLIP_RATIO * usual:
        chart.notes.append(f"step {steps[totals.index(max(totals))]:,.0f}: {number(max(totals))} {unit}, cut off")
        top = usual * CLIP_RATIO / 2
    x, chart.x_ticks = _step_axis(steps)
    y, chart.y_ticks = _value_axis(0.0, top, False)
    floor = [(step, 0.0) for step, _ in coarse[0]]
    for curve, points in zip(series, coarse):
        ceiling = [(step, low + value) for (step, low), (_, value) in zip(floor, points)]
        outline = [(step, min(value, top)) for step, value in (*ceiling, *reversed(floor))]
        chart.marks.append(Mark(_path(outline, x, y) + "Z", curve.color, "area"))
        share = sum(value for _, value in curve.points) / sum(totals)
        chart.legend.append((f"{curve.label} {share:.0%}", curve.color, False))
        floor = ceiling
    chart.probes = _probes(series, x, None)
    return chart


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: all if they are few enough, otherwise the means of runs of neighbours.

    Both steps and values are averaged, values over the finite ones; the value of a run without any is NaN, a gap.
    """
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / limit)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [(_mean(step for step, _ in run), _mean(value for _, value in run)) for run in runs]


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


def _smooth(points: Sequence[Point]) -> list[Point]:
    """Centred moving average over about a twentieth of the points, but at least three, with the same steps.

    Values that are not finite stay as they are and count in no average.
    """
    half = max(1, len(points) // 40)
    return [
        (step, _mean(y for _, y in points[max(0, i - half) : i + half + 1]) if math.isfinite(value) else value)
        for i, (step, value) in enumerate(points)
    ]


def _path(points: Iterable[Point], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """The SVG path, as text, of lines through the points; empty without finite values.

    There is a gap where a value is not finite.

    Args:
        x, y: turn a step and a value into coordinates.
    """
    parts, pen = [], "M"
    for step, value in points:
        if not math.isfinite(value):
            pen = "M"
            continue
        parts.append(f"{pen}{x(step):.1f} {y(value):.1f}")
        pen = "L"
    return "".join(parts)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """The linear function that maps `low` to `start` and `high` to `end`; the two must differ."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _step_axis(steps: Sequence[float]) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """The horizontal axis for these steps, of which there must be one at least.

    Returns:
        The function step → x coordinate, and the ticks (x coordinate, label), which are at whole steps.
    """
    low, high = min(steps), max(steps)
    if low == high:
        low, high = low - 1, high + 1
    x = _scale(low, high, LEFT, RIGHT)
    ticks = [tick for tick in _nice(low, high, 6) if tick == round(tick)]
    return x, [(x(tick), f"{tick:,.0f}") for tick in ticks]


def _value_axis(low: float, high: float, logarithmic: bool) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """The vertical axis for values from `low` to `high`: the function value → y coordinate, and ticks (y, label).

    A linear axis begins at 0 if the values are positive and `low` is less than half of `high`.

    Args:
        logarithmic: needs `low` above 0; values of 0 or less are then drawn at the bottom.
    """
    if logarithmic:
        scale = _scale(math.log10(low) - 0.05, math.log10(high) + 0.05, BOTTOM, TOP)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        if len(decades) > 4:
            digits: tuple[int, ...] = (1,)
        elif len(decades) > 3:
            digits = (1, 3)
        else:
            digits = (1, 2, 5)
        every = math.ceil(len(decades) / 6)
        ticks = [digit * 10.0**decade for decade in decades[::every] for digit in digits]

        def y(value: float) -> float:
            return scale(math.log10(value)) if value > 0 else BOTTOM

        return y, [(y(tick), number(tick)) for tick in ticks if low * 0.9 <= tick <= high * 1.1]
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    elif 0 < low < 0.5 * high:
        low = 0.0
    scale = _scale(low, high, BOTTOM, TOP)
    return scale, [(scale(tick), number(tick)) for tick in _nice(low, high, 5)]


def _nice(low: float, high: float, count: int) -> list[float]:
    """At most about `count` round numbers from `low` to `high`, ascending; `high` must be greater than `low`.

    They are the multiples, in that range, of 1, 2 or 5 times a power of ten.
    """
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _probes(series: Sequence[Series], x: Callable[[float], float], y: Callable[[float], float] | None) -> list[Probe]:
    """The texts and dots that a chart shows under the pointer: one strip per step or few, with each series' mean.

    The strips cover the plot from LEFT to RIGHT. A series without a finite value in a strip is left out of it.

    Args:
        x, y: turn a step and a value into coordinates; `y` None: no dots.
    """
    steps = sorted({step for curve in series for step, _ in curve.points})
    size = math.ceil(len(steps) / MAX_PROBES)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    centers = [x(_mean(group)) for group in groups]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(centers)), RIGHT]
    by_step = [dict(curve.points) for curve in series]
    probes = []
    for i, (group, center) in enumerate(zip(groups, centers)):
        first, last = group[0], group[-1]
        texts, dots = [f"step {first:,.0f}" if first == last else f"steps {first:,.0f}–{last:,.0f}"], []
        for curve, values in zip(series, by_step):
            value = _mean(values[step] for step in group if step in values)
            if math.isfinite(value):
                texts.append(f"{curve.label} {number(value)}")
                if y is not None:
                    dots.append((center, y(value), curve.color))
        width = edges[i + 1] - edges[i]
        probes.append(Probe(center, edges[i], width, _wrapped(texts), tuple(dots)))
    return probes


def _wrapped(texts: Sequence[str]) -> tuple[str, ...]:
    """Joins texts, at least one, with " · " into one or two lines that fit the chart; "…" replaces what does not."""
    lines = [texts[0]]
    for text in texts[1:]:
        if len(lines[-1]) + len(text) < 84:
            lines[-1] += f" · {text}"
        elif len(lines) == 2:
            return (lines[0], f"{lines[1]} · …")
        else:
            lines.append(text)
    return tuple(line if len(line) < 90 else line[:88] + "…" for line in lines)
