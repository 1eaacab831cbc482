"""One static HTML page about a run: no script, no reference to anything outside the file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from distill_rl import __version__
from distill_rl.config.load import fingerprint, load_config
from distill_rl.errors import DataError, DistillError
from distill_rl.observe.metrics import FAULTS
from distill_rl.observe.report import charts
from distill_rl.observe.report.charts import Chart, Series
from distill_rl.observe.report.page import write_page
from distill_rl.observe.report.scores import Evaluation, read_runs
from distill_rl.observe.sinks.sinks import RATE, SECONDS, TOKENS, read_records
from distill_rl.types import RunPaths

INLINE_TASKS = 6
"""more tasks than these get a table of their own"""
NAMED = ("train/kl_loss", "validation/kl_loss", "train/nll_loss", "validation/nll_loss", "train/lr", "train/grad_norm")


@dataclass(frozen=True)
class Run:
    """What a run directory holds, read tolerantly: a file that is absent or cut off is as if empty."""

    name: str
    records: list[dict[str, Any]]
    """by step, ascending; the records of one step joined"""
    config: str

    def points(self, metric: str, default: float | None = None) -> list[charts.Point]:
        """(step, value) of the records that have the metric, or of all with `default` for it."""
        found = []
        for record in self.records:
            value = record.get(metric, default)
            if metric in record or default is not None:
                found.append((float(record["step"]), float(value) if isinstance(value, int | float) else math.nan))
        return found

    def last(self, metric: str) -> float | None:
        finite = [value for _, value in self.points(metric) if math.isfinite(value)]
        return finite[-1] if finite else None


def write_report(
    run_dir: str | os.PathLike[str],
    *,
    comparisons: Sequence[str | os.PathLike[str]] = (),
    facts: Mapping[str, str] | None = None,
    evaluation: Evaluation | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes `<run_dir>/report.html`.

    Args:
        run_dir: holds metrics.jsonl and, where they exist, config.yaml, evals/<model>/<suite>.json as
            `evaluate` writes them, and summary.json.
        comparisons: other run directories, whose losses and scores are shown beside.
        facts: further lines of the header, such as a fingerprint.
        evaluation: the scores of all these, with what was made of them (`evals.compare.of_run` adds the differences
            between models); None: they are read from the run directories.
        out: written instead.

    Raises:
        DataError: a directory holds no metrics.jsonl.
        OSError: the page cannot be written.
    """
    run, others = read_run(run_dir), [read_run(other) for other in comparisons]
    if evaluation is None:
        roots = [Path(folder) for folder in (run_dir, *comparisons)]
        evaluation = read_runs(roots, [each.name for each in (run, *others)])
    final = evaluation.only(lambda score: score.step is None)
    during = evaluation.only(lambda score: score.step is not None)
    path = RunPaths(Path(run_dir)).report if out is None else Path(out)
    write_page(
        path,
        "report.html.jinja",
        title=run.name,
        run=run,
        facts=_header(run, RunPaths(Path(run_dir)).config) | dict(facts or {}),
        tiles=_tiles(run),
        groups=[(title, drawn) for title, drawn in _chart_groups(run, others) if drawn],
        score_chart=_score_chart(run, others),
        evaluation=evaluation,
        final=final if final.scores else during,
        during=during if during.scores and final.scores else None,
        few_tasks=all(len(score.tasks) <= INLINE_TASKS for score in evaluation.scores),
        geometry=charts,
    )
    return path


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Raises: DataError: no metrics.jsonl in it."""
    paths = RunPaths(Path(folder))
    try:
        records = read_records(paths.metrics)
    except OSError as error:
        raise DataError(
            f"report of {folder}", "a run directory holds metrics.jsonl", error.strerror, "give the folder of a run"
        ) from error
    joined: dict[int, dict[str, Any]] = {}
    for record in records:
        joined[record["step"]] = joined.get(record["step"], {}) | record
    config = paths.config.read_text("utf-8", errors="replace") if paths.config.is_file() else ""
    return Run(paths.root.resolve().name, [joined[step] for step in sorted(joined)], config)


def _header(run: Run, config: Path) -> dict[str, str]:
    facts = {}
    times = [record["time"] for record in run.records if isinstance(record.get("time"), int | float)]
    if times:
        facts["first record"], facts["last record"] = _date(min(times)), _date(max(times))
    if run.config:
        try:
            facts["configuration"] = fingerprint(load_config(config))[:16]
        except DistillError:
            facts["configuration"] = "written by another version"
    return facts | {"report by": f"distill_rl {__version__}"}


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _tiles(run: Run) -> list[tuple[str, str]]:
    """(label, figure), the few numbers that a reader looks for first."""
    tiles: list[tuple[str, str]] = []

    def add(label: str, value: float | None, form: Callable[[float], str] = charts.number) -> None:
        if value is not None and math.isfinite(value):
            tiles.append((label, form(value)))

    add("steps", run.records[-1]["step"] if run.records else 0, lambda value: f"{value:,.0f}")
    add("KD, validation", run.last("validation/kl_loss"))
    add("CE, validation", run.last("validation/nll_loss"))
    add("KD, train", run.last("train/kl_loss"))
    add("tokens compared", run.last("align/coverage"), "{:.1%}".format)
    tokens = [value for _, value in run.points(TOKENS) if math.isfinite(value)]
    add("tokens", sum(tokens) if tokens else None, lambda value: f"{value:,.0f}")
    rates = [value for _, value in run.points(RATE) if math.isfinite(value)]
    add("tokens/s, median", median(rates) if rates else None, lambda value: f"{value:,.0f}")
    seconds, before = 0.0, 0.0
    for step, mean in run.points(SECONDS):
        seconds, before = seconds + (mean * (step - before) if math.isfinite(mean) else 0.0), step
    add("time in steps", seconds or None, lambda value: f"{value:,.1f} s" if value < 120 else f"{value / 60:,.1f} min")
    for label, points in _faults(run).items():
        add(label, points[-1][1])
    return tiles


def _faults(run: Run) -> dict[str, list[charts.Point]]:
    """What happened at least once → how often by each step. The counts of a run that is resumed begin anew."""
    counted = {}
    for name, label in FAULTS.items():
        total, before, points = 0.0, 0.0, []
        for step, count in run.points(name, default=0.0):
            total += max(0.0, count - before) if math.isfinite(count) else 0.0
            before = count if math.isfinite(count) else before
            points.append((step, total))
        if total:
            counted[label] = points
    return counted


def _chart_groups(run: Run, others: Sequence[Run]) -> list[tuple[str, list[Chart]]]:
    main = [
        _loss_chart("Distillation loss (KD)", "kl_loss", run, others),
        _loss_chart("Cross-entropy with the data (CE)", "nll_loss", run, others),
        charts.line_chart("Alignment across tokenizers", _shares(run), linear=True),
        charts.line_chart("Learning rate", [Series("learning rate", run.points("train/lr"), 3)], linear=True),
        charts.line_chart(
            "Gradient norm before clipping", [Series("norm", run.points("train/grad_norm"), 4, noisy=True)]
        ),
        charts.line_chart("Tokens per second", [Series("tokens/s", run.points(RATE), 2, noisy=True)], linear=True),
        _time_chart(run),
        charts.line_chart(
            "Faults, counted",
            [Series(label, points, index) for index, (label, points) in enumerate(_faults(run).items())],
            linear=True,
        ),
    ]
    timed = _timing_parts(run)
    shares = [f"align/{series.label}" for series in _shares(run)]
    seen = {"step", "time", RATE, SECONDS, "train/skipped", *NAMED, *FAULTS, *timed, *shares}
    named = {name for record in run.records for name in record if not _is_score(name)}
    rest = sorted(named - seen)
    others_drawn = [charts.line_chart(name, [Series(name, run.points(name), 5, noisy=True)]) for name in rest]
    return [("", [chart for chart in main if chart]), ("All other metrics", [chart for chart in others_drawn if chart])]


def _score_chart(run: Run, others: Sequence[Run]) -> Chart | None:
    """The scores of evaluations during training, where there is more than one."""
    names = sorted({name for record in run.records for name in record if _is_score(name)})
    series = []
    for index, name in enumerate(names):
        suite = name.removeprefix("eval/")
        series.append(Series(suite, run.points(name), index))
        series += [Series(f"{suite}, {other.name}", other.points(name), index, dashed=True) for other in others]
    if all(len(one.points) < 2 for one in series):
        return None
    return charts.line_chart("Score during training", [one for one in series if one.points], linear=True)


def _is_score(metric: str) -> bool:
    return metric.startswith("eval/") and metric.count("/") == 1


def _loss_chart(title: str, metric: str, run: Run, others: Sequence[Run]) -> Chart | None:
    series = [
        Series("train", run.points(f"train/{metric}"), 0, noisy=True),
        Series("validation", run.points(f"validation/{metric}"), 1),
    ]
    for index, other in enumerate(others):
        points = other.points(f"validation/{metric}")
        split = "validation" if points else "train"
        points = points or other.points(f"train/{metric}")
        series.append(Series(f"{split}, {other.name}", points, 2 + index, noisy=split == "train", dashed=True))
    return charts.line_chart(title, series)


def _shares(run: Run) -> list[Series]:
    """How much of the student's tokens is compared with a teacher of another tokenizer, and how much of it one to one."""
    named = {
        name for record in run.records for name in record if name.startswith(("align/coverage", "align/one_to_one"))
    }
    return [
        Series(name.removeprefix("align/"), run.points(name), index, noisy=True)
        for index, name in enumerate(sorted(named))
    ]


def _timing_parts(run: Run) -> list[str]:
    """The parts that add up to the driver's time; a worker's own times have one more slash in their name."""
    names = {name for record in run.records for name in record if name.startswith("timing/") and name.count("/") == 1}
    totals = {name: sum(v for _, v in run.points(name) if math.isfinite(v)) for name in names - {SECONDS}}
    return sorted(totals, key=lambda name: (name == "timing/other", -totals[name], name))


def _time_chart(run: Run) -> Chart | None:
    series = []
    for index, name in enumerate(_timing_parts(run)):
        points = [(step, value if math.isfinite(value) else 0.0) for step, value in run.points(name, default=0.0)]
        series.append(Series(name.removeprefix("timing/"), points, index))
    return charts.stacked_chart("Seconds per step, by part", series, "s")
