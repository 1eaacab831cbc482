"""Which metric is drawn where. No list of metrics is complete: a new one gets a chart by its prefix.

`place` is the only function that knows names. It turns a metric's name into section, chart and label; metrics with the
same section and chart share the chart. Metrics that never change are listed in a table instead (`constants`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from distill_rl.observe.metrics import FAULTS, is_sum
from distill_rl.observe.report import charts
from distill_rl.observe.report.charts import Chart, Curve, Point
from distill_rl.observe.report.runs import Run
from distill_rl.observe.sinks.sinks import ALL_RATE, IDEAL, MFU, RATE, SECONDS

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
class Metric:
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


def sections(runs: Sequence[Run]) -> list[Section]:
    """All charts of the runs by section, without those of scores; sections without charts are left out."""
    metrics = [metric for metric in _metrics(runs) if not metric.is_constant]
    by_section: dict[str, dict[str, list[Metric]]] = {}
    parts = set().union(*(timing_parts(run) for run in runs)) if runs else set()
    for metric in metrics:
        section, title, _ = place(metric.name) if metric.name else (DATA, metric.title, metric.label)
        if metric.name not in parts and section != SCORES:
            by_section.setdefault(section, {}).setdefault(title, []).append(metric)
    drawn = {name: _charts(group, runs) for name, group in by_section.items()}
    drawn[SPEED] = [*drawn.get(SPEED, []), *time_charts(runs)]
    names = [*ORDER, *sorted(drawn.keys() - set(ORDER))]
    return [Section(name, drawn[name], name in OPEN) for name in names if drawn.get(name)]


def score_charts(runs: Sequence[Run]) -> list[Chart]:
    """The charts of scores during training, one curve per suite and run; none unless a curve has two points or more."""
    group = [metric for metric in _metrics(runs) if metric.title == SCORE]
    return _charts({SCORE: group}, runs) if group else []


def constants(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(metric, its value in each run as text) of all metrics that have no chart because they never change."""
    rows = []
    for metric in _metrics(runs):
        if metric.is_constant:
            values = [[value for _, value in points if math.isfinite(value)] for points in metric.points]
            rows.append((metric.name or metric.title, [charts.number(value[-1]) if value else "—" for value in values]))
    return rows


def _metrics(runs: Sequence[Run]) -> list[Metric]:
    """All metrics of the runs by name, then the share that is derived from two of them (without a name)."""
    found = []
    for name in sorted(set().union(*(run.metrics for run in runs))):
        _, title, label = place(name)
        points = [
            faults(run, name) if name in FAULTS else run.per_step(name) if is_sum(name) else run.points(name)
            for run in runs
        ]
        found.append(Metric(name, title, label, points))
    cut = [_ratio(run, "align/truncated", "align/documents") for run in runs]
    if any(cut):
        found.append(Metric("", CUT, CUT, cut))
    return found


def _charts(by_title: dict[str, list[Metric]], runs: Sequence[Run]) -> list[Chart]:
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
            chart = charts.line_chart(name, curves, linear=title in LINEAR, caption=caption)
            if chart and any(len(curve.points) > 1 for curve in chart.curves):
                drawn.append(chart)
    return drawn


def _noise(run: Run) -> str:
    """Why CE in training is above CE in validation at the end of a run; empty if it is not."""
    training, validation = run.finite("train/nll_loss"), run.last("validation/nll_loss")
    if not training or validation is None:
        return ""
    end = fmean(training[-max(1, len(training) // 10) :])
    if end <= NOISE_RATIO * validation:
        return ""
    return (
        f"Training ends at {charts.number(end)}, validation at {charts.number(validation)}. That is usual where labels of the "
        "training data are wrong and those of the validation data are not: a student that follows its teacher gives a "
        "wrong label little probability. Compare students by validation."
    )


def _ratio(run: Run, part: str, whole: str) -> list[Point]:
    """(step, part / whole) of the records with both metrics and a whole above 0."""
    points = []
    for record in run.records:
        a, b = record.get(part), record.get(whole)
        if isinstance(a, int | float) and isinstance(b, int | float) and b > 0:
            points.append((float(record["step"]), a / b))
    return points


def faults(run: Run, name: str) -> list[Point]:
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


def timing_parts(run: Run) -> list[str]:
    """The names of the driver's parts (`timing/<part>`), the one with the most time first, `timing/other` last.

    Not among them are the whole step (`timing/step`) and workers' times, which have one more slash.
    """
    names = {name for name in run.metrics if name.startswith("timing/") and name.count("/") == 1}
    totals = {name: run.total(name) for name in names - {SECONDS}}
    return sorted(totals, key=lambda name: (name == "timing/other", -totals[name], name))


def time_charts(runs: Sequence[Run]) -> list[Chart]:
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
        drawn.append(charts.stacked_chart(title, curves, "s"))
    return [chart for chart in drawn if chart and len(chart.curves[0].points) > 1]
