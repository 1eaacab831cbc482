"""Confidence intervals of a score and of the difference between two scores, over the sampling of the questions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
_CHUNK = 1 << 22
"""Items drawn per block of resamples, to bound memory."""
_COUNT_COST = 8
"""Cost of drawing one multinomial count, in units of drawing one item."""


def wilson(score: float, count: int) -> tuple[float, float]:
    """The 95 % score interval (low, high) of a proportion (Wilson 1927, JASA 22, eq. for p); (0, 1) without
    observations.

    Args:
        score: mean of `count` observations, 0 to 1.
    """
    if count == 0:
        return 0.0, 1.0
    z = 1.959963984540054
    scale = 1 + z * z / count
    center = (score + z * z / (2 * count)) / scale
    half = z * math.sqrt(score * (1 - score) / count + z * z / (4 * count * count)) / scale
    # For scores of 0 and 1 the outer bound is exactly 0 or 1; the formula misses it by a rounding error.
    return (center - half if score > 0 else 0.0), (center + half if score < 1 else 1.0)


def paired_bootstrap(differences: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of the mean difference between two models that answered the same items.

    Items are drawn with replacement (Efron 1979, Ann. Statist. 7). Each draw takes both models' scores on an item, so
    items that are hard for both models do not widen the interval.

    Args:
        differences: per item, the score of one model minus the score of the other; at least one item.
        resamples: how many sets of items are drawn.
        seed: the same seed gives the same interval.

    Returns:
        (low, high); equal if all differences are equal, since the sample then has no spread.
    """
    values = np.asarray(differences, dtype=np.float64)
    assert len(values) > 0, "no items"
    generator, total = np.random.default_rng(seed), len(values)
    block = max(1, _CHUNK // total)
    sizes = [min(block, resamples - start) for start in range(0, resamples, block)]
    distinct, counts = np.unique(values, return_counts=True)
    # The mean of a resample depends only on how often each distinct difference occurs in it, and these counts follow a
    # multinomial distribution. Items that are right or wrong have three distinct differences (-1, 0, 1), so drawing
    # the counts takes a hundredth of the time of drawing the items.
    if _COUNT_COST * len(distinct) < total:
        means = [generator.multinomial(total, counts / total, size=size) @ distinct / total for size in sizes]
    else:
        means = [values[generator.integers(total, size=(size, total), dtype=np.int32)].mean(axis=1) for size in sizes]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)
