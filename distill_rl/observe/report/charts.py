"""The charts of the report as data: curves, thinned, which the page's script draws.

A line chart keeps the lowest and the highest value of every stretch of steps, so that no peak disappears; a stack keeps
means, so that its parts still add up.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from distill_rl.errors import DataError
from distill_rl.observe.metrics import FAULTS, is_sum
from distill_rl.observe.sinks import ALL_RATE, IDEAL, MFU, RATE, SECONDS, STEPS, broken_lines, read_records
from distill_rl.types import RunPaths

MAX_POINTS, MIN_POINTS, MAX_AREA_POINTS = 2000, 500, 120
"""Points of a curve that all runs of a page share; those that a run has at least; points of a stacked curve."""
LOG_RATIO = 20.0
"""Positive values that span more than this factor get a logarithmic axis."""
CLIP_RATIO = 4.0
"""A stack whose highest step exceeds this many medians is cut off at CLIP_RATIO / 2 medians."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A metric of a run in a chart."""

    label: str
    """What distinguishes the metric from the others of the chart."""
    points: Sequence[Point]
    """(step, value) by ascending step; a value that is not finite makes a gap."""
    run: int = 0
    """Index of the run."""
    exact: bool = False
    """Never smoothed."""

    @property
    def values(self) -> list[float]:
        """The finite values."""
        return [value for _, value in self.points if math.isfinite(value)]


@dataclass(frozen=True)
class Chart:
    """A figure of the page."""

    title: str
    curves: Sequence[Curve]
    notes: Sequence[str] = ()
    """Shown beside the title."""
    caption: str = ""
    """A sentence below the title."""
    logarithmic: bool = False
    """Whether its axis is logarithmic unless the reader chooses."""
    stacked: bool = False
    ceiling: float | None = None
    """Upper end of the axis; None: the highest value."""

    def data(self, steps: Steps, limit: int) -> dict[str, Any]:
        """The chart as JSON types for the page's script; a value that is not finite is null.

        Args:
            steps: gets the steps of the curves.
            limit: most points of a curve.
        """
        curves = []
        for curve in self.curves:
            points = curve.points if self.stacked else decimate(curve.points, limit)
            entry: dict[str, Any] = {"label": curve.label, "run": curve.run, "exact": curve.exact}
            entry["steps"] = steps.index([step for step, _ in points])
            entry["values"] = [_rounded(value) for _, value in points]
            curves.append(entry)
        return {
            "title": self.title,
            "curves": curves,
            "log": self.logarithmic,
            "stacked": self.stacked,
            "ceiling": self.ceiling,
        }


@dataclass
class Steps:
    """The lists of steps that curves refer to: most curves of a run have the same."""

    indices: dict[tuple[float, ...], int] = field(default_factory=dict)

    def index(self, steps: Sequence[float]) -> int:
        """The index of a list of steps, which is added if it is new."""
        key = tuple(int(step) if step == int(step) else round(step, 1) for step in steps)
        return self.indices.setdefault(key, len(self.indices))


def line_chart(title: str, curves: Iterable[Curve], *, linear: bool = False, caption: str = "") -> Chart | None:
    """A chart with one curve per series that has finite values; None if there is none.

    Positive values that span more than LOG_RATIO get a logarithmic axis, unless `linear`. Values that are not finite
    are counted in a note.
    """
    curves = [curve for curve in curves if curve.values]
    if not curves:
        return None
    finite = [value for curve in curves for value in curve.values]
    gaps = sum(len(curve.points) for curve in curves) - len(finite)
    logarithmic = not linear and min(finite) > 0 and max(finite) / min(finite) > LOG_RATIO
    return Chart(title, curves, [f"{gaps} not finite"] if gaps else [], caption, logarithmic)


def stacked_chart(title: str, curves: Sequence[Curve], unit: str) -> Chart | None:
    """A chart of areas stacked in the given order; None without curves or if their sum is not above 0.

    Each one's label gets its share of the total. A peak far above the median is cut off, which a note says.

    Args:
        curves: all with the same steps and with finite values.
        unit: of the values, for the note.
    """
    steps = [step for step, _ in curves[0].points] if curves else []
    totals = [sum(curve.points[i][1] for curve in curves) for i in range(len(steps))]
    if not totals or not sum(totals) > 0:
        return None
    notes, ceiling = [], None
    peak, usual = max(totals), median(totals)
    if usual > 0 and peak > CLIP_RATIO * usual:
        ceiling = CLIP_RATIO / 2 * usual
        notes = [f"step {steps[totals.index(peak)]:,.0f}: {number(peak)} {unit}, cut off"]
    shown = []
    for curve in curves:
        share = sum(curve.values) / sum(totals)
        label = f"{curve.label} {share:.0%}"
        shown.append(Curve(label, thin(curve.points, MAX_AREA_POINTS), curve.run, exact=True))
    return Chart(title, shown, notes, stacked=True, ceiling=ceiling)


