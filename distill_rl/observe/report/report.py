"""The HTML page about a run, or several runs: one file, which opens offline."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib import resources
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from distill_rl import __version__
from distill_rl.config.load import load_config
from distill_rl.config.save import fingerprint, flat
from distill_rl.errors import DataError, DistillError
from distill_rl.observe.metrics import ALL_RATE, ALL_TOKENS, FAULTS, IDEAL, MFU, RATE, SECONDS, STEPS, TOKENS, is_sum
from distill_rl.observe.report.scores import FACTS, OUTCOMES, Evaluation
from distill_rl.observe.sinks import broken_lines, read_records
from distill_rl.system.files import read_json_object, write_atomic
from distill_rl.types import RunPaths

if TYPE_CHECKING:
    from jinja2 import Environment

# Tables of what a run is: its settings, its software and machines, and in what several runs differ.

MISSING = "—"
FAULT_LABELS = {*FAULTS.values(), "rows left out", "broken records"}
"""Figures that say that something went wrong."""


def header(run: ReportRun) -> dict[str, str]:
    """The facts under the report's title, by name: times, fingerprint of the configuration, commit, machines, version.

    With adapters also how much is trained. The times are those of the first and last record, in UTC. What is not known is left out.
    """
    facts = {}
    times = [record["time"] for record in run.records if isinstance(record.get("time"), int | float)]
    if times:
        facts["first record"], facts["last record"] = _date(min(times)), _date(max(times))
    if run.config:
        try:
            facts["configuration"] = fingerprint(load_config(run.paths.config))[:16]
        except DistillError:
            facts["configuration"] = "written by another version"
    known = environment(run)
    facts |= {name: known[name] for name in ("trained", "commit", "machine") if name in known}
    return facts | {"created by": f"distill_rl {__version__}"}


def environment(run: ReportRun) -> dict[str, str]:
    """Name → text of what the newest attempt recorded about its software and machines; unknown facts are left out.

    With adapters also how much is trained.
    """
    recorded = run.environment
    facts = {"trained": f"{recorded.get('trained') or ''}".removeprefix("student: ")}
    if recorded.get("commit"):
        facts["commit"] = f"{recorded['commit']}"[:12] + (" with changes" if recorded.get("dirty") else "")
    facts["machine"] = _machine(recorded)
    nodes = recorded.get("nodes")
    if isinstance(nodes, list) and (len(nodes) > 1 or not recorded.get("gpus")):
        facts["cluster"] = ", ".join(f"{node}" for node in nodes)
    for name in ("host", "driver", "version", "python"):
        facts[{"version": "distill_rl", "driver": "GPU driver"}.get(name, name)] = f"{recorded.get(name) or ''}"
    packages = recorded.get("packages")
    if isinstance(packages, Mapping):
        facts |= {f"{name}": f"{version}" for name, version in packages.items()}
    return {name: text for name, text in facts.items() if text}


def _machine(recorded: Mapping[str, Any]) -> str:
    """GPUs, processor, cores and memory of the driver's machine as one text; empty if nothing is known."""
    gpus = recorded.get("gpus")
    gpus = gpus if isinstance(gpus, list) else []
    parts = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(map(str, gpus))]
    units = {"cpu": "", "cores": " cores", "memory_gib": " GiB"}
    return ", ".join(parts + [f"{recorded[name]}{unit}" for name, unit in units.items() if recorded.get(name)])


def differences(runs: Sequence[ReportRun]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each run as text) of all settings in which the runs differ, then of their environments.

    The run's name is not among them. A run without a readable configuration has a dash everywhere.
    """
    rows = [*_by_run([_settings(run) for run in runs]), *_by_run([environment(run) for run in runs])]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _by_run(columns: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """(name, its value in each run) of all names in the columns, which are one per run."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, MISSING) for column in columns]) for name in names]


def _settings(run: ReportRun) -> dict[str, str]:
    """Dotted key → value as text of the run's configuration; empty if it has none or it cannot be read."""
    from omegaconf import OmegaConf

    try:
        tree = OmegaConf.to_container(OmegaConf.create(run.config), resolve=True)
    except Exception:  # YAML or interpolation of any other version
        return {}
    return {key: "null" if value is None else f"{value}" for key, value in flat(tree) if key != "run.name"}


