"""What the first step, and those of earlier attempts, show of the settings."""

from __future__ import annotations

import math

from distill_rl.config.facts import running_teachers
from distill_rl.config.schema import Config
from distill_rl.observe.metrics import Metrics
from distill_rl.observe.sinks import read_records
from distill_rl.student.optim import Schedule
from distill_rl.types import RunPaths

LEAST_MASS = 0.9
"""Share of a teacher's probability in its top k below which all logits, or draws, teach better: on real text
with 74 %, by a third of what a teacher teaches (docs/results.md)."""


def advice(config: Config, trained: Metrics) -> list[str]:
    """Returns the lines to print after the first step, from the student's metrics of it.

    Hidden states or draws are suggested in place of a top k with too little of the first teacher's probability, where both are possible:
    for forward KL, with one tokenizer, and of a teacher that this run computes itself.
    """
    mass, teachers = trained.get("train/teacher_mass"), running_teachers(config)
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
