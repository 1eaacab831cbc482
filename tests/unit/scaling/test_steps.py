"""The simulated pipeline against what its rules imply, and against measured runs."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from math import exp
from statistics import fmean

import pytest

from distill_rl.scaling.model import Stages, simulate, slowest, step_seconds
from distill_rl.system.environment import ROOT

STAGES = Stages(teacher=2.0, student=1.5)


def test_without_look_ahead_a_step_takes_the_sum():
    assert step_seconds(replace(STAGES, depth=0)) == pytest.approx(3.5)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_with_it_the_longest_stage(depth):
    assert step_seconds(replace(STAGES, depth=depth)) == pytest.approx(2.0)
    assert step_seconds(replace(STAGES, depth=depth, student=4.0)) == pytest.approx(4.0)


def test_a_ring_for_one_batch_undoes_it():
    """The teachers may overwrite their targets only when the student is done with them."""
    assert step_seconds(replace(STAGES, depth=3, ring=1)) == pytest.approx(3.5)


def test_on_shared_gpus_the_work_adds_up():
    assert step_seconds(replace(STAGES, shared=True)) == pytest.approx(3.5, rel=0.005)
    assert step_seconds(replace(STAGES, shared=True, depth=0)) == pytest.approx(3.5)


def test_the_driver_adds_to_the_student_alone():
    assert step_seconds(replace(STAGES, between=0.1)) == pytest.approx(2.0)
    assert step_seconds(replace(STAGES, between=0.7, depth=2)) == pytest.approx(2.2)


def test_steps_end_in_order_and_the_first_waits_for_everything():
    ends = simulate(STAGES, 10)
    assert len(ends) == 10
    assert ends == sorted(ends)
    assert ends[0] == pytest.approx(2.0 + 1.5)


def test_the_slowest_of_many_ranks():
    draw = random.Random(0)
    alone, of_many = ([slowest(draw, 0.1, ranks) for _ in range(4000)] for ranks in (1, 100))
    assert fmean(alone) == pytest.approx(exp(0.1**2 / 2), rel=0.01)
    # The mean of the largest of 100 standard normal numbers is 2.508.
    assert fmean(of_many) == pytest.approx(exp(0.1 * 2.508), rel=0.01)
    assert slowest(draw, 0.0, 100) == 1.0


def test_look_ahead_hides_jitter():
    jittery = replace(STAGES, student=2.0, jitter=0.3)
    steps = [step_seconds(replace(jittery, depth=depth), steps=3000) for depth in (1, 2, 8)]
    assert steps == sorted(steps, reverse=True)
    assert steps[2] < 0.95 * steps[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_measured_runs_are_predicted_within_a_tenth(depth):
    """Step times of `launch/bench.sh pipeline`, from the times of its stages alone."""
    measured = json.loads((ROOT / "docs" / "benchmarks" / "pipeline.json").read_text("utf-8"))
    stages = Stages(measured["stages"]["teacher"], measured["stages"]["student"], depth=depth)
    assert step_seconds(stages) == pytest.approx(measured["depths"][str(depth)]["step"], rel=0.1)
