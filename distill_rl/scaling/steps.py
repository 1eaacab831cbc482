"""How long steps take when the stages of a batch overlap: the rules of the pipeline, played through event by event.

1. A batch is submitted when the student begins the step that is `depth` steps earlier.
2. The aligners work on one batch after another, in order.
3. The teachers begin a batch when it is aligned, they are done with the one before, and their rings have room: the batch that is `ring`
   batches earlier has been trained on.
4. The student begins a step when the teachers are done with it and the step before has ended.

Where teachers and student share GPUs and both have work, each goes at half its speed: the GPU divides its time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import exp
from statistics import NormalDist

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Stages:
    """What a step consists of. Times are in seconds, of a rank that nothing delays."""

    align: float
    teacher: float
    student: float
    between: float = 0.0
    """From one step of the student to the next: the driver's own work."""
    depth: int = 1
    """`prefetch.depth`"""
    ring: int | None = None
    """Batches for which the teachers' rings have room; None: depth + 1, as by default."""
    shared: bool = False
    """Whether teachers and student share their GPUs."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of a rank's time, from step to step: 0.05 is about 5 %."""
    teacher_ranks: int = 1
    student_ranks: int = 1
    """A stage ends with its slowest rank."""


def step_seconds(stages: Stages, steps: int = 200, seed: int = 0) -> float:
    """The mean time of a step, once the pipeline is full.

    Args:
        steps: that are simulated; the first tenth is not counted.
        seed: of the jitter.
    """
    ends = simulate(stages, steps, seed)
    first = max(len(ends) // 10, 1)
    return (ends[-1] - ends[first - 1]) / (len(ends) - first)


def simulate(stages: Stages, steps: int, seed: int = 0) -> list[float]:
    """When the student ends each step, in seconds since the run's first batch was submitted."""
    draw = random.Random(seed)
    work = {
        "align": [stages.align] * steps,
        "teacher": [stages.teacher * slowest(draw, stages.jitter, stages.teacher_ranks) for _ in range(steps)],
        "student": [
            stages.between + stages.student * slowest(draw, stages.jitter, stages.student_ranks) for _ in range(steps)
        ],
    }
    ring = stages.depth + 1 if stages.ring is None else stages.ring
    done = dict.fromkeys(work, 0)
    running: dict[str, float] = {}
    now, ends = 0.0, list[float]()

    def may_begin(stage: str) -> bool:
        batch = done[stage]
        if stage in running or batch == steps:
            return False
        begun = done["student"] + ("student" in running)
        if stage == "align":  # batch b is submitted when the student is about to begin step b - depth
            return batch <= done["student"] + stages.depth
        if stage == "teacher":
            return done["align"] > batch and batch < done["student"] + ring
        return done["teacher"] > batch and begun == batch

    while done["student"] < steps:
        for stage in work:
            if may_begin(stage):
                running[stage] = work[stage][done[stage]]
        both = stages.shared and {"teacher", "student"} <= set(running)
        speeds = {stage: 0.5 if both and stage != "align" else 1.0 for stage in running}
        passed = min(left / speeds[stage] for stage, left in running.items())
        now += passed
        for stage in list(running):
            running[stage] -= passed * speeds[stage]
            if running[stage] <= _EPSILON:
                del running[stage]
                done[stage] += 1
                if stage == "student":
                    ends.append(now)
    return ends


def slowest(draw: random.Random, jitter: float, ranks: int) -> float:
    """The time of the slowest of some ranks, whose times are log-normal around 1."""
    if not jitter:
        return 1.0
    # The largest of n uniform numbers is distributed as U^(1/n).
    largest = draw.random() ** (1 / ranks)
    return exp(NormalDist(sigma=jitter).inv_cdf(min(max(largest, _EPSILON), 1 - _EPSILON)))
