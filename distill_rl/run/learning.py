"""Whether a run learns anything: the steps that were skipped, those without anything to train on, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from distill_rl.errors import DistillError, NumericsError
from distill_rl.observe.metrics import Metric, Metrics

_SHOWN = 3
"""Steps without labels that are printed one by one; the rest are counted."""
_SHOWN_ROWS = 8


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
    """The teachers, in words."""
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