def decimate(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` of the points (4 or more), with the first and last one and, of every stretch between, the lowest
    and the highest.

    A value that is not finite stays if its stretch has no other.
    """
    if len(points) <= limit:
        return list(points)
    first, *inner, last = points
    size = math.ceil(len(inner) / ((limit - 2) // 2))
    kept = [first]
    for start in range(0, len(inner), size):
        stretch = inner[start : start + size]
        finite = [point for point in stretch if math.isfinite(point[1])]
        if finite:
            ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
            kept += sorted(ends)
        else:
            kept.append(stretch[0])
    return [*kept, last]


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: means of runs of neighbours, in step and value.

    The mean of a run's finite values is taken; the value of a run without any is NaN, a gap.
    """
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / limit)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [(_mean(step for step, _ in run), _mean(value for _, value in run)) for run in runs]


def points_per_curve(num_runs: int) -> int:
    """Most points of a curve on a page about so many runs, so that the page does not grow with their number at once."""
    return max(MIN_POINTS, MAX_POINTS // num_runs)


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


def _rounded(value: float) -> float | None:
    """The value with six significant digits, as an integer where it is one; None if it is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) and abs(short) < 2**53 else short


@dataclass(frozen=True)
class ReportRun:
    """A run directory. Missing files are skipped, and damaged lines counted."""

    name: str
    records: list[dict[str, Any]]
    """By ascending step; records of the same step are merged."""
    config: str = ""
    """The text of config.yaml."""
    paths: RunPaths = field(default_factory=lambda: RunPaths(Path()))
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Commit, packages and machines of the newest attempt (`system.environment`); empty for runs that did not record it."""
    num_bad_rows: int = 0
    num_broken: int = 0
    """Lines of metrics.jsonl that are no records."""

    @property
    def metrics(self) -> set[str]:
        """The names of all metrics."""
        return {name for record in self.records for name in record} - {"step", "time", STEPS}

    def points(self, metric: str, default: float | None = None) -> list[Point]:
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

    def finite(self, metric: str) -> list[float]:
        """The metric's finite values by ascending step."""
        return [value for _, value in self.points(metric) if math.isfinite(value)]

    def per_step(self, metric: str) -> list[Point]:
        """(step, value / number of the record's steps) of a metric that is a sum."""
        steps = [record.get(STEPS, 1) for record in self.records if metric in record]
        return [(step, value / count) for (step, value), count in zip(self.points(metric), steps)]

    def total(self, metric: str) -> float:
        """What a metric per step adds up to over all steps, without values that are not finite."""
        steps = [record.get(STEPS, 1) for record in self.records if metric in record]
        return sum(value * count for (_, value), count in zip(self.points(metric), steps) if math.isfinite(value))

    def last(self, metric: str) -> float | None:
        """The metric's last finite value; None if it has none."""
        finite = self.finite(metric)
        return finite[-1] if finite else None


# What the report reads from a run directory: records, configuration, environment, rows left out.


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[ReportRun]:
    """Reads run directories (`read_run`). Runs whose folders have the same name are told apart by the folder above, or
    by a number.

    Raises:
        DataError: a metrics.jsonl is missing or unreadable.
    """
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [
            "/".join(run.paths.root.resolve().parts[-2:]) if names.count(run.name) > 1 else run.name for run in runs
        ]
    if len(set(names)) < len(names):
        names = [
            f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)
        ]
    return [replace(run, name=name) for run, name in zip(runs, names)]


def read_run(folder: str | os.PathLike[str]) -> ReportRun:
    """Reads a run directory, which is named after the folder.

    Of two records of a step, the later one's values replace those of the same name.

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
    timed = 0
    for record in records:
        step = record["step"]
        if SECONDS in record:
            record.setdefault(STEPS, max(step - timed, 1))  # files of before have no number of steps
            timed = step
        by_step[step] = _joined(by_step[step], record) if step in by_step else record
    config = paths.config.read_text("utf-8", errors="replace") if paths.config.is_file() else ""
    return ReportRun(
        paths.root.resolve().name,
        [by_step[step] for step in sorted(by_step)],
        config,
        paths,
        _environment(paths),
        len(paths.bad_rows.read_bytes().splitlines()) if paths.bad_rows.is_file() else 0,
        broken_lines(paths.metrics.read_bytes()),
    )


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two records of a step as one; seconds outside steps, in the second, are spread over the steps of the first."""
    joined = first | second
    if STEPS in first and STEPS not in second:
        for name in second:
            if name.startswith("timing/") and second[name] is not None:
                joined[name] = (first.get(name) or 0.0) + second[name] / first[STEPS]
    return joined


def _environment(paths: RunPaths) -> dict[str, Any]:
    """The environment that the newest attempt has recorded; empty if there is none or the file is damaged."""
    try:
        environment = json.loads((paths.root / "logs" / "latest" / paths.environment.name).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return environment if isinstance(environment, dict) else {}


# Which metric is drawn where. No list of metrics is complete: a new one gets a chart by its prefix.
#
# `place` is the only function that knows names. It turns a metric's name into section, chart and label; metrics with the
# same section and chart share the chart. Metrics that never change are listed in a table instead (`constants`).

LOSSES, OPTIMISATION, DATA, SPEED = "Losses", "Optimisation", "Coverage and data", "Speed"
USE, TRANSPORT, FAULT_SECTION, SCORES = "Memory and utilisation", "Transport", "Faults", "Scores"
ORDER = (LOSSES, OPTIMISATION, DATA, SPEED, USE, TRANSPORT, FAULT_SECTION)
OPEN = (LOSSES, OPTIMISATION, DATA, USE, FAULT_SECTION)

ACCEPTANCE = "Acceptance, Σ min(p, q)"
ENTROPY = "Entropy at labelled positions, nats"
BOUNDS = {
    "acceptance_low": "at least", "acceptance_high": "at most", "teacher_entropy_low": "teacher, at least",
    "teacher_entropy_high": "teacher, at most", "teacher_entropy": "teacher", "student_entropy": "student",
}  # fmt: skip
SPLITS = {
    "kl_loss": "Distillation loss (KD)",
    "taught": "Share of the labelled tokens that a teacher is asked for",
    "nll_loss": "Cross-entropy with the data (CE)",
    "loss": "Loss: KD and CE with their weights",
    "top1_agreement": "Top-1 agreement with the teacher",
    "acceptance": ACCEPTANCE,
    "acceptance_low": ACCEPTANCE,
    "acceptance_high": ACCEPTANCE,
    **dict.fromkeys(("student_entropy", "teacher_entropy", "teacher_entropy_low", "teacher_entropy_high"), ENTROPY),
    "tokens": "Labelled tokens",
}
"""Metrics of training and validation, without the prefix → title of their chart."""
TITLES = {
    "train/lr": "Learning rate",
    "train/grad_norm": "Gradient norm before clipping",
    "train/teacher_mass": "Teacher's probability within its top k",
    "train/router_balance": "Balance of the experts (1: even)",
    RATE: "Trained tokens per second",
    ALL_RATE: "All tokens per second",
    MFU: "Model FLOPs utilisation (MFU)",
    SECONDS: "Seconds per step",
    "transport/teacher_wait": "Share of the step spent waiting for teachers",
    "transport/slot_occupancy": "Share of the teachers' slots in use",
    "align/labelled": "Share of tokens with a label",
    "align/efficiency": "Share of positions that hold a token",
    "align/tokens": "All tokens",
    "align/queue": "Batches waiting for an aligner",
}
WORKERS = {"busy": "Share of the step in which workers were busy", "memory": "Peak memory of workers, GiB"}
"""Prefix of the metrics of single workers → title of the chart that has one curve for each of them."""
ALIGNMENT, STACK, SCORE = "Alignment across tokenizers", "Seconds per step, by part", "Score during training"
CUT = "Share of documents cut at the length limit"
CAPTIONS = {
    ACCEPTANCE: "The share of drafted tokens that speculative decoding with this student as draft model would keep; of targets "
    "with a top k, bounds of it.",
}
LINEAR = {
    *("Learning rate", TITLES[RATE], TITLES[ALL_RATE], TITLES[MFU], ALIGNMENT, SCORE, CUT, "Faults (cumulative)"),
    *(SPLITS["top1_agreement"], ACCEPTANCE, TITLES["transport/teacher_wait"]),
    *(TITLES["transport/slot_occupancy"], TITLES["align/labelled"], TITLES["align/efficiency"]),
    *WORKERS.values(),
}
EXACT = (
    "validation/",
    "eval/",
    "faults/",
    "memory/",
    "train/lr",
    "train/kd_scale",
    "train/skipped",
    "train/unlabelled",
)
"""Beginnings of the names of metrics that are never smoothed."""
MAX_METRICS = 3
"""With several runs, a chart with more metrics than this becomes one chart per metric."""
NOISE_RATIO = 1.1
"""CE in training above so many times CE in validation is explained."""


@dataclass(frozen=True)
class Section:
    title: str
    charts: list[Chart]
    is_open: bool = True


@dataclass(frozen=True)
class ChartMetric:
    """A metric of one or more runs, drawn as one curve per run."""

    name: str
    title: str
    label: str
    points: Sequence[Sequence[Point]]
    """By run; empty for a run without the metric."""

    @property
    def is_constant(self) -> bool:
        """Whether it was recorded more than once and never changed, in any of the runs."""
        finite = [{value for _, value in points if math.isfinite(value)} for points in self.points]
        return all(len(values) <= 1 for values in finite) and any(len(points) > 1 for points in self.points)


def place(name: str) -> tuple[str, str, str]:
    """(section, title of the chart, label of the curve) of a metric."""
    prefix, _, rest = name.partition("/")
    base, _, detail = rest.partition("/")
    group = f"{prefix}/{base}"
    if prefix == "eval" and not detail:
        return SCORES, SCORE, rest
    if name in FAULTS:
        return FAULT_SECTION, "Faults (cumulative)", FAULTS[name]
    if prefix in WORKERS:
        return USE, WORKERS[prefix], rest
    if any(word in name for word in ("memory", "utili", "occupancy", "gpu/", "teacher_wait")):
        return USE, TITLES.get(group, group), detail or base
    if prefix == "validation" or (prefix == "train" and base in SPLITS):
        title = SPLITS.get(base, base) + (" by teacher" if detail else "")
        label = ", ".join(part for part in (detail, prefix, BOUNDS.get(base, "")) if part)
        return (DATA, f"{title} per step", label) if base == "tokens" else (LOSSES, title, label)
    if group.startswith(("align/coverage", "align/one_to_one", "align/exact")):
        return DATA, ALIGNMENT, rest
    section = {"align": DATA, "data": DATA, "timing": SPEED, "transport": TRANSPORT, "train": OPTIMISATION}.get(
        prefix, ""
    )
    if name in (RATE, ALL_RATE, MFU, IDEAL):
        section = SPEED
    title = TITLES.get(group, group if rest else name) + (" per step" if is_sum(name) else "")
    return section or (prefix if rest else "Other"), title, detail or base or name


def sections(runs: Sequence[ReportRun]) -> list[Section]:
    """All charts of the runs by section, without those of scores; sections without charts are left out."""
    metrics = [metric for metric in _metrics(runs) if not metric.is_constant]
    by_section: dict[str, dict[str, list[ChartMetric]]] = {}
    parts = set().union(*(timing_parts(run) for run in runs)) if runs else set()
    for metric in metrics:
        section, title, _ = place(metric.name) if metric.name else (DATA, metric.title, metric.label)
        if metric.name not in parts and section != SCORES:
            by_section.setdefault(section, {}).setdefault(title, []).append(metric)
    drawn = {name: _charts(group, runs) for name, group in by_section.items()}
    drawn[SPEED] = [*drawn.get(SPEED, []), *time_charts(runs)]
    names = [*ORDER, *sorted(drawn.keys() - set(ORDER))]
    return [Section(name, drawn[name], name in OPEN) for name in names if drawn.get(name)]


def score_charts(runs: Sequence[ReportRun]) -> list[Chart]:
    """The charts of scores during training, one curve per suite and run; none unless a curve has two points or more."""
    group = [metric for metric in _metrics(runs) if metric.title == SCORE]
    return _charts({SCORE: group}, runs) if group else []


def constants(runs: Sequence[ReportRun]) -> list[tuple[str, list[str]]]:
    """(metric, its value in each run as text) of all metrics that have no chart because they never change."""
    rows = []
    for metric in _metrics(runs):
        if metric.is_constant:
            values = [[value for _, value in points if math.isfinite(value)] for points in metric.points]
            rows.append((metric.name or metric.title, [number(value[-1]) if value else "—" for value in values]))
    return rows


def _metrics(runs: Sequence[ReportRun]) -> list[ChartMetric]:
    """All metrics of the runs by name, then the share that is derived from two of them (without a name)."""
    found = []
    for name in sorted(set().union(*(run.metrics for run in runs))):
        _, title, label = place(name)
        points = [
            faults(run, name) if name in FAULTS else run.per_step(name) if is_sum(name) else run.points(name)
            for run in runs
        ]
        found.append(ChartMetric(name, title, label, points))
    cut = [_ratio(run, "align/truncated", "align/documents") for run in runs]
    if any(cut):
        found.append(ChartMetric("", CUT, CUT, cut))
    return found


def _charts(by_title: dict[str, list[ChartMetric]], runs: Sequence[ReportRun]) -> list[Chart]:
    """Line charts by title; a chart in which no curve has two points is left out."""
    known = [*SPLITS.values(), *TITLES.values(), ALIGNMENT]

    def order(title: str) -> tuple[int, str]:
        base = title.removesuffix(" by teacher")
        return known.index(base) if base in known else len(known), title

    drawn = []
    for title in sorted(by_title, key=order):
        metrics = sorted(by_title[title], key=lambda metric: (metric.name.startswith("validation"), metric.name))
        groups = {title: metrics}
        if len(runs) > 1 and len(metrics) > MAX_METRICS:
            groups = {f"{title}: {metric.label}": [metric] for metric in metrics}
        for name, group in groups.items():
            curves = [
                Curve(metric.label, points, run, metric.name.startswith(EXACT))
                for metric in group
                for run, points in enumerate(metric.points)
            ]
            caption = CAPTIONS.get(title, "") or (_noise(runs[0]) if title == SPLITS["nll_loss"] else "")
            chart = line_chart(name, curves, linear=title in LINEAR, caption=caption)
            if chart and any(len(curve.points) > 1 for curve in chart.curves):
                drawn.append(chart)
    return drawn


def _noise(run: ReportRun) -> str:
    """Why CE in training is above CE in validation at the end of a run; empty if it is not."""
    training, validation = run.finite("train/nll_loss"), run.last("validation/nll_loss")
    if not training or validation is None:
        return ""
    end = fmean(training[-max(1, len(training) // 10) :])
    if end <= NOISE_RATIO * validation:
        return ""
    return (
        f"Training ends at {number(end)}, validation at {number(validation)}. That is usual where labels of the "
        "training data are wrong and those of the validation data are not: a student that follows its teacher gives a "
        "wrong label little probability. Compare students by validation."
    )


def _ratio(run: ReportRun, part: str, whole: str) -> list[Point]:
    """(step, part / whole) of the records with both metrics and a whole above 0."""
    points = []
    for record in run.records:
        a, b = record.get(part), record.get(whole)
        if isinstance(a, int | float) and isinstance(b, int | float) and b > 0:
            points.append((float(record["step"]), a / b))
    return points


def faults(run: ReportRun, name: str) -> list[Point]:
    """Cumulative counts, (step, count) for every record, of a kind of fault; empty if it did not occur.

    The counts in the records restart at 0 when a run is resumed; these go on.
    """
    total, previous_count, points = 0.0, 0.0, []
    for step, count in run.points(name, default=0.0):
        if math.isfinite(count):
            total += max(0.0, count - previous_count)
            previous_count = count
        points.append((step, total))
    return points if total else []


def timing_parts(run: ReportRun) -> list[str]:
    """The names of the driver's parts (`timing/<part>`), the one with the most time first, `timing/other` last.

    Not among them are the whole step (`timing/step`) and workers' times, which have one more slash.
    """
    names = {name for name in run.metrics if name.startswith("timing/") and name.count("/") == 1}
    totals = {name: run.total(name) for name in names - {SECONDS}}
    return sorted(totals, key=lambda name: (name == "timing/other", -totals[name], name))


def time_charts(runs: Sequence[ReportRun]) -> list[Chart]:
    """For every run with such times a stacked chart of the seconds per step that the driver spent in each part.

    A value that is missing or not finite counts as 0.
    """
    drawn = []
    for index, run in enumerate(runs):
        curves = []
        for name in timing_parts(run):
            points = [(step, value if math.isfinite(value) else 0.0) for step, value in run.points(name, default=0.0)]
            curves.append(Curve(name.removeprefix("timing/"), points, index))
        title = STACK if len(runs) == 1 else f"{STACK}: {run.name}"
        drawn.append(stacked_chart(title, curves, "s"))
    return [chart for chart in drawn if chart and len(chart.curves[0].points) > 1]
