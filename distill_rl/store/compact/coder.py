"""The entropy coder: rANS over adaptive models of 16 symbols, compiled by Numba. Imported only if it is used.

A block's symbols are coded by two interleaved states of 63 bits, which share one stream of 32-bit words. The coder's
probabilities have 16 bits. A model keeps the cumulative frequencies of its symbols and moves them towards every symbol
that was coded, quickly at first, then by 1/64. All of this is integer arithmetic: it is the same on every machine.

The decoder reads forwards. rANS encodes backwards, so the encoder first runs the models forwards and records every
symbol's interval, and `finish` then codes the records from the last to the first.

Legend: M models, T symbols coded so far, W words.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

ONE = 1 << 16
"""The sum of a model's frequencies."""
LOW = 1 << 31
"""A state lies in [LOW, LOW · 2^32)."""
AGE = 17
"""Column of a model that counts its first symbols; columns 0 to 16 are the cumulative frequencies."""
WIDTH = 18
"""Columns of a model."""
_SLOWEST, _FASTEST, _SYMBOLS_PER_RATE = 6, 3, 6


def compiled(function: Any) -> Any:
    """The function compiled by Numba, on its first call and without the GIL.

    The result is cached on disk if Numba finds a writable folder for that.
    """
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)


@compiled
def adapt(models, m, symbol):  # type: ignore[no-untyped-def]
    """Moves the frequencies of model m towards `symbol`. Every symbol keeps a frequency of at least 1."""
    rate = _SLOWEST
    age = models[m, AGE]
    if age < _SYMBOLS_PER_RATE * (_SLOWEST - _FASTEST):
        rate = _FASTEST + age // _SYMBOLS_PER_RATE
        models[m, AGE] = age + 1
    for i in range(16):
        goal = ONE - 16 + i if i > symbol else i
        models[m, i] += (goal - models[m, i]) >> (rate & 15)


@compiled
def put(models, m, symbol, records, t):  # type: ignore[no-untyped-def]
    """Records `symbol`, 0 to 15, in model m as record t; returns t + 1."""
    low = np.int64(models[m, symbol])
    records[t] = (low << 17) | (models[m, symbol + 1] - low)
    adapt(models, m, symbol)
    return t + 1


@compiled
def put_bits(value, count, records, t):  # type: ignore[no-untyped-def]
    """Records the `count` low bits of `value` with equal probabilities, the upper ones first; returns the next t.

    Up to 16 bits are one record, up to 32 two, and none need no record.
    """
    if count > 16:
        t = put_bits(value >> 16, count - 16, records, t)
        value, count = value & 65535, 16
    if count > 0:
        records[t] = (value << (16 - count) << 17) | (1 << (16 - count))
        t += 1
    return t


@compiled
def finish(records, total, words):  # type: ignore[no-untyped-def]
    """Codes the first `total` records, and returns (number of words, state 0, state 1) with which decoding starts.

    Args:
        words: uint32, room for a word per record; filled from its end.
    """
    x0, x1 = np.int64(LOW), np.int64(LOW)
    at = len(words)
    for t in range(total - 1, -1, -1):
        low, frequency = records[t] >> 17, records[t] & 131071
        x = x1 if t & 1 else x0
        if x >= frequency << 47:
            at -= 1
            words[at] = x & 0xFFFFFFFF
            x >>= 32
        x = ((x // frequency) << 16) + x % frequency + low
        if t & 1:
            x1 = x
        else:
            x0 = x
    return len(words) - at, x0, x1


@compiled
def take(models, m, x0, x1, words, at):  # type: ignore[no-untyped-def]
    """(symbol, x0, x1, at): decodes a symbol of model m from state x0. The states change places.

    Behind the last word zeros are read; `at` still counts them.
    """
    slot = x0 & 65535
    symbol = -1
    for i in range(16):
        symbol += 1 if models[m, i] <= slot else 0
    low = np.int64(models[m, symbol])
    x0 = (models[m, symbol + 1] - low) * (x0 >> 16) + slot - low
    if x0 < LOW:
        word = np.int64(0)
        if at < len(words):
            word = np.int64(words[at])
        x0 = (x0 << 32) | word
        at += 1
    adapt(models, m, symbol)
    return symbol, x1, x0, at


@compiled
def take_bits(count, x0, x1, words, at):  # type: ignore[no-untyped-def]
    """(value, x0, x1, at): decodes `count` bits, at most 16, from state x0. The states change places, unless `count` is 0."""
    if count <= 0:
        return np.int64(0), x0, x1, at
    value = (x0 & 65535) >> (16 - count)
    x0 = ((x0 >> 16) << (16 - count)) + (x0 & 65535) - (value << (16 - count))
    if x0 < LOW:
        word = np.int64(0)
        if at < len(words):
            word = np.int64(words[at])
        x0 = (x0 << 32) | word
        at += 1
    return value, x1, x0, at
