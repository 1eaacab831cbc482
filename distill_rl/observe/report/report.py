"""A static HTML page about a run: no script, no reference to anything outside the file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from distill_rl import __version__
from distill_rl.config.load import load_config
from distill_rl.config.save import fingerprint
from distill_rl.errors import DataError, DistillError
from distill_rl.observe.metrics import FAULTS
from distill_rl.observe.report import charts
from distill_rl.observe.report.charts import Chart, Series
from distill_rl.observe.report.page import write_page
from distill_rl.observe.report.scores import Evaluation
from distill_rl.observe.sinks.sinks import RATE, SECONDS, TOKENS, read_records
from distill_rl.types import RunPaths

INLINE_TASKS = 6
"""With more tasks than this, the scores by task get a separate table."""
NAMED = ("train/kl_loss", "validation/kl_loss", "train/nll_loss", "validation/nll_loss", "train/lr", "train/grad_norm")
"""Metrics with a chart among the main ones; `_chart_groups` knows further ones by their prefix."""


@dataclass(frozen=True)
class Run:
    """The records and the configuration of a run directory. Missing files and damaged lines are skipped."""

    name: str
    records: list[dict[str, Any]]
    """By ascending step; records of the same step are merged."""
    config: str

    def points(self, metric: str, default: float | None = None) -> list[charts.Point]:
        """(step, value) of the records with the metric; a value that is no number, such as null, becomes NaN.

        Args:
            default: value for records without the metric; None: they are left out.
        """
        points = []
        for record in self.records:
            if metric in record or default is not None:
                value = record.get(metric, default)
                points.append((float(record["step"]), float(value) if isinstance(value, int | float) else math.nan))
        return points

    def last(self, metric: str) -> float | None:
        """The metric's last finite value; None if it has none."""
        finite = [value for _, value in self.points(metric) if math.isfinite(value)]
        return finite[-1] if finite else None


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
        comparisons: other run directories, whose losses and scores during training are shown for comparison.
        out: path of the page; None: `<run_dir>/report.html`.

    Raises:
        DataError: a directory without metrics.jsonl.
        OSError: the page cannot be written.
    """
    run, others = read_run(run_dir), [read_run(other) for other in comparisons]
    final = evaluation.only(lambda score: score.step is None)
    during = evaluation.only(lambda score: score.step is not None)
    path = RunPaths(Path(run_dir)).report if out is None else Path(out)
    write_page(
        path,
        "report.html.jinja",
        title=run.name,
        run=run,
        facts=_header(run, RunPaths(Path(run_dir)).config),
        tiles=_tiles(run),
        groups=[(title, group) for title, group in _chart_groups(run, others) if group],
        score_chart=_score_chart(run, others),
        evaluation=evaluation,
        final=final if final.scores else during,
        during=during if during.scores and final.scores else None,
        few_tasks=all(len(score.tasks) <= INLINE_TASKS for score in evaluation.scores),
        geometry=charts,
    )
    return path


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Reads a run directory: its records, merged by step, and the text of its config.yaml (empty if there is none).

    Of two records of a step, the later one's values replace those of the same name. The run is named after the folder.

    Raises:
        DataError: its metrics.jsonl is missing or unreadable.
    """
    paths = RunPaths(Path(folder))
    try:
        records = read_records(paths.metrics)
    except OSError as error:
        raise DataError(
            f"report of {folder}", "a run directory holds metrics.jsonl", error.strerror, "give the folder of a run"
        ) from error
    by_step: dict[int, dict[str, Any]] = {}
    for record in records:
        by_step[record["step"]] = by_step.get(record["step"], {}) | record
    config = paths.config.read_text("utf-8", errors="replace") if paths.config.is_file() else ""
    return Run(paths.root.resolve().name, [by_step[step] for step in sorted(by_step)], config)


