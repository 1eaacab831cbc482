"""Runs by name: which job is a run's newest, what became of it, and how far it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.errors import ConfigError
from distill_rl.system.signals import EXIT_INTERRUPTED, EXIT_PREEMPTED

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

NAME, RUN, ATTEMPT, STEPS, PYTHON = (f"distill_rl.{key}" for key in ("name", "run", "attempt", "steps", "python"))
"""What a job of ours carries: name of the run, its directory, number of the submission, steps, interpreter."""
ENDED = "ended     exit code "
"""Last line of a job's log; Ray keeps no exit code of a job that was stopped."""
_USABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")


@dataclass(frozen=True)
class Run:
    """A run as its newest submission left it."""

    name: str
    submission_id: str
    attempt: int
    state: str
    """waiting, running, done, saved (stopped by a signal, after saving), stopped, refused (bad input) or failed"""
    since: float
    """Unix time of the start, or, of a run that has ended, of its end."""
    folder: Path
    steps: int | None
    node: str | None
    python: str
    code: int | None
    """exit code, where Ray has it"""

    @property
    def ended(self) -> bool:
        return self.state not in ("waiting", "running")


def require_usable(name: str) -> None:
    """
    Raises:
        ConfigError: a name that cannot be a part of a URL and of a file's name.
    """
    if not _USABLE.fullmatch(name):
        rule = "of a submitted run must be of letters, digits, '.', '_' and '-', 101 at most"
        raise ConfigError("run.name", rule, repr(name), "set run.name")


def runs(jobs: Iterable[JobDetails]) -> dict[str, Run]:
    """The newest submission of every run on a cluster, by name; jobs of other programs are left out."""
    newest: dict[str, Run] = {}
    for run in filter(None, map(_run, jobs)):
        if run.name not in newest or newest[run.name].attempt < run.attempt:
            newest[run.name] = run
    return dict(sorted(newest.items()))


def find(jobs: Iterable[JobDetails], name: str) -> Run:
    """
    Raises:
        ConfigError: no run of this name, with those that there are.
    """
    known = runs(jobs)
    if name not in known:
        there = f"the runs there are: {', '.join(known)}" if known else "there are no runs on this cluster"
        raise ConfigError(f"run {name}", "was not submitted to this cluster", remedy=there)
    return known[name]


def next_submission(jobs: Iterable[JobDetails], name: str) -> tuple[str, int]:
    """Id and number of the next submission of a name: `name`, then `name.2`, `name.3`, ...

    Raises:
        ConfigError: a run of this name is still running.
    """
    jobs = list(jobs)
    before = runs(jobs).get(name)
    if before and not before.ended:
        remedy = f"wait for it, stop it (distill-rl stop {name}), or choose another run.name"
        raise ConfigError(f"run {name}", f"is {before.state} on this cluster already", remedy=remedy)
    taken = {job.submission_id for job in jobs}
    attempt = before.attempt + 1 if before else 1
    while (chosen := name if attempt == 1 else f"{name}.{attempt}") in taken:
        attempt += 1
    return chosen, attempt


def exit_code(run: Run, logs: str) -> int:
    """Of a run that has ended: what its process said, 1 where it could not say anything."""
    said = [line.removeprefix(ENDED) for line in logs.splitlines() if line.startswith(ENDED)]
    if said and said[-1].isdecimal():
        return int(said[-1])
    return run.code if run.code is not None and run.code >= 0 else 1


@dataclass(frozen=True)
class Progress:
    step: int
    kd: float | None


def progress(folder: Path) -> Progress | None:
    """How far a run is, by the metrics in its directory; None where they are not within reach, or none are there yet."""
    from distill_rl.observe.sinks.sinks import read_records

    try:
        records = read_records(folder / "metrics.jsonl")
    except OSError:
        return None
    steps = [record["step"] for record in records]
    losses = [record["train/kl_loss"] for record in records if "train/kl_loss" in record]
    return Progress(max(steps), losses[-1] if losses else None) if steps else None


def table(of: Iterable[Run]) -> list[str]:
    """Lines of a table: name, state, steps, newest KD, and since when."""
    rows = [("run", "state", "step", "KD", "since")]
    for run in of:
        far = progress(run.folder)
        step = "?" if far is None else f"{far.step:,}"
        rows.append(
            (
                run.name,
                run.state,
                f"{step}/{run.steps:,}" if run.steps else step,
                f"{far.kd:.4f}" if far and far.kd is not None else "",
                datetime.fromtimestamp(run.since).isoformat(" ", "seconds") if run.since else "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _run(job: JobDetails) -> Run | None:
    told: dict[str, Any] = job.metadata or {}
    if NAME not in told or RUN not in told or not job.submission_id:
        return None
    code, status = getattr(job, "driver_exit_code", None), str(getattr(job.status, "value", job.status))
    state = {"PENDING": "waiting", "RUNNING": "running", "SUCCEEDED": "done", "STOPPED": "stopped"}.get(
        status, "failed"
    )
    if state == "failed":
        state = {EXIT_PREEMPTED: "saved", EXIT_INTERRUPTED: "stopped", 2: "refused"}.get(code or 1, "failed")
    moment = job.start_time if state in ("waiting", "running") else job.end_time or job.start_time
    return Run(
        name=told[NAME],
        submission_id=job.submission_id,
        attempt=_number(told.get(ATTEMPT)) or 1,
        state=state,
        since=(moment or 0) / 1000,
        folder=Path(told[RUN]),
        steps=_number(told.get(STEPS)),
        node=getattr(job, "driver_node_id", None),
        python=told.get(PYTHON, "python"),
        code=code,
    )


def _number(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and text.isdecimal() else None
