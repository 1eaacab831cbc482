"""Goodput by formula against the same run with faults drawn at random."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from statistics import fmean

import pytest

from distill_rl.scaling.faults import HOUR, LLAMA_3, Faults, best_interval, goodput, simulate

FAULTS = Faults(per_gpu_hour=0.01, student_gpus=64, teacher_gpus=64, student_recovery=120.0, teacher_recovery=60.0)


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
