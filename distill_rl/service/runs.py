"""Runs by name: the newest job of a run, its state and its progress."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.errors import ConfigError
from distill_rl.system.signals import EXIT_INTERRUPTED, EXIT_PREEMPTED
from distill_rl.types import QUEUE

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

NAME, RUN, ATTEMPT, STEPS, PYTHON = (f"distill_rl.{key}" for key in ("name", "run", "attempt", "steps", "python"))
"""Keys of a job's metadata: name of the run, run directory, number of the submission, number of steps, interpreter."""
ENDED = "ended     exit code "
"""Start of the last line of a job's log, before the exit code; Ray keeps no exit code of a job that it stopped."""
_STATES = {"PENDING": "waiting", "RUNNING": "running", "SUCCEEDED": "done", "STOPPED": "stopped"}
"""Ray's status of a job → state of a run."""
_FAILURES = {EXIT_PREEMPTED: "saved", EXIT_INTERRUPTED: "stopped", 2: "refused"}
"""Exit code of a job that failed → state of a run."""
_USABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")


@dataclass(frozen=True)
class JobRun:
    """A run, in the state of its newest submission."""

    name: str
    submission_id: str
    attempt: int
    state: str
    """waiting, running, done, saved (stopped by a signal, after saving), stopped, refused (bad input) or failed."""
    since: float
    """Unix time of the start or, if the run has ended, of the end."""
    folder: Path
    steps: int | None
    node: str | None
    python: str
    code: int | None
    """Exit code, if Ray has it."""

    @property
    def ended(self) -> bool:
        return self.state not in ("waiting", "running")


def require_usable(name: str) -> None:
    """Checks that a run's name can be part of a URL and of a file name.

    Raises:
        ConfigError: it is not 1 to 101 ASCII letters, digits, `.`, `_` and `-`, the first a letter or digit.
    """
    if not _USABLE.fullmatch(name):
        rule = "of a submitted run must consist of at most 101 letters, digits, '.', '_' and '-'"
        raise ConfigError("run.name", rule, repr(name), "set run.name")


def runs(jobs: Iterable[JobDetails]) -> dict[str, JobRun]:
    """Every run among the jobs, in the state of its newest submission, by name in alphabetical order.

    Jobs of other programs are ignored.
    """
    newest: dict[str, JobRun] = {}
    for run in filter(None, map(_run, jobs)):
        if run.name not in newest or newest[run.name].attempt < run.attempt:
            newest[run.name] = run
    return dict(sorted(newest.items()))


def find(jobs: Iterable[JobDetails], name: str) -> JobRun:
    """The run of a name, in the state of its newest submission.

    Args:
        jobs: all jobs of the cluster.

    Raises:
        ConfigError: no run has this name; the message lists the existing runs.
    """
    known = runs(jobs)
    if name not in known:
        remedy = f"existing runs: {', '.join(known)}" if known else "there are no runs on this cluster"
        raise ConfigError(f"run {name}", "was not submitted to this cluster", remedy=remedy)
    return known[name]


def next_submission(jobs: Iterable[JobDetails], name: str) -> tuple[str, int]:
    """Id and number of the next submission of a run: `name`, then `name.2`, `name.3`, ...

    Ids that other jobs have are skipped.

    Args:
        jobs: all jobs of the cluster.

    Raises:
        ConfigError: the run has not ended.
    """
    jobs = list(jobs)
    previous = runs(jobs).get(name)
    if previous and not previous.ended:
        remedy = f"wait for it, stop it (distill-rl stop {name}), or choose another run.name"
        raise ConfigError(f"run {name}", f"is already {previous.state} on this cluster", remedy=remedy)
    taken = {job.submission_id for job in jobs}  # a run may be named like a later submission of another
    attempt = previous.attempt + 1 if previous else 1
    while (submission_id := name if attempt == 1 else f"{name}.{attempt}") in taken:
        attempt += 1
    return submission_id, attempt


def exit_code(run: JobRun, logs: str) -> int:
    """Exit code of a run that has ended: from its log, else from Ray unless negative, else 1.

    Args:
        logs: everything that the job has printed.
    """
    codes = [line.removeprefix(ENDED) for line in logs.splitlines() if line.startswith(ENDED)]
    if codes and codes[-1].isdecimal():
        return int(codes[-1])
    return run.code if run.code is not None and run.code >= 0 else 1


def table(of_runs: Iterable[JobRun]) -> list[str]:
    """Lines of a table with name, state, steps, latest KD and local time (`JobRun.since`), headings first.

    Reads the metrics in the runs' directories; `?` stands for steps that are not there yet or cannot be read on this
    machine.
    """
    rows = [("run", "state", "step", "KD", "since")]
    for run in of_runs:
        step, kd = _progress(run.folder)
        place = _place(run.folder) if run.state == "running" else None
        steps = f"{step}/{run.steps:,}" if run.steps else step
        since = datetime.fromtimestamp(run.since).isoformat(" ", "seconds") if run.since else ""
        state = run.state if place is None else f"queued, {place}"
        rows.append((run.name, state, steps, kd, since))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _progress(folder: Path) -> tuple[str, str]:
    """Last step and latest KD in training of a run, as text, from the metrics in its directory."""
    from distill_rl.observe.sinks import read_records

    try:
        records = read_records(folder / "metrics.jsonl")
    except OSError:
        records = []
    steps = [record["step"] for record in records]
    losses = [record["train/kl_loss"] for record in records if "train/kl_loss" in record]
    return f"{max(steps):,}" if steps else "?", f"{losses[-1]:.4f}" if losses else ""


def _place(folder: Path) -> int | None:
    """The place of a run in the queue of its cluster; None if it does not wait, or that cannot be read on this machine."""
    try:
        return int(json.loads((folder / QUEUE).read_bytes())["place"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _run(job: JobDetails) -> JobRun | None:
    """The run of a job, with the state of this submission; None for jobs of other programs."""
    metadata: dict[str, Any] = job.metadata or {}
    if NAME not in metadata or RUN not in metadata or not job.submission_id:
        return None
    code, status = getattr(job, "driver_exit_code", None), str(getattr(job.status, "value", job.status))
    state = _STATES.get(status) or _FAILURES.get(code or 1, "failed")
    moment = job.start_time if state in ("waiting", "running") else job.end_time or job.start_time
    return JobRun(
        name=metadata[NAME],
        submission_id=job.submission_id,
        attempt=_to_int(metadata.get(ATTEMPT)) or 1,
        state=state,
        since=(moment or 0) / 1000,
        folder=Path(metadata[RUN]),
        steps=_to_int(metadata.get(STEPS)),
        node=getattr(job, "driver_node_id", None),
        python=metadata.get(PYTHON, "python"),
        code=code,
    )


def _to_int(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and text.isdecimal() else None
