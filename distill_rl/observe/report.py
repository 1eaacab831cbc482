"""One static HTML page about a run: no script, no reference to anything outside the file."""

from __future__ import annotations

import json
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
from distill_rl.files import write_atomic
from distill_rl.observe import charts
from distill_rl.observe.charts import Chart, Series
from distill_rl.observe.sinks import RATE, SECONDS, TOKENS, read_records
from distill_rl.types import RunPaths

SUMMARY_MODELS = ("teacher", "student_before", "student_after", "ce_only")
"""the models of a summary.json, used where a run has no folder of evaluation results"""
NAMED = ("train/kl_loss", "validation/kl_loss", "train/nll_loss", "validation/nll_loss", "train/lr", "train/grad_norm")


@dataclass(frozen=True)
class Run:
    """What a run directory holds, read tolerantly: a file that is absent or cut off is as if empty."""

    name: str
    records: list[dict[str, Any]]
    """by step, ascending; the records of one step joined"""
    config: str
    scores: list[dict[str, Any]]
    """one per model and suite: {model, suite, score, interval, num_items, truncated, tasks}"""

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
) -> Path:
    """Writes `<run_dir>/report.html`.

    Args:
        run_dir: holds metrics.jsonl and, where they exist, config.yaml, evals/<model>/<suite>.json as
            `evaluate` writes them, and summary.json.
        comparisons: other run directories, whose losses and scores are shown beside.
        facts: further lines of the header, such as a fingerprint.

    Raises:
        DataError: a directory holds no metrics.jsonl.
        OSError: the page cannot be written.
    """
    run, others = read_run(run_dir), [read_run(other) for other in comparisons]
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("distill_rl.observe", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.jinja").render(
        run=run,
        facts=_header(run, RunPaths(Path(run_dir)).config) | dict(facts or {}),
        tiles=_tiles(run),
        groups=[(title, drawn) for title, drawn in _chart_groups(run, others) if drawn],
        scores=_score_rows(run, others),
        geometry=charts,
    )
    path = RunPaths(Path(run_dir)).report
    write_atomic(path, page.encode("utf-8", errors="replace"))
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
    return Run(paths.root.resolve().name, [joined[step] for step in sorted(joined)], config, _scores(paths.root))


def _scores(root: Path) -> list[dict[str, Any]]:
    files = sorted((root / "evals").glob("*/*.json"), key=lambda path: (path.stat().st_mtime, path.name))
    rows = [_score_row(path.parent.name, path.stem, _read_json(path)) for path in files]
    summary = _read_json(root / "summary.json")
    if not any(rows):
        rows = [_score_row(model, "exact match", {"score": summary.get(model)}) for model in SUMMARY_MODELS]
    return [row for row in rows if row]


def _score_row(model: str, suite: str, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """One line of the table; None when there is no score. Whatever else is absent or odd is left blank."""
    if not isinstance(result.get("score"), int | float):
        return None
    interval, tasks = result.get("interval"), result.get("per_task")
    known = isinstance(interval, list) and len(interval) == 2 and all(isinstance(end, int | float) for end in interval)
    counts = {key: value if isinstance(value := result.get(key), int) else None for key in ("num_items", "truncated")}
    named = tasks.items() if isinstance(tasks, dict) else ()
    scored = {
        task: value["score"]
        for task, value in named
        if isinstance(value, dict) and isinstance(value.get("score"), int | float)
    }
    row = {"model": model, "suite": str(result.get("suite", suite)), "score": result["score"], "tasks": scored}
    return row | counts | {"interval": interval if known else None}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _score_rows(run: Run, others: Sequence[Run]) -> list[dict[str, Any]]:
    """Every run's scores, suite by suite; the models of a compared run carry its name."""
    rows = list(run.scores)
    for other in others:
        rows += [row | {"model": f"{other.name}: {row['model']}"} for row in other.scores]
    suites = list(dict.fromkeys(row["suite"] for row in rows))
    return sorted(rows, key=lambda row: suites.index(row["suite"]))


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
    return tiles


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
    ]
    timed = _timing_parts(run)
    shares = [f"align/{series.label}" for series in _shares(run)]
    seen = {"step", "time", RATE, SECONDS, *NAMED, *timed, *shares}
    named = {name for record in run.records for name in record if not name.startswith("eval/")}
    rest = sorted(named - seen)
    others_drawn = [charts.line_chart(name, [Series(name, run.points(name), 5, noisy=True)]) for name in rest]
    return [("", [chart for chart in main if chart]), ("All other metrics", [chart for chart in others_drawn if chart])]


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