def _header(run: Run, config: Path) -> dict[str, str]:
    """The facts under the report's title, by name: times, fingerprint of the configuration, version of this package.

    The times are those of the first and last record, in UTC. What is not known is left out.

    Args:
        config: path of the run's config.yaml; one that this version cannot load is shown as written by another version.
    """
    facts = {}
    times = [record["time"] for record in run.records if isinstance(record.get("time"), int | float)]
    if times:
        facts["first record"], facts["last record"] = _date(min(times)), _date(max(times))
    if run.config:
        try:
            facts["configuration"] = fingerprint(load_config(config))[:16]
        except DistillError:
            facts["configuration"] = "written by another version"
    return facts | {"created by": f"distill_rl {__version__}"}


def _date(seconds: float) -> str:
    """Seconds since the epoch as date and time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _tiles(run: Run) -> list[tuple[str, str]]:
    """(label, figure as text) of a run's most important numbers, such as steps, last losses, tokens and faults.

    Those without a finite value are left out.
    """
    tiles: list[tuple[str, str]] = []

    def add(label: str, value: float | None, text: Callable[[float], str] = charts.number) -> None:
        if value is not None and math.isfinite(value):
            tiles.append((label, text(value)))

    add("steps", run.records[-1]["step"] if run.records else 0, lambda value: f"{value:,.0f}")
    add("KD, validation", run.last("validation/kl_loss"))
    add("CE, validation", run.last("validation/nll_loss"))
    add("KD, train", run.last("train/kl_loss"))
    add("tokens compared", run.last("align/coverage"), "{:.1%}".format)
    tokens = [value for _, value in run.points(TOKENS) if math.isfinite(value)]
    add("tokens", sum(tokens) if tokens else None, lambda value: f"{value:,.0f}")
    rates = [value for _, value in run.points(RATE) if math.isfinite(value)]
    add("tokens/s, median", median(rates) if rates else None, lambda value: f"{value:,.0f}")
    seconds, previous_step = 0.0, 0.0
    for step, mean in run.points(SECONDS):
        # A record holds the mean over all steps since the record before it.
        if math.isfinite(mean):
            seconds += mean * (step - previous_step)
        previous_step = step
    add(
        "time spent in steps",
        seconds or None,
        lambda value: f"{value:,.1f} s" if value < 120 else f"{value / 60:,.1f} min",
    )
    for label, points in _faults(run).items():
        add(label, points[-1][1])
    return tiles


def _faults(run: Run) -> dict[str, list[charts.Point]]:
    """Label → cumulative counts, (step, count) for every record, of the kinds of faults that occurred.

    Empty without faults. The counts in the records restart at 0 when a run is resumed; these go on.
    """
    curves = {}
    for name, label in FAULTS.items():
        total, previous_count, points = 0.0, 0.0, []
        for step, count in run.points(name, default=0.0):
            if math.isfinite(count):
                total += max(0.0, count - previous_count)
                previous_count = count
            points.append((step, total))
        if total:
            curves[label] = points
    return curves


def _chart_groups(run: Run, others: Sequence[Run]) -> list[tuple[str, list[Chart]]]:
    """The report's charts as two groups (title, charts): the main ones, without a title, and one per other metric.

    Charts without data are left out, so a group may be empty; scores are not among them. The losses of `others` are
    drawn for comparison.
    """
    main = [
        _loss_chart("Distillation loss (KD)", "kl_loss", run, others),
        _loss_chart("Cross-entropy with the data (CE)", "nll_loss", run, others),
        charts.line_chart("Alignment across tokenizers", _alignment_shares(run), linear=True),
        charts.line_chart("Learning rate", [Series("learning rate", run.points("train/lr"), 3)], linear=True),
        charts.line_chart(
            "Gradient norm before clipping", [Series("norm", run.points("train/grad_norm"), 4, noisy=True)]
        ),
        charts.line_chart("Tokens per second", [Series("tokens/s", run.points(RATE), 2, noisy=True)], linear=True),
        _time_chart(run),
        charts.line_chart(
            "Faults (cumulative)",
            [Series(label, points, i) for i, (label, points) in enumerate(_faults(run).items())],
            linear=True,
        ),
    ]
    shares = [f"align/{series.label}" for series in _alignment_shares(run)]
    shown = {"step", "time", RATE, SECONDS, "train/skipped", *NAMED, *FAULTS, *_timing_parts(run), *shares}
    metrics = {name for record in run.records for name in record if not _is_score(name)}
    rest = [
        charts.line_chart(name, [Series(name, run.points(name), 5, noisy=True)]) for name in sorted(metrics - shown)
    ]
    return [("", [chart for chart in main if chart]), ("All other metrics", [chart for chart in rest if chart])]


def _score_chart(run: Run, others: Sequence[Run]) -> Chart | None:
    """A chart of this run's scores during training, one curve per suite; None unless a curve has two points or more.

    Scores of the other runs on the same suites are dashed.
    """
    names = sorted({name for record in run.records for name in record if _is_score(name)})
    series = []
    for i, name in enumerate(names):
        suite = name.removeprefix("eval/")
        series.append(Series(suite, run.points(name), i))
        series += [Series(f"{suite}, {other.name}", other.points(name), i, dashed=True) for other in others]
    if all(len(curve.points) < 2 for curve in series):
        return None
    return charts.line_chart("Score during training", [curve for curve in series if curve.points], linear=True)


def _is_score(metric: str) -> bool:
    """Whether a metric is a suite's score, `eval/<suite>`, rather than a part of it."""
    return metric.startswith("eval/") and metric.count("/") == 1


