"""The HTML page about a run, or several runs: one file, which opens offline."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from distill_rl import __version__
from distill_rl.config.load import load_config
from distill_rl.config.save import fingerprint, flat
from distill_rl.errors import DistillError
from distill_rl.observe.metrics import FAULTS
from distill_rl.observe.report.charts import (
    Chart,
    ReportRun,
    Section,
    Steps,
    constants,
    faults,
    number,
    points_per_curve,
    read_runs,
    score_charts,
    sections,
)
from distill_rl.observe.report.page import joined, write_page
from distill_rl.observe.report.scores import OUTCOMES, Evaluation
from distill_rl.observe.sinks import ALL_RATE, ALL_TOKENS, MFU, RATE, SECONDS, TOKENS

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
    parts = []
    if isinstance(gpus, list):
        parts += [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(map(str, gpus))]
    if recorded.get("cpu"):
        parts.append(f"{recorded['cpu']}")
    for name, unit in (("cores", "cores"), ("memory_gib", "GiB")):
        if recorded.get(name):
            parts.append(f"{recorded[name]} {unit}")
    return ", ".join(parts)


def differences(runs: Sequence[ReportRun]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each run as text) of all settings in which the runs differ, then of their environments.

    The run's name is not among them. A run without a readable configuration has a dash everywhere.
    """
    rows = []
    for tables in ([_settings(run) for run in runs], [environment(run) for run in runs]):
        for name in dict.fromkeys(name for table in tables for name in table):
            values = [table.get(name, MISSING) for table in tables]
            if len(set(values)) > 1:
                rows.append((name, values))
    return rows


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
    return dict(_figures(run))


def _figures(run: ReportRun) -> Iterator[tuple[str, str]]:
    def text(value: float | None, form: Callable[[float], str]) -> str | None:
        return form(value) if value is not None and math.isfinite(value) else None

    def whole(value: float) -> str:
        return f"{value:,.0f}"

    rates, all_rates, used = run.finite(RATE), run.finite(ALL_RATE), run.finite(MFU)
    low, high = (run.last(f"validation/acceptance_{bound}") for bound in ("low", "high"))
    entries: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("steps", run.records[-1]["step"] if run.records else 0, whole),
        ("KD, validation", run.last("validation/kl_loss"), number),
        ("CE, validation", run.last("validation/nll_loss"), number),
        ("top-1 agreement, validation", run.last("validation/top1_agreement"), "{:.1%}".format),
        ("acceptance, validation", run.last("validation/acceptance"), "{:.1%}".format),
        ("KD, train", run.last("train/kl_loss"), number),
        ("tokens compared", run.last("align/coverage"), "{:.1%}".format),
        ("acceptance, validation", None if low is None else high, lambda most: f"{low:.1%} to {most:.1%}"),
        ("tokens, trained", sum(run.finite(TOKENS)) or None, whole),
        ("tokens, all", sum(run.finite(ALL_TOKENS)) or None, whole),
        ("trained tokens/s, median", median(rates) if rates else None, whole),
        ("all tokens/s, median", median(all_rates) if all_rates else None, whole),
        ("model FLOPs utilisation (MFU), median", median(used) if used else None, "{:.1%}".format),
        ("time spent in steps", run.total(SECONDS) or None, _duration),
        ("rows left out", run.num_bad_rows or None, whole),
        ("broken records", run.num_broken or None, whole),
    ]
    for name, label in FAULTS.items():
        points = faults(run, name)
        entries.append((label, points[-1][1] if points else None, whole))
    for label, value, form in entries:
        shown = text(value, form)
        if shown is not None:
            yield label, shown


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
        rows = list(_rows(run))
        steps = _spread(sorted({row["step"] for row in rows if row.get("who") != "teacher"}))
        for row in rows:
            is_teacher = row.get("who") == "teacher"
            if not is_teacher and row["step"] not in steps:
                continue
            suite, item = _text(row.get("suite", "")), _text(row.get("id", ""))
            entry = {
                "suite": suite,
                "id": item,
                "prompt": _messages(row.get("prompt")),
                "reference": _text(row.get("reference", "")),
            }
            entry["answers"] = []
            items.setdefault((suite, item), entry)["answers"].append(
                {
                    "run": index,
                    "who": f"teacher {_text(row.get('teacher', ''))}".strip() if is_teacher else "student",
                    "step": row["step"],
                    "text": _text(row["completion"]),
                    "verdict": _verdict(row),
                    "right": row.get("correct") is True,
                }
            )
    return list(items.values())


def _rows(run: ReportRun) -> Iterator[dict[str, Any]]:
    """The valid lines of a run's file; none without a file."""
    try:
        lines = run.paths.samples.read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("step")) is int and isinstance(row.get("completion"), str):
            yield row


def _spread(steps: list[int]) -> set[int]:
    """At most MAX_STEPS of the steps, evenly spread, with the first and the last."""
    if len(steps) <= MAX_STEPS:
        return set(steps)
    return {steps[round(i * (len(steps) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)}


def _messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt as a list of messages; a plain text is one without a role."""
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return [{"role": _text(each.get("role", "")), "content": _text(each.get("content", ""))} for each in prompt]
    return [{"role": "", "content": _text(prompt)}]


def _verdict(row: dict[str, Any]) -> str:
    """In a few words, how the completion was judged."""
    outcome = _text(row.get("outcome", ""))
    words = [OUTCOMES.get(outcome, outcome)]
    if row.get("truncated") is True:
        words.append(OUTCOMES["truncated"])
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


def page_data(runs: Sequence[ReportRun], drawn: Sequence[Section], scored: Sequence[Chart]) -> dict[str, Any]:
    """What the page's script draws, as JSON types: the runs' names, lists of steps, all charts in the page's order,
    and sample completions."""
    steps, limit = Steps(), points_per_curve(len(runs))
    in_order = [*scored, *(chart for section in drawn for chart in section.charts)]
    curves = [chart.data(steps, limit) for chart in in_order]
    names = [run.name for run in runs]
    return {"runs": names, "steps": list(steps.indices), "charts": curves, "samples": samples(runs)}


def _results(runs: Sequence[ReportRun]) -> list[tuple[str, list[str]]]:
    """(figure, its value in each run as text) of all figures (`figures`) that a run has."""
    columns = [figures(run) for run in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    return [(label, [column.get(label, MISSING) for column in columns]) for label in labels]


def _last_values(runs: Sequence[ReportRun]) -> list[tuple[str, list[str]]]:
    """(metric, its last finite value in each run as text) of all metrics, by name."""
    rows = []
    for name in sorted(set().union(*(run.metrics for run in runs))):
        values = [run.last(name) for run in runs]
        rows.append((name, [MISSING if value is None else number(value) for value in values]))
    return rows
