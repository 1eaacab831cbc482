"""Writes pages from the folders `templates` and `assets`.

An undefined name in a template is an error. A page is one file: styles and scripts are part of it, and its content
security policy lets a browser run exactly these scripts (by their hashes) and load nothing. What is put into a page is
data: text is escaped, and `data` is JSON without any character that could end the element that holds it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl import __version__
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
    """uPlot with its licence."""
    return f"/*!\n{_asset(_UPLOT + 'LICENSE')}*/\n{_asset(_UPLOT + 'uPlot.iife.min.js')}"


@cache
def _program() -> str:
    """Our own scripts as one."""
    return '"use strict";\n(() => {\n' + "\n".join(map(_asset, SCRIPTS)) + "})();\n"


@cache
def _styles(*, with_charts: bool) -> str:
    """The style sheets of a page, with those of the charts or without."""
    return "\n".join(
        map(_asset, ("page.css", _UPLOT + "uPlot.min.css", "charts.css") if with_charts else ("page.css",))
    )


def _asset(name: str) -> str:
    """The text of a file in the folder `assets`."""
    return resources.files("distill_rl.observe.report").joinpath("assets", name).read_text("utf-8")


def _hash(script: str) -> str:
    """The SHA-256 of a script in base64, as a content security policy names it."""
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
