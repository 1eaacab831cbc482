"""Tables of what a run is: its settings, its software and machines, and in what several runs differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from distill_rl import __version__
from distill_rl.config.load import load_config
from distill_rl.config.save import fingerprint, flat
from distill_rl.errors import DistillError
from distill_rl.observe.metrics import FAULTS
from distill_rl.observe.report import charts
from distill_rl.observe.report.runs import Run
from distill_rl.observe.report.sections import faults
from distill_rl.observe.sinks.sinks import ALL_RATE, ALL_TOKENS, MFU, RATE, SECONDS, TOKENS

MISSING = "—"
FAULT_LABELS = {*FAULTS.values(), "rows left out", "broken records"}
"""Figures that say that something went wrong."""


def header(run: Run) -> dict[str, str]:
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


def environment(run: Run) -> dict[str, str]:
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


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
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


def _settings(run: Run) -> dict[str, str]:
    """Dotted key → value as text of the run's configuration; empty if it has none or it cannot be read."""
    from omegaconf import OmegaConf

    try:
        tree = OmegaConf.to_container(OmegaConf.create(run.config), resolve=True)
    except Exception:  # YAML or interpolation of any other version
        return {}
    return {key: "null" if value is None else f"{value}" for key, value in flat(tree) if key != "run.name"}


def figures(run: Run) -> dict[str, str]:
    """Label → text of a run's most important numbers, such as steps, last losses, tokens and faults.

    Those without a finite value are left out.
    """
    return dict(_figures(run))


def _figures(run: Run) -> Iterator[tuple[str, str]]:
    def text(value: float | None, form: Callable[[float], str]) -> str | None:
        return form(value) if value is not None and math.isfinite(value) else None

    def whole(value: float) -> str:
        return f"{value:,.0f}"

    rates, all_rates, used = run.finite(RATE), run.finite(ALL_RATE), run.finite(MFU)
    low, high = (run.last(f"validation/acceptance_{bound}") for bound in ("low", "high"))
    entries: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("steps", run.records[-1]["step"] if run.records else 0, whole),
        ("KD, validation", run.last("validation/kl_loss"), charts.number),
        ("CE, validation", run.last("validation/nll_loss"), charts.number),
        ("top-1 agreement, validation", run.last("validation/top1_agreement"), "{:.1%}".format),
        ("acceptance, validation", run.last("validation/acceptance"), "{:.1%}".format),
        ("KD, train", run.last("train/kl_loss"), charts.number),
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
    """Seconds since the epoch as date and time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
