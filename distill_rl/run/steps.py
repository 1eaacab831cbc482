"""What the driver keeps of a run's steps: whether they teach anything, how many there are, and the rows they lack."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distill_rl.config.schema import Config
from distill_rl.errors import DataError, DistillError, NumericsError
from distill_rl.observe.metrics import Metric, Metrics
from distill_rl.observe.sinks import read_records
from distill_rl.student.optim import Schedule
from distill_rl.system.files import append_json_lines, read_json_lines
from distill_rl.types import DocumentBatch, RunPaths

log = logging.getLogger(__name__)

_SHOWN = 3
"""Steps without labels that are printed one by one; the rest are counted."""
_SHOWN_ROWS = 8
LEAST_MASS = 0.9
"""Share of a teacher's probability in its top k below which all logits, or draws, teach better: on real text
with 74 %, by a third of what a teacher teaches (docs/results.md)."""
MEASURED_SHARE = 0.15
"""Share of the time, or of the most steps that a run may take, during which its speed is measured."""
_FEWEST = 3
"""Steps that a run takes at least, so that its speed is known. The first one does not count: it waits for the first batch."""
BY_DATA = "data"
"""The stage by which a row is listed; rows that an aligner leaves out have another budget and no stage."""


@dataclass
class Learning:
    """Counts the steps of one start of a run by what came of them."""

    teachers: Sequence[str]
    """Names of the running teachers."""
    learnt: bool = False
    """Whether a step had something to train on and was not skipped, in this start of the run or an earlier one."""
    last_skipped: bool = False
    """Whether the last step was skipped, so that the weights did not change."""
    steps: int = 0
    skipped: int = 0
    unlabelled: int = 0
    """Steps whose documents had nothing to train on."""
    documents: int = 0
    unlabelled_documents: int = 0
    blamed: set[str] = field(default_factory=set)
    """Teachers whose targets were not finite."""

    def begin(self, *, learnt: bool) -> None:
        """Goes on from a checkpoint, in or before which a step has `learnt` something; the counts stay."""
        self.learnt, self.last_skipped = learnt, False

    def note(self, step: int, trained: Metrics, aligned: Metrics, rows: Sequence[int]) -> list[str]:
        """Counts a step by its metrics, and returns the lines to print about it.

        Args:
            trained, aligned: metrics of the student and of the batch.
            rows: numbers of the data's rows in the batch.
        """
        self.steps += 1
        self.documents += int(aligned["align/documents"].value)
        self.unlabelled_documents += int(aligned["align/unlabelled"].value)
        self.last_skipped = trained["train/skipped"].value > 0
        is_unlabelled = trained["train/unlabelled"].value > 0
        self.learnt = self.learnt or not (self.last_skipped or is_unlabelled)
        lines = []
        if self.last_skipped:
            self.skipped += 1
            blamed = teachers_to_blame(trained, self.teachers)
            self.blamed |= set(blamed)
            loss, norm = trained["train/loss"].value, trained["train/grad_norm"].value
            source = f" from the KD with {_and(blamed)}" if blamed else ""
            details = f"loss {loss:.4g}{source}, gradient norm {norm:.4g}; the weights are unchanged"
            lines.append(f"skipped   step {step}: {details}")
        if is_unlabelled:
            self.unlabelled += 1
            if self.unlabelled <= _SHOWN:
                more = ", …" if len(rows) > _SHOWN_ROWS else ""
                named = f"{', '.join(map(str, rows[:_SHOWN_ROWS]))}{more}"
                nothing = f"nothing in its documents is trained on (rows {named} of the data)"
                lines.append(f"no labels step {step}: {nothing if rows else 'none of its rows can be read'}")
            if self.unlabelled == _SHOWN:
                lines.append("no labels further steps like these are counted in faults/unlabelled_steps")
        return lines

    @property
    def metrics(self) -> dict[str, Metric]:
        """Numbers of steps skipped and without labels since this start of the run, as metrics; those of 0 are absent."""
        counts = {"faults/skipped_steps": self.skipped, "faults/unlabelled_steps": self.unlabelled}
        return {name: Metric(float(count), "last") for name, count in counts.items() if count}

    def summary(self) -> list[str]:
        """Returns the lines to print at the end of a run; empty if every step trained on something."""
        lines = []
        if self.skipped:
            lines.append(f"skipped   {self.skipped} of {self.steps} steps")
        if self.unlabelled_documents:
            which = f"{self.unlabelled_documents:,} of {self.documents:,} documents"
            lines.append(f"no labels {which} had no token to train on")
        if self.unlabelled:
            lines.append(f"no labels {self.unlabelled:,} of {self.steps:,} steps had nothing to train on")
        return lines

    def require_learnt(self) -> None:
        """Checks, after the last step, that the student is not the model that the run began with.

        Raises:
            DistillError: no step of the run trained on anything; its exit code is 1.
        """
        if self.learnt:
            return
        if self.skipped:
            value = "all of them skipped" if self.skipped == self.steps else "the rest skipped"
            remedy = "look for broken rows or weights"
            if self.blamed:
                names = _and(sorted(self.blamed))
                value += f": the KD with {names} is not finite, the student's own cross-entropy is"
                remedy = f"check the weights and the dtype of {names}"
            rule = f"one of the {self.steps} steps must change the weights"
            raise NumericsError("the run", rule, value, f"{remedy}; nothing was exported, start over with --clean")
        remedy = "look at the rows, data.loss_on and data.max_length; nothing was exported, start over with --clean"
        raise DistillError("the data", "at least one row must have a token to train on", "none in any step", remedy)


def _and(names: Sequence[str]) -> str:
    return f"teacher {names[0]}" if len(names) == 1 else f"teachers {', '.join(names)}"


def teachers_to_blame(trained: Metrics, teachers: Sequence[str]) -> list[str]:
    """Returns the teachers whose targets made a step's loss NaN or infinite; empty if that cannot be told.

    They are those with a KD that is not finite, where the student's own cross-entropy is finite.

    Args:
        trained: the metrics of the step.
        teachers: names of the running teachers.
    """
    kd = {name: trained.get(f"train/kl_loss/{name}" if len(teachers) > 1 else "train/kl_loss") for name in teachers}
    if not math.isfinite(trained["train/nll_loss"].value):
        return []
    return [name for name, metric in kd.items() if metric is not None and not math.isfinite(metric.value)]


def advice(config: Config, trained: Metrics) -> list[str]:
    """Returns the lines to print after the first step, from the student's metrics of it.

    Hidden states or draws are suggested in place of a top k with too little of the first teacher's probability, where both are possible:
    for forward KL, with one tokenizer, and of a teacher that this run computes itself.
    """
    mass, teachers = trained.get("train/teacher_mass"), config.running_teachers
    if not teachers or mass is None or mass.weight == 0 or mass.value >= LEAST_MASS:
        return []
    first = teachers[0]
    if (first.export, first.backend, first.cache, config.loss.divergence) != ("topk", "hf", None, "forward_kl"):
        return []
    return [
        f"hint      the top {config.loss.top_k} of teacher {first.name} hold {mass.value:.0%} of its probability. More of the rest is taught by "
        "teachers.0.export=hidden, if it shares a GPU or host with the student, or else teachers.0.export=sampled loss.draws=32 "
        "(docs/losses.md, Which loss when)"
    ]


def moved_rate(config: Config, paths: RunPaths, step: int, total_steps: int) -> str | None:
    """A line on a learning rate that does not go on where the run stopped, as when its end moved; None if it does.

    Args:
        step: the last one that was taken; its rate is recorded.
        total_steps: of the whole run.
    """
    recorded = read_records(paths.metrics) if paths.metrics.exists() else []
    before = next(
        (record["train/lr"] for record in reversed(recorded) if record["step"] == step and record.get("train/lr")), None
    )
    if before is None or step >= total_steps:
        return None
    schedule = Schedule(config.schedule, peak=config.optimizer.lr, total_steps=total_steps)
    if math.isclose(schedule(step), before, rel_tol=1e-3):
        return None
    return (
        f"the learning rate was {before:.3g} at step {step} and goes on at {schedule(step + 1):.3g}: of {total_steps} steps, "
        f"step {step} has {schedule(step):.3g} (schedule.steps keeps the schedule of a run that is extended)"
    )


class Pace:
    """Chooses the last step of a run from the speed of its first steps, so that all of them take a given time.

    Call `begin` before the first step and `last_step` after every step. Whatever comes between two steps counts as
    part of them.

    Args:
        minutes: for all steps together.
        most: steps that the run may take.
        clock: monotonic seconds from any origin.
    """

    def __init__(self, minutes: float, *, most: int, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._most, self._clock = 60 * minutes, most, clock
        self._start = self._after_first = 0.0

    def begin(self) -> None:
        """Starts the clock."""
        self._start = self._clock()

    def last_step(self, done: int) -> int | None:
        """The number of steps in all, at least `done`; None as long as too little is measured.

        Args:
            done: steps that have been taken, from 1.
        """
        now = self._clock()
        if done == 1:
            self._after_first = now
        left = self._seconds - (now - self._start)
        long_enough = left <= (1 - MEASURED_SHARE) * self._seconds or done >= MEASURED_SHARE * self._most
        if done < _FEWEST or not long_enough:
            return None
        per_step = (now - self._after_first) / (done - 1)
        return done + round(min(max(left, 0.0) / max(per_step, 1e-9), self._most))


def settled(config: Config, *, done: int, last: int) -> Config:
    """The configuration of a run whose last step has been chosen: one that takes the same steps without `train.minutes`.

    Until the choice the learning rate was that of a run without end, which stays at its peak after the warm-up; and a
    run that ends within its warm-up keeps the rates of the longer one. A schedule with an end of its own
    (`schedule.steps`) is not changed.

    Args:
        done: steps that have been taken.
        last: the last step.
    """
    schedule = config.schedule
    if schedule.steps is None and last < schedule.warmup_steps:
        schedule = replace(schedule, steps=schedule.warmup_steps, hold_steps=0)
    elif schedule.steps is None and schedule.kind != "constant":
        schedule = replace(schedule, hold_steps=max(schedule.hold_steps, done - schedule.warmup_steps))
    return replace(config, schedule=schedule, train=replace(config.train, steps=last, minutes=None))


class SkippedRows:
    """The rows that a run has left out; a row that is met again in a later epoch counts once.

    Args:
        path: JSON lines with source, row, reason and stage, to which rows are appended; what earlier attempts of the
            run have listed counts, too.
        budget: most rows that may be listed.
    """

    def __init__(self, path: Path, budget: int):
        self._path, self._budget = path, budget
        self._rows = {
            (entry["source"], entry["row"]) for entry in read_json_lines(path) if entry.get("stage") == BY_DATA
        }

    def add(self, batch: DocumentBatch) -> int:
        """Lists the rows that a batch lacks, and returns their number.

        Raises:
            DataError: more rows than the budget are now listed. They are listed all the same.
        """
        new = [bad for bad in batch.bad_rows if (batch.source, bad.row) not in self._rows]
        if new:
            entries = (
                {"source": batch.source, "row": bad.row, "reason": bad.reason[:500], "stage": BY_DATA} for bad in new
            )
            append_json_lines(self._path, entries)
            last = new[-1]
            log.warning(
                "%d rows (%s) are left out; the last, row %s: %s", len(new), batch.source, last.row, last.reason
            )
            self._rows.update((batch.source, bad.row) for bad in new)
            if len(self._rows) > self._budget:
                rule = f"no more than data.max_bad_rows={self._budget} may be left out"
                remedy = f"fix or remove the rows listed in {self._path}, or raise data.max_bad_rows"
                raise DataError("data rows that cannot be read", rule, f"{len(self._rows)}", remedy)
        return len(batch.bad_rows)
