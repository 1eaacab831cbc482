"""Writes pages from the folders `templates` and `assets`.

An undefined name in a template is an error. A page is one file: styles and scripts are part of it, and its content
security policy lets a browser run exactly these scripts (by their hashes) and load nothing. What is put into a page is
data: text is escaped, and `data` is JSON without any character that could end the element that holds it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl import __version__
from distill_rl.observe.report.charts import Chart, number
from distill_rl.observe.report.scores import FACTS, Evaluation
from distill_rl.system.files import write_atomic

if TYPE_CHECKING:
    from jinja2 import Environment


SCRIPTS = ("numbers.js", "chart.js", "samples.js", "report.js")
"""Our own scripts, in the order in which they run; they share one scope."""
_UPLOT = "uplot/"


def environment(**options: Any) -> Environment:
    """A Jinja environment for the folder `templates`, in which an undefined name is an error.

    Args:
        options: further ones of `jinja2.Environment`. HTML needs `autoescape=True`, since nothing is escaped by
            default.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("distill_rl.observe.report", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )


def write_page(path: Path, template: str, *, data: Any = None, **values: Any) -> None:
    """Renders an HTML template with the given values, which are escaped, and writes the page atomically.

    An existing file is replaced, and missing folders are created.

    Args:
        template: name of the file, such as `report.html.jinja`.
        data: JSON types for the scripts; None: a page without scripts.

    Raises:
        OSError: the page cannot be written.
        jinja2.UndefinedError: the template uses a name that has no value.
    """
    from markupsafe import Markup

    scripts = [] if data is None else [_library(), _program()]
    page = (
        environment(autoescape=True)
        .get_template(template)
        .render(
            **values,
            styles=Markup(_styles(with_charts=bool(scripts))),
            scripts=[Markup(script) for script in scripts],
            script_sources=" ".join(f"'sha256-{_hash(script)}'" for script in scripts) or "'none'",
            data=Markup("" if data is None else _json(data)),
        )
    )
    write_atomic(path, page.encode("utf-8", errors="replace"))


def _json(data: Any) -> str:
    """JSON that can stand in a script element: `<`, `>` and `&` are written as escapes, and so is all that is not ASCII."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _library() -> str:
    return f"/*!\n{_asset(_UPLOT + 'LICENSE')}*/\n{_asset(_UPLOT + 'uPlot.iife.min.js')}"


@cache
def _program() -> str:
    return '"use strict";\n(() => {\n' + "\n".join(map(_asset, SCRIPTS)) + "})();\n"


@cache
def _styles(*, with_charts: bool) -> str:
    """The style sheets of a page, with those of the charts or without."""
    return "\n".join(
        map(_asset, ("page.css", _UPLOT + "uPlot.min.css", "charts.css") if with_charts else ("page.css",))
    )


def _asset(name: str) -> str:
    return resources.files("distill_rl.observe.report").joinpath("assets", name).read_text("utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def write_comparison(evaluation: Evaluation, path: Path) -> None:
    """Writes an HTML page that compares evaluated models, with the facts that their results have.

    Raises:
        OSError: the page cannot be written.
    """
    models, suites = evaluation.models, evaluation.by_suite()
    facts = {"models": f"{len(models)}", "suites": f"{len(suites)}"}
    if evaluation.baseline is not None:
        facts["baseline"] = evaluation.baseline
    write_page(
        path,
        "comparison.html.jinja",
        title=joined(models),
        facts=facts | {"created by": f"distill_rl {__version__}"},
        evaluation=evaluation,
        fact_names=[name for name in FACTS if any(name in score.facts for score in evaluation.scores)],
    )


def joined(names: Sequence[str]) -> str:
    """A title of a few names: the first three, and how many there are beside them."""
    return " · ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Figures of pages that have no script, such as Markdown: a chart or a comparison as an SVG file, light and dark.

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
