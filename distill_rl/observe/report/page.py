"""The templates beside this file. An undefined name is an error, and HTML pages escape everything put into them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl import __version__
from distill_rl.observe.report.scores import FACTS, Evaluation
from distill_rl.system.files import write_atomic

if TYPE_CHECKING:
    from jinja2 import Environment


def environment(**options: Any) -> Environment:
    """A Jinja environment for the templates of this folder, in which an undefined name is an error.

    Args:
        options: further ones of `jinja2.Environment`. HTML needs `autoescape=True`, since nothing is escaped by
            default.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("distill_rl.observe.report", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )


def write_page(path: Path, template: str, **values: Any) -> None:
    """Renders an HTML template of this folder with the given values, which are escaped, and writes the page atomically.

    An existing file is replaced, and missing folders are created.

    Args:
        template: name of the file, such as `report.html.jinja`.

    Raises:
        OSError: the page cannot be written.
        jinja2.UndefinedError: the template uses a name that has no value.
    """
    page = environment(autoescape=True).get_template(template).render(**values)
    write_atomic(path, page.encode("utf-8", errors="replace"))


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
        title=" · ".join(models[:3]) + (f" and {len(models) - 3} more" if len(models) > 3 else ""),
        facts=facts | {"created by": f"distill_rl {__version__}"},
        evaluation=evaluation,
        fact_names=[name for name in FACTS if any(name in score.facts for score in evaluation.scores)],
    )
