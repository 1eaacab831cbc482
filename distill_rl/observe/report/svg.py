"""Figures of pages that have no script, such as Markdown: a chart or a comparison as an SVG file, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from distill_rl.observe.report.charts import Chart, number
from distill_rl.observe.report.page import environment

WIDTH = 760
_LABELS = 230
"""Width of the names beside dots."""
_ROW, _TOP, _BOTTOM = 20, 34, 34
_HEIGHT = 320
"""Of a chart of lines."""
_NARROW = 60
"""Width of the numbers beside lines."""
_TICKS, _COLOURS = 5, 8
_NO_SPAN = 1e-12
_LEGEND_CHARACTER = 6.2
"""Width of a character of the legend, about."""


@dataclass(frozen=True, slots=True)
class Dots:
    """A row of a comparison: single values, drawn as dots, and their mean, a bar."""

    name: str
    values: Sequence[float]
    mean: float
    marked: bool = False
    """Drawn in the colour of what the others are compared with."""


def dots_svg(title: str, rows: Sequence[Dots], unit: str) -> str:
    """A row per name: dots for the values, a bar for their mean; the scale is that of all values.

    Args:
        rows: at least one, from top to bottom.
        unit: of the values, below the scale.
    """
    values = [value for row in rows for value in (*row.values, row.mean)]
    ticks = ticks_between(min(values), max(values))
    x = partial(_place, low=ticks[0], high=ticks[-1], start=_LABELS, end=WIDTH - 20)
    drawn = [
        {
            "name": row.name,
            "y": _TOP + _ROW * i + _ROW / 2,
            "values": [x(value) for value in row.values],
            "mean": x(row.mean),
            "marked": row.marked,
        }
        for i, row in enumerate(rows)
    ]
    height = _TOP + _ROW * len(rows) + _BOTTOM
    axis = [{"x": x(tick), "text": number(tick)} for tick in ticks]
    frame = {"top": _TOP, "bottom": height - _BOTTOM, "left": _LABELS, "width": WIDTH, "height": height}
    return _render("dots.svg.jinja", title=title, rows=drawn, axis=axis, unit=unit, **frame)


def lines_svg(chart: Chart, *, x_name: str, y_name: str) -> str:
    """A chart's curves over a logarithmic axis, with a dot at each point and a legend.

    Args:
        chart: with curves whose steps are above 0 and whose values are finite.
        x_name, y_name: what the axes show, with units.
    """
    steps = sorted({step for curve in chart.curves for step, _ in curve.points})
    ticks = ticks_between(*_range(value for curve in chart.curves for value in curve.values))
    bottom = _HEIGHT - _BOTTOM
    x = partial(_place, low=math.log(steps[0]), high=math.log(steps[-1]), start=_NARROW, end=WIDTH - 20)
    y = partial(_place, low=ticks[0], high=ticks[-1], start=bottom, end=_TOP)
    curves = [
        {**_style(i), "points": [(x(math.log(step)), y(value)) for step, value in curve.points]}
        for i, curve in enumerate(chart.curves)
    ]
    legend, height = _legend([curve.label for curve in chart.curves])
    return _render(
        "lines.svg.jinja",
        title=chart.title,
        curves=curves,
        legend=legend,
        x_axis=[{"x": x(math.log(step)), "text": number(step)} for step in steps],
        y_axis=[{"y": y(tick), "text": number(tick)} for tick in ticks],
        x_name=x_name,
        y_name=y_name,
        **{"top": _TOP, "bottom": bottom, "left": _NARROW, "width": WIDTH, "height": _HEIGHT + height},
    )


def ticks_between(low: float, high: float) -> list[float]:
    """Round numbers at equal distances, about _TICKS of them, the first at most `low` and the last at least `high`."""
    span = high - low if high - low > _NO_SPAN else max(abs(high), 1.0)
    rough = span / (_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def _range(values: Iterator[float]) -> tuple[float, float]:
    known = list(values)
    return min(known), max(known)


def _place(value: float, *, low: float, high: float, start: float, end: float) -> float:
    """Where a value between `low` and `high` is drawn between `start` and `end`."""
    share = (value - low) / (high - low) if high > low else 0.5
    return round(start + share * (end - start), 1)


def _style(i: int) -> dict[str, object]:
    """The colour of the i-th curve; those after the last colour begin again, dashed."""
    return {"color": i % _COLOURS, "dashed": i >= _COLOURS}


def _legend(names: Sequence[str]) -> tuple[list[dict[str, object]], int]:
    """Places of the names, in lines below a chart, and the height that they take."""
    places: list[dict[str, object]] = []
    x, line = float(_NARROW), 0
    for i, name in enumerate(names):
        width = 34 + _LEGEND_CHARACTER * len(name)
        if x + width > WIDTH and x > _NARROW:
            x, line = float(_NARROW), line + 1
        places.append({"x": round(x, 1), "y": _HEIGHT + 12 + 18 * line, **_style(i), "text": name})
        x += width
    return places, 12 + 18 * (line + 1)


def _render(template: str, **values: object) -> str:
    return environment(autoescape=True).get_template(template).render(**values)
