"""Goodput by formula against the same run with faults drawn at random."""

from __future__ import annotations

import random
from dataclasses import replace
from math import sqrt
from statistics import fmean

import pytest

from distill_rl.scaling.model import HOUR, LLAMA_3, Faults, best_interval, goodput

FAULTS = Faults(per_gpu_hour=0.01, student_gpus=64, teacher_gpus=64, student_recovery=120.0, teacher_recovery=60.0)


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


def test_the_published_rate():
    """Llama 3's cluster was interrupted every three hours."""
    assert pytest.approx(3.09, abs=0.01) == 1 / (LLAMA_3 * 16_384)


@pytest.mark.parametrize("every", [5, 50, 200])
def test_the_formula_is_the_mean_of_random_runs(every):
    runs = [simulate(FAULTS, step=10.0, save=20.0, every=every, steps=10_000, seed=seed) for seed in range(12)]
    assert goodput(FAULTS, step=10.0, save=20.0, every=every) == pytest.approx(fmean(runs), rel=0.03)


def test_without_faults_only_saving_costs():
    safe = replace(FAULTS, per_gpu_hour=0.0)
    assert goodput(safe, step=10.0, save=20.0, every=10) == pytest.approx(100 / 120)
    assert simulate(safe, step=10.0, save=20.0, every=10, steps=100) == pytest.approx(100 / 120)
    assert best_interval(safe, step=10.0, save=20.0) == 1_000_000


def test_a_teachers_fault_loses_no_step():
    teachers = replace(FAULTS, student_gpus=0)
    rate = 0.01 * 64 / HOUR
    assert goodput(teachers, step=10.0, save=0.0, every=10) == pytest.approx(1 / (1 + rate * 60))


def test_the_best_interval_is_the_best_and_near_the_rule_of_thumb():
    best = best_interval(FAULTS, step=10.0, save=20.0)
    assert best * 10 == pytest.approx(sqrt(2 * 20 / FAULTS.student_rate), rel=0.3)
    at_best = goodput(FAULTS, step=10.0, save=20.0, every=best)
    for every in range(max(1, best // 4), best * 4):
        assert goodput(FAULTS, step=10.0, save=20.0, every=every) <= at_best + 1e-4


def test_a_run_that_cannot_get_from_one_checkpoint_to_the_next():
    assert goodput(replace(FAULTS, student_gpus=10_000_000), step=10.0, save=20.0, every=10_000) == 0.0
