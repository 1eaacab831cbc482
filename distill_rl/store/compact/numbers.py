"""Numbers of any size as symbols of models and bits. Compiled by Numba.

Each `put_…` records what the `take_…` below it decodes. Arguments mean the same as in `coder`.
"""

from __future__ import annotations

import numpy as np

from distill_rl.store.compact.coder import compiled, inlined, put, put_bits, take, take_bits
from distill_rl.store.compact.models import ESCAPE, SIZE_BASE, SIZE_BITS, SIZE_OF, SIZES

_LENGTH = np.array([v.bit_length() for v in range(1024)], np.int64)


@inlined
def short_length(value, most):  # type: ignore[no-untyped-def]
    """The bit length of a number from 0 on, at most `most`, which is at most 10."""
    return min(_LENGTH[min(value, 1023)], most)


@compiled
def bit_length(value):  # type: ignore[no-untyped-def]
    """The bit length of a number from 0 on."""
    length = np.int64(0)
    while value > 1023:
        value >>= 10
        length += 10
    return length + _LENGTH[value]


@compiled
def put_length(state, models, m, value, records, t):  # type: ignore[no-untyped-def]
    """Records a number below 2^15 as its bit length in model m, and the bits below its highest."""
    length = bit_length(value)
    t = put(state, models, m, length, records, t)
    return put_bits(state, value - (1 << length >> 1), length - 1, records, t)


@compiled
def take_length(models, m, x, words, at):  # type: ignore[no-untyped-def]
    """(value, x, at)."""
    length, x, at = take(models, m, x, words, at)
    value, x, at = take_bits(max(length - 1, 0), x, words, at)
    return (np.int64(1) << length >> 1) + value, x, at


@compiled
def put_size(state, models, m, long, value, records, t):  # type: ignore[no-untyped-def]
    """Records a number below 2^15 in model m: in classes below `SIZES`, else an escape and its bit length in `long`."""
    if value < SIZES:
        symbol = SIZE_OF[value]
        t = put(state, models, m, symbol, records, t)
        return put_bits(state, value - SIZE_BASE[symbol], SIZE_BITS[symbol], records, t)
    t = put(state, models, m, ESCAPE, records, t)
    return put_length(state, models, long, value, records, t)


@inlined
def take_size(models, m, long, x, words, at):  # type: ignore[no-untyped-def]
    """(value, x, at)."""
    symbol, x, at = take(models, m, x, words, at)
    if symbol == ESCAPE:
        return take_length(models, long, x, words, at)
    if SIZE_BITS[symbol] == 0:
        return symbol, x, at
    value, x, at = take_bits(SIZE_BITS[symbol], x, words, at)
    return SIZE_BASE[symbol] + value, x, at


@compiled
def put_below(state, value, length, records, t):  # type: ignore[no-untyped-def]
    """Records the bits below the highest of a number of `length` bits, 1 to 31."""
    return put_bits(state, value - (np.int64(1) << (length - 1)), length - 1, records, t)


@inlined
def take_below(length, x, words, at):  # type: ignore[no-untyped-def]
    """(value, x, at)."""
    count = length - 1
    high = np.int64(0)
    if count > 15:
        high, x, at = take_bits(count - 15, x, words, at)
        count = np.int64(15)
    low, x, at = take_bits(count, x, words, at)
    return (np.int64(1) << (length - 1)) + (high << 15) + low, x, at
