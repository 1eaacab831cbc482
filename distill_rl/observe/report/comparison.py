"""A static HTML page that compares evaluated models."""

from __future__ import annotations

from pathlib import Path

from distill_rl import __version__
from distill_rl.observe.report.page import write_page
from distill_rl.observe.report.scores import FACTS, Evaluation


def write_comparison(evaluation: Evaluation, path: Path) -> None:
    """Write the page. Raises OSError if it cannot be written."""
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
