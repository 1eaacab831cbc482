"""What faults cost: goodput, the share of the time in which a run makes progress that it keeps.

Two kinds of faults, both Poisson processes whose rate is proportional to the GPUs that they strike:

- A fault of the student (process, GPU or node) takes the run back to its last checkpoint. The steps since then are done again, after the
  time that recovery takes.
- A fault of a teacher makes the run wait until a replacement has loaded the model. Nothing is lost.

With a rate λ of the student's faults, recovery R and w seconds of work between two checkpoints, that with saving included, a segment takes
(1/λ + R)(e^(λw) − 1) seconds on average (Daly 2006, with faults during recovery left out).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import expm1, sqrt

HOUR = 3600.0
LLAMA_3 = 419 / (54 * 24 * 16_384)
"""Interruptions per GPU and hour that were not planned, in 54 days of Llama 3's training on 16,384 H100s (arXiv 2407.21783)."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Of a cluster and a run. Times are in seconds."""

    per_gpu_hour: float = LLAMA_3
    student_gpus: int = 1
    teacher_gpus: int = 0
    student_recovery: float = 300.0
    """From the fault to the first step that is done again."""
    teacher_recovery: float = 120.0
    """From the fault to the next step."""

    @property
    def student_rate(self) -> float:
        """Faults per second."""
        return self.per_gpu_hour * self.student_gpus / HOUR

    @property
    def teacher_rate(self) -> float:
        return self.per_gpu_hour * self.teacher_gpus / HOUR


def goodput(faults: Faults, *, step: float, save: float, every: int) -> float:
    """The share of the time that goes into steps which count, from 0 to 1.

    Args:
        step: seconds of a step.
        save: seconds that a checkpoint holds the run up.
        every: steps between two checkpoints.
    """
    useful = step * every
    rate = faults.student_rate
    segment = useful + save
    if rate:
        try:
            segment = (1 / rate + faults.student_recovery) * expm1(rate * segment)
        except OverflowError:
            return 0.0
    # While a teacher is replaced, the run waits; the student's faults in that time are left out.
    return useful / (segment * (1 + faults.teacher_rate * faults.teacher_recovery))


def best_interval(faults: Faults, *, step: float, save: float) -> int:
    """The number of steps between checkpoints with the highest goodput.

    Found from Young's and Daly's √(2 · save / rate) by looking at the whole numbers around it; without faults, or if saving costs
    nothing, the widest or narrowest interval: a million steps, or one.
    """
    if not faults.student_rate:
        return 1_000_000
    seconds = sqrt(2 * save / faults.student_rate)
    around = max(1, round(seconds / step))
    candidates = {max(1, around * numerator // 20) for numerator in range(10, 41)}
    return max(sorted(candidates), key=lambda every: goodput(faults, step=step, save=save, every=every))


def simulate(faults: Faults, *, step: float, save: float, every: int, steps: int, seed: int = 0) -> float:
    """The goodput of one run of some steps, with faults drawn at random, those during a recovery included."""
    draw = random.Random(seed)

    def next_fault(rate: float) -> float:
        return draw.expovariate(rate) if rate else float("inf")

    now, done, saved = 0.0, 0, 0
    student, teacher = next_fault(faults.student_rate), next_fault(faults.teacher_rate)
    while saved < steps:
        end = now + step + (save if (done + 1) % every == 0 else 0.0)
        first = min(student, teacher)
        if end <= first:
            now, done = end, done + 1
            if done % every == 0:
                saved = done
            continue
        if student <= teacher:
            now, done = student + faults.student_recovery, saved
            student = now + next_fault(faults.student_rate)
        else:  # the step goes on where it was
            waited = faults.teacher_recovery
            now += waited
            student += waited if student > teacher else 0.0
            teacher += waited + next_fault(faults.teacher_rate)
    return saved * step / now
