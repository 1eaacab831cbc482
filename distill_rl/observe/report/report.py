"""The HTML page about a run, or several runs: one file, which opens offline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill_rl.observe.report import charts
from distill_rl.observe.report.charts import Chart, Steps
from distill_rl.observe.report.page import joined, write_page
from distill_rl.observe.report.runs import Run, read_runs
from distill_rl.observe.report.samples import samples
from distill_rl.observe.report.scores import Evaluation
from distill_rl.observe.report.sections import Section, constants, score_charts, sections
from distill_rl.observe.report.settings import FAULT_LABELS, MISSING, differences, environment, figures, header

INLINE_TASKS = 6
"""With more tasks than this, the scores by task get a separate table."""


def write_report(
    run_dir: str | os.PathLike[str],
    *,
    evaluation: Evaluation,
    comparisons: Sequence[str | os.PathLike[str]] = (),
    out: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes the HTML page about a run, by default `<run_dir>/report.html`, and returns its path.

    Args:
        run_dir: holds metrics.jsonl, and optionally config.yaml.
        evaluation: scores of this run and of `comparisons`, possibly with differences between models
            (`evals.results.compare.of_run`).
        comparisons: other run directories, which are drawn over this one.
        out: path of the page; None: `<run_dir>/report.html`.

    Raises:
        DataError: a directory without metrics.jsonl.
        OSError: the page cannot be written.
    """
    runs = read_runs([run_dir, *comparisons])
    final = evaluation.only(lambda score: score.step is None)
    during = evaluation.only(lambda score: score.step is not None)
    path = runs[0].paths.report if out is None else Path(out)
    drawn, scored = sections(runs), score_charts(runs)
    write_page(
        path,
        "report.html.jinja",
        title=joined([run.name for run in runs]),
        data=page_data(runs, drawn, scored),
        runs=runs,
        facts=header(runs[0]),
        figures=figures(runs[0]),
        results=_results(runs),
        fault_labels=FAULT_LABELS,
        differences=differences(runs) if len(runs) > 1 else [],
        environments=[environment(run) for run in runs],
        sections=drawn,
        score_charts=scored,
        constants=constants(runs),
        last_values=_last_values(runs),
        evaluation=evaluation,
        final=final if final.scores else during,
        during=during if during.scores and final.scores else None,
        few_tasks=all(len(score.tasks) <= INLINE_TASKS for score in evaluation.scores),
    )
    return path


def page_data(runs: Sequence[Run], drawn: Sequence[Section], scored: Sequence[Chart]) -> dict[str, Any]:
    """What the page's script draws, as JSON types: the runs' names, lists of steps, all charts in the page's order,
    and sample completions."""
    steps, limit = Steps(), charts.points_per_curve(len(runs))
    in_order = [*scored, *(chart for section in drawn for chart in section.charts)]
    curves = [chart.data(steps, limit) for chart in in_order]
    names = [run.name for run in runs]
    return {"runs": names, "steps": list(steps.indices), "charts": curves, "samples": samples(runs)}


def _results(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(figure, its value in each run as text) of all figures (`figures`) that a run has."""
    columns = [figures(run) for run in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    return [(label, [column.get(label, MISSING) for column in columns]) for label in labels]


def _last_values(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(metric, its last finite value in each run as text) of all metrics, by name."""
    rows = []
    for name in sorted(set().union(*(run.metrics for run in runs))):
        values = [run.last(name) for run in runs]
        rows.append((name, [MISSING if value is None else charts.number(value) for value in values]))
    return rows