def figures(run: ReportRun) -> dict[str, str]:
    """Label → text of a run's most important numbers, such as steps, last losses, tokens and faults.

    Those without a finite value are left out.
    """
    whole, share = "{:,.0f}".format, "{:.1%}".format
    rates, all_rates, used = run.finite(RATE), run.finite(ALL_RATE), run.finite(MFU)
    low, high = (run.last(f"validation/acceptance_{bound}") for bound in ("low", "high"))
    entries: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("steps", run.records[-1]["step"] if run.records else 0, whole),
        ("KD, validation", run.last("validation/kl_loss"), number),
        ("CE, validation", run.last("validation/nll_loss"), number),
        ("top-1 agreement, validation", run.last("validation/top1_agreement"), share),
        ("acceptance, validation", run.last("validation/acceptance"), share),
        ("KD, train", run.last("train/kl_loss"), number),
        ("tokens compared", run.last("align/coverage"), share),
        ("acceptance, validation", None if low is None else high, lambda most: f"{low:.1%} to {most:.1%}"),
        ("tokens, trained", sum(run.finite(TOKENS)) or None, whole),
        ("tokens, all", sum(run.finite(ALL_TOKENS)) or None, whole),
        ("trained tokens/s, median", median(rates) if rates else None, whole),
        ("all tokens/s, median", median(all_rates) if all_rates else None, whole),
        ("model FLOPs utilisation (MFU), median", median(used) if used else None, share),
        ("time spent in steps", run.total(SECONDS) or None, _duration),
        ("rows left out", run.num_bad_rows or None, whole),
        ("broken records", run.num_broken or None, whole),
    ]
    for name, label in FAULTS.items():
        points = faults(run, name)
        entries.append((label, points[-1][1] if points else None, whole))
    return {label: form(value) for label, value, form in entries if value is not None and math.isfinite(value)}


