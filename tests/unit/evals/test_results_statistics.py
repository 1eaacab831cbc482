from __future__ import annotations

import numpy as np
import pytest

from distill_rl.evals.results import paired_bootstrap, wilson


@pytest.mark.parametrize(
    ("score", "count", "low", "high"),
    [
        (0.0, 0, 0.0, 1.0),
        (0.0, 10, 0.0, 0.2775),
        (1.0, 10, 0.7225, 1.0),
        (0.5, 100, 0.4038, 0.5962),
        (0.1, 50, 0.0435, 0.2136),
    ],
)
def test_wilson_intervals_match_the_published_formula(score: float, count: int, low: float, high: float) -> None:
    assert wilson(score, count) == pytest.approx((low, high), abs=1e-4)


def naive(differences: list[float], resamples: int) -> tuple[float, float]:
    """The bootstrap as it is defined: items drawn one by one."""
    values, generator = np.array(differences), np.random.default_rng(1)
    means = [generator.choice(values, len(values)).mean() for _ in range(resamples)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


@pytest.mark.parametrize(
    "differences",
    [
        [1.0] * 30 + [-1.0] * 12 + [0.0] * 158,
        [0.0] * 95 + [1.0] * 5,
        list(np.random.default_rng(3).normal(0.1, 0.4, 150)),
    ],
    ids=["right or wrong", "few", "all distinct"],
)
def test_drawing_counts_is_drawing_items(differences: list[float]) -> None:
    spread = float(np.std(differences)) / len(differences) ** 0.5
    # Means of n right or wrong items lie 1 / n apart.
    room = 0.15 * spread + 1.001 / len(differences)
    assert paired_bootstrap(differences) == pytest.approx(naive(differences, 10_000), abs=room)


def test_interval_width_matches_normal_approximation() -> None:
    differences = [1.0] * 600 + [-1.0] * 400 + [0.0] * 1000
    half = 1.96 * float(np.std(differences)) / len(differences) ** 0.5
    assert paired_bootstrap(differences) == pytest.approx((0.1 - half, 0.1 + half), abs=0.05 * half)


def test_interval_coverage_is_95_percent() -> None:
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        low, high = paired_bootstrap(generator.choice([1.0, 0.0, -1.0], 200, p=[0.2, 0.7, 0.1]), resamples=1000)
        held += low <= 0.1 <= high
    assert 0.92 <= held / 400 <= 0.98, "95 %, with three standard errors of 400 trials"


def test_two_opposite_items_give_the_widest_interval() -> None:
    assert paired_bootstrap([1.0, -1.0]) == (-1.0, 1.0)


def test_equal_differences_give_an_empty_interval() -> None:
    assert paired_bootstrap([0.0] * 9) == (0.0, 0.0)
    assert paired_bootstrap([1.0]) == (1.0, 1.0)


def test_interval_depends_on_seed_not_on_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = list(np.random.default_rng(5).normal(size=100))
    whole = paired_bootstrap(differences, seed=1)
    assert paired_bootstrap(differences, seed=1) == whole
    assert paired_bootstrap(differences, seed=2) != whole
    monkeypatch.setattr("distill_rl.evals.results._CHUNK", 333)
    assert paired_bootstrap(differences, seed=1) == pytest.approx(whole, abs=1e-12)
