"""How far a score, and the difference of two, may be off because other questions could have been asked."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
_CHUNK = 1 << 22
"""items that are drawn at once"""
_COUNT_COST = 8
"""what drawing a count costs, in items drawn"""


def wilson(score: float, count: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion (Wilson 1927, JASA 22, eq. for p); (0, 1) without observations."""
    if count == 0:
        return 0.0, 1.0
    z = 1.959963984540054
    scale = 1 + z * z / count
    center = (score + z * z / (2 * count)) / scale
    half = z * math.sqrt(score * (1 - score) / count + z * z / (4 * count * count)) / scale
    # At the ends the exact bounds are 0 and 1, which rounding misses.
    return (center - half if score > 0 else 0.0), (center + half if score < 1 else 1.0)


def paired_bootstrap(differences: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of the mean difference between two models that answered the same items.

    Items are drawn with replacement (Efron 1979, Ann. Statist. 7). Both models keep their answers to an item together,
    so that items which are hard for both do not widen the interval.

    Args:
        differences: score of the one minus score of the other, per item; at least one.
        seed: the same one gives the same interval.

    Returns:
        (low, high). Where all items differ alike the two are equal: the items say nothing about the spread.
    """
    values = np.asarray(differences, dtype=np.float64)
    assert len(values) > 0, "no items"
    generator, total = np.random.default_rng(seed), len(values)
    rows = max(1, _CHUNK // total)
    sizes = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    distinct, counts = np.unique(values, return_counts=True)
    # Drawing items and drawing how often each distinct difference occurs among them is the same. Where items are right
    # or wrong there are three of those, and the counts are drawn in a hundredth of the time.
    if _COUNT_COST * len(distinct) < total:
        means = [generator.multinomial(total, counts / total, size=size) @ distinct / total for size in sizes]
    else:
        means = [values[generator.integers(total, size=(size, total), dtype=np.int32)].mean(axis=1) for size in sizes]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)
