"""How a run evaluates its student: on copies of the weights, with the scores where its metrics and checkpoints are."""

from __future__ import annotations

import os
from pathlib import Path

from distill_rl.observe.sinks import Observer
from distill_rl.preflight.job import Job
from distill_rl.run.checkpoints.store import CheckpointStore
from distill_rl.system.signals import Signals
from distill_rl.workers.evaluation.evaluations import Evaluations
from distill_rl.workers.start import RunActors


def evaluations_of(
    job: Job, actors: RunActors, observer: Observer, store: CheckpointStore, signals: Signals
) -> Evaluations:
    """Returns the evaluations of a run, which keep files in its folder `evals` and record scores to `observer`.

    Scores of steps during training go to `store`, too.

    They evaluate copies of the student's weights, and do nothing if the run has no evaluator.
    """

    def copy(folder: Path) -> str | None:
        problems = actors.student.collective("copy", os.fspath(folder), what=f"copying the weights to {folder}")
        return next((problem for problem in problems if problem is not None), None)

    return Evaluations(
        actors.evaluator,
        job.config,
        actors.calls,
        job.paths,
        copy=copy,
        record=observer.record,
        compare=store.scores.add,
        stopping=lambda: signals.preempted,
    )
