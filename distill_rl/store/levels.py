"""Log-probabilities as integer levels, which are finer where the probability is larger.

What an error of a log-probability costs a KD loss is proportional to the probability, so probable tokens get small
steps. Level 0 is log-probability 0, and levels rise as probabilities fall. Everything that the decoder computes from
levels is integer arithmetic or a table of exactly representable floats, so it is the same on every machine.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

SEGMENTS = ((0, 128), (2, 64), (4, 32), (6, 16), (8, 8))
"""(least −logprob, levels per unit) of each segment; the last one ends at `LEAST`."""
LEAST = 1000
"""The largest −logprob with a level. What lies beyond is probability 0, even in fp64, and becomes −inf."""

_STARTS = [start for start, _ in SEGMENTS] + [LEAST]
_FIRST = [0]
for (_start, _density), _end in zip(SEGMENTS, _STARTS[1:]):
    _FIRST.append(_FIRST[-1] + (_end - _start) * _density)
MINUS_INFINITY = _FIRST[-1] + 1
"""The level of log-probability −inf."""
NOT_A_NUMBER = MINUS_INFINITY + 1
"""The level of NaN, which only a label's log-probability may be."""
COUNT = NOT_A_NUMBER + 1
"""Number of levels; a level has 14 bits."""
MASS_BITS = 30
"""Masses of levels are integers in units of 2^-30."""


def to_levels(logprobs: np.ndarray) -> np.ndarray:
    """The nearest level of each log-probability, int32 in the same shape.

    Values above 0 count as 0, values below −1000 as −inf; NaN has its own level.

    Args:
        logprobs: any float.
    """
    depth = np.maximum(-logprobs.astype(np.float64), 0)
    nan = np.isnan(depth)
    levels = np.floor(np.interp(np.where(nan, 0, depth), _STARTS, _FIRST) + 0.5).astype(np.int32)
    levels[depth > LEAST] = MINUS_INFINITY
    levels[nan] = NOT_A_NUMBER
    return levels


@cache
def logprob_table() -> np.ndarray:
    """fp32 [COUNT], the log-probability of every level. Finite ones are multiples of 1/128 and exact."""
    depth = np.interp(np.arange(COUNT), _FIRST, _STARTS)
    depth[MINUS_INFINITY], depth[NOT_A_NUMBER] = np.inf, np.nan
    return np.where(depth == 0, 0, -depth).astype(np.float32)


def error_bound(logprobs: Any) -> np.ndarray:
    """The largest absolute error with which a log-probability is stored, fp64 in the same shape.

    Half a step: 1/256 for log-probabilities from −2 to 0, 1/128 to −4, 1/64 to −6, 1/32 to −8, 1/16 to −1000. Lower ones
    become −inf, for which the bound is inf.
    """
    depth = -np.asarray(logprobs, np.float64)
    bound = np.select([depth <= end for end in _STARTS[1:]], [0.5 / density for _, density in SEGMENTS], np.inf)
    return bound


@cache
def mass_table() -> np.ndarray:
    """int64 [COUNT], the probability of every level in units of 2^-30, rounded down; 0 for −inf and NaN.

    Made from powers of e^(−1/128) in integers with 96 fractional bits, so that no machine's `exp` has a say.
    """
    bits, finest = 96, SEGMENTS[0][1]
    one = 1 << bits
    # e^(−1/128) by its series: the terms are (−1/128)^i / i!, and vanish after about 15.
    factor, term, i = 0, one, 0
    while term:
        factor += term if i % 2 == 0 else -term
        i += 1
        term //= finest * i
    table = np.zeros(COUNT, np.int64)
    mass, level, density = one, 0, finest
    for (_, here), end in zip(SEGMENTS, _FIRST[1:]):
        while density > here:
            factor, density = factor * factor >> bits, density // 2
        while level < end and mass >> (bits - MASS_BITS):
            table[level] = mass >> (bits - MASS_BITS)
            mass = mass * factor >> bits
            level += 1
    return table