def _duration(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 120 else f"{seconds / 60:,.1f} min"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# The sample completions of runs (`samples.jsonl`, docs/evaluation.md) as data for the page's script.

MAX_STEPS = 20
"""Steps of a run whose completions the page holds; the first and the last are among them."""
MAX_CHARACTERS = 4000
"""A longer text is cut."""


def samples(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    """One entry per item in the order of the files, as JSON types, with every run's completions of it; empty without any.

    An entry has `suite`, `id`, `prompt` (a list of messages with `role`, which is empty for a plain text, and `content`),
    `reference`, and `answers`: for each `run` (index), `who` (`student`, or a teacher's name after `teacher `), `step`,
    `text`, `verdict`, and `right`.
    """
    items: dict[tuple[str, str], dict[str, Any]] = {}
    for index, run in enumerate(runs):
        rows = _rows(run)
        steps = _spread(sorted({row["step"] for row in rows if row.get("who") != "teacher"}))
        for row in rows:
            is_teacher = row.get("who") == "teacher"
            if not is_teacher and row["step"] not in steps:
                continue
            entry: dict[str, Any] = {name: _text(row.get(name, "")) for name in ("suite", "id", "reference")}
            entry |= {"prompt": _messages(row.get("prompt")), "answers": []}
            who = f"teacher {_text(row.get('teacher', ''))}".strip() if is_teacher else "student"
            answer = {"run": index, "who": who, "step": row["step"], "text": _text(row["completion"])}
            answer |= {"verdict": _verdict(row), "right": row.get("correct") is True}
            items.setdefault((entry["suite"], entry["id"]), entry)["answers"].append(answer)
    return list(items.values())


def _rows(run: ReportRun) -> list[dict[str, Any]]:
    """The valid lines of a run's file; none without a file."""
    try:
        rows = read_records(run.paths.samples)
    except OSError:
        return []
    return [row for row in rows if isinstance(row.get("completion"), str)]


def _spread(steps: list[int]) -> set[int]:
    """At most MAX_STEPS of the steps, evenly spread, with the first and the last."""
    if len(steps) <= MAX_STEPS:
        return set(steps)
    return {steps[round(i * (len(steps) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)}


def _messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt as a list of messages; a plain text is one without a role."""
    if not (isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)):
        prompt = [{"content": prompt}]
    return [{name: _text(each.get(name, "")) for name in ("role", "content")} for each in prompt]


def _verdict(row: dict[str, Any]) -> str:
    """In a few words, how the completion was judged."""
    outcome = _text(row.get("outcome", ""))
    words = [OUTCOMES.get(outcome, outcome), OUTCOMES["truncated"] if row.get("truncated") is True else ""]
    return ", ".join(dict.fromkeys(filter(None, words)))


def _text(value: Any) -> str:
    """A value as text, cut to MAX_CHARACTERS."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} …"


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
            (`evals.compare.of_run`).
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
        results=_by_run([figures(run) for run in runs]),
        fault_labels=FAULT_LABELS,
        differences=differences(runs) if len(runs) > 1 else [],
        environments=[environment(run) for run in runs],
        sections=drawn,
        score_charts=scored,
        constants=constants(runs),
        last_values=sorted(_by_run([{name: number(run.last(name)) for name in run.metrics} for run in runs])),
        evaluation=evaluation,
        final=final if final.scores else during,
        during=during if during.scores and final.scores else None,
        few_tasks=all(len(score.tasks) <= INLINE_TASKS for score in evaluation.scores),
    )
    return path


def page_data(runs: Sequence[ReportRun], drawn: Sequence[Section], scored: Sequence[Chart]) -> dict[str, Any]:
    """What the page's script draws, as JSON types: the runs' names, lists of steps, all charts in the page's order,
    and sample completions."""
    steps: StepLists = {}
    # Most points of a curve, so that the page does not grow with the number of runs at once.
    limit = max(MIN_POINTS, MAX_POINTS // len(runs))
    in_order = [*scored, *(chart for section in drawn for chart in section.charts)]
    curves = [chart.data(steps, limit) for chart in in_order]
    return {"runs": [run.name for run in runs], "steps": list(steps), "charts": curves, "samples": samples(runs)}


# The charts of the report as data: curves, thinned, which the page's script draws.
#
# A line chart keeps the lowest and the highest value of every stretch of steps, so that no peak disappears; a stack keeps
# means, so that its parts still add up.

MAX_POINTS, MIN_POINTS, MAX_AREA_POINTS = 2000, 500, 120
"""Points of a curve that all runs of a page share; those that a run has at least; points of a stacked curve."""
LOG_RATIO = 20.0
"""Positive values that span more than this factor get a logarithmic axis."""
CLIP_RATIO = 4.0
"""A stack whose highest step exceeds this many medians is cut off at CLIP_RATIO / 2 medians."""

Point = tuple[float, float]
StepLists = dict[tuple[float, ...], int]
"""The lists of steps that curves refer to, by their index: most curves of a run have the same."""


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

    def data(self, steps: StepLists, limit: int) -> dict[str, Any]:
        """The chart as JSON types for the page's script; a value that is not finite is null.

        Args:
            steps: gets the steps of the curves.
            limit: most points of a curve.
        """
        chart = {"title": self.title, "log": self.logarithmic, "stacked": self.stacked, "ceiling": self.ceiling}
        curves = []
        for curve in self.curves:
            points = curve.points if self.stacked else decimate(curve.points, limit)
            entry: dict[str, Any] = {"label": curve.label, "run": curve.run, "exact": curve.exact}
            key = tuple(int(step) if step == int(step) else round(step, 1) for step, _ in points)
            entry["steps"] = steps.setdefault(key, len(steps))
            entry["values"] = [_rounded(value) for _, value in points]
            curves.append(entry)
        return chart | {"curves": curves}


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
        label = f"{curve.label} {sum(curve.values) / sum(totals):.0%}"
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
        finite = [point for point in stretch if math.isfinite(point[1])] or stretch[:1]
        kept += sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})
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


def number(value: float | None) -> str:
    """A value as short text, such as `0.1235`, `12,346` or `1.2e-5`; a dash if there is none, or it is not finite.

    Four significant digits; a whole number with thousands separators if its size is 1000 or more; up to three digits
    and an exponent if it is below 0.001, or 10 million or more.
    """
    if value is None or not math.isfinite(value):
        return MISSING
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
        found = [record for record in self.records if metric in record or default is not None]
        values = [(record["step"], record.get(metric, default)) for record in found]
        return [(float(step), float(value) if isinstance(value, int | float) else math.nan) for step, value in values]

    def finite(self, metric: str) -> list[float]:
        """The metric's finite values by ascending step."""
        return [value for _, value in self.points(metric) if math.isfinite(value)]

    def per_step(self, metric: str) -> list[Point]:
        """(step, value / number of the record's steps) of a metric that is a sum."""
        counts = dict(self.points(STEPS, default=1.0))
        return [(step, value / counts[step]) for step, value in self.points(metric)]

    def total(self, metric: str) -> float:
        """What a metric per step adds up to over all steps, without values that are not finite."""
        counts = dict(self.points(STEPS, default=1.0))
        return sum(value * counts[step] for step, value in self.points(metric) if math.isfinite(value))

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
    names = ["/".join(run.paths.root.resolve().parts[-2:]) if names.count(run.name) > 1 else run.name for run in runs]
    numbers = [f" ({names[:i].count(name) + 1})" if names.count(name) > 1 else "" for i, name in enumerate(names)]
    return [replace(run, name=name + number) for run, name, number in zip(runs, names, numbers)]


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
        rule, remedy = "a run directory holds metrics.jsonl", "give the folder of a run"
        raise DataError(f"report of {folder}", rule, error.strerror, remedy) from error
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
        read_json_object(paths.root / "logs" / "latest" / paths.environment.name),
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


# Which metric is drawn where. No list of metrics is complete: a new one gets a chart by its prefix.
#
# `place` is the only function that knows names. It turns a metric's name into section, chart and label; metrics with the
# same section and chart share the chart. Metrics that never change are listed in a table instead (`constants`).

LOSSES, OPTIMISATION, DATA, SPEED = "Losses", "Optimisation", "Coverage and data", "Speed"
USE, TRANSPORT, FAULT_SECTION, SCORES = "Memory and utilisation", "Transport", "Faults", "Scores"
ORDER = (LOSSES, OPTIMISATION, DATA, SPEED, USE, TRANSPORT, FAULT_SECTION)
OPEN = (LOSSES, OPTIMISATION, DATA, USE, FAULT_SECTION)

BY_PREFIX = {"align": DATA, "data": DATA, "timing": SPEED, "transport": TRANSPORT, "train": OPTIMISATION}
"""Beginning of a metric's name → its section, unless `place` knows better."""

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
    **dict.fromkeys(("acceptance", "acceptance_low", "acceptance_high"), ACCEPTANCE),
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
    *("validation/", "eval/", "faults/", "memory/"),
    *("train/lr", "train/kd_scale", "train/skipped", "train/unlabelled"),
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
    other = BY_PREFIX.get(prefix) or (prefix if rest else "Other")
    title = TITLES.get(group, group if rest else name) + (" per step" if is_sum(name) else "")
    return SPEED if name in (RATE, ALL_RATE, MFU, IDEAL) else other, title, detail or base or name


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
    cut = []
    for run in runs:
        documents, truncated = (dict(run.points(f"align/{what}")) for what in ("documents", "truncated"))
        cut.append(
            [(step, truncated[step] / whole) for step, whole in documents.items() if whole > 0 and step in truncated]
        )
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


# Writes pages from the folders `templates` and `assets`.
#
# An undefined name in a template is an error. A page is one file: styles and scripts are part of it, and its content
# security policy lets a browser run exactly these scripts (by their hashes) and load nothing. What is put into a page is
# data: text is escaped, and `data` is JSON without any character that could end the element that holds it.

SCRIPTS = ("numbers.js", "chart.js", "samples.js", "report.js")
"""Our own scripts, in the order in which they run; they share one scope."""


def template_environment(**options: Any) -> Environment:
    """A Jinja environment for the folder `templates`, in which an undefined name is an error.

    Args:
        options: further ones of `jinja2.Environment`. HTML needs `autoescape=True`, since nothing is escaped by
            default.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("distill_rl.observe.report", "templates")
    return Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options)


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

    styles, scripts, text = ["page.css"], [], ""
    if data is not None:
        styles += ["uplot/uPlot.min.css", "charts.css"]
        scripts = [_library(), '"use strict";\n(() => {\n' + "\n".join(map(_asset, SCRIPTS)) + "})();\n"]
        text = _json(data)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    page = _render(
        template,
        **values,
        styles=Markup("\n".join(map(_asset, styles))),
        scripts=[Markup(script) for script in scripts],
        script_sources=" ".join(f"'sha256-{each}'" for each in hashes) or "'none'",
        data=Markup(text),
    )
    write_atomic(path, page.encode("utf-8", errors="replace"))


def _json(data: Any) -> str:
    """JSON that can stand in a script element: `<`, `>` and `&` are written as escapes, and so is all that is not ASCII."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _library() -> str:
    return f"/*!\n{_asset('uplot/LICENSE')}*/\n{_asset('uplot/uPlot.iife.min.js')}"


def _asset(name: str) -> str:
    return resources.files("distill_rl.observe.report").joinpath("assets", name).read_text("utf-8")


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
    drawn = []
    for i, row in enumerate(rows):
        y, places = _TOP + _ROW * i + _ROW / 2, [x(value) for value in row.values]
        drawn.append({"name": row.name, "y": y, "values": places, "mean": x(row.mean), "marked": row.marked})
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
    values = [value for curve in chart.curves for value in curve.values]
    ticks = ticks_between(min(values), max(values))
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
    return template_environment(autoescape=True).get_template(template).render(**values)