def _loss_chart(title: str, metric: str, run: Run, others: Sequence[Run]) -> Chart | None:
    """A chart of a loss of this run in training and validation, with other runs dashed; None without finite values.

    Of another run it shows the loss in validation, or in training if that was not measured.

    Args:
        metric: without its prefix, such as `kl_loss`.
    """
    series = [
        Series("train", run.points(f"train/{metric}"), 0, noisy=True),
        Series("validation", run.points(f"validation/{metric}"), 1),
    ]
    for i, other in enumerate(others):
        points = other.points(f"validation/{metric}")
        split = "validation" if points else "train"
        points = points or other.points(f"train/{metric}")
        series.append(Series(f"{split}, {other.name}", points, 2 + i, noisy=split == "train", dashed=True))
    return charts.line_chart(title, series)


def _alignment_shares(run: Run) -> list[Series]:
    """The curves of all `align/coverage…` and `align/one_to_one…` metrics, one each; empty without such metrics.

    These are the fractions of the student's tokens that are compared across tokenizers, and of chunks that are one to
    one.
    """
    prefixes = ("align/coverage", "align/one_to_one")
    names = sorted({name for record in run.records for name in record if name.startswith(prefixes)})
    return [Series(name.removeprefix("align/"), run.points(name), i, noisy=True) for i, name in enumerate(names)]


def _timing_parts(run: Run) -> list[str]:
    """The names of the driver's parts (`timing/<part>`), the one with the most time first, `timing/other` last.

    Not among them are the whole step (`timing/step`) and workers' times, which have one more slash.
    """
    names = {name for record in run.records for name in record if name.startswith("timing/") and name.count("/") == 1}
    totals = {name: sum(y for _, y in run.points(name) if math.isfinite(y)) for name in names - {SECONDS}}
    return sorted(totals, key=lambda name: (name == "timing/other", -totals[name], name))


def _time_chart(run: Run) -> Chart | None:
    """A stacked chart of the seconds per step that the driver spent in each part; None without any such time.

    A value that is missing or not finite counts as 0.
    """
    series = []
    for i, name in enumerate(_timing_parts(run)):
        points = [(step, value if math.isfinite(value) else 0.0) for step, value in run.points(name, default=0.0)]
        series.append(Series(name.removeprefix("timing/"), points, i))
    return charts.stacked_chart("Seconds per step, by part", series, "s")
