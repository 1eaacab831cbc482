"""The entropy coder: rANS over adaptive models of 16 symbols, compiled by Numba. Imported only if it is used.

A block's symbols are coded by two states of 63 bits, which share one stream of 32-bit words: state 0 codes ids, state 1
log-probabilities, so that a processor can work on both at once. Probabilities have 15 bits. A model keeps the
cumulative frequencies of its symbols and moves them towards every symbol that was coded, by 1/8 at first, and by 1/128
from the 25th symbol on. All of this is integer arithmetic: it is the same on every machine.

The decoder reads forwards. rANS encodes backwards, so the encoder first runs the models forwards and records every
symbol's interval, and `finish` then codes the records from the last to the first.

A model is a row of six int64, because four frequencies in one word are searched and moved together: Numba does not
vectorise loops that are this short. With c[i] the sum of the frequencies of the symbols below i, the lane i % 4 of word
i // 4, 16 bits wide, holds c[i] − i, which is from 0 to 2^15 − 16. The difference to c[i] keeps every frequency at 1 or
more. Word 4 holds the constant c[16] − 16 = 2^15 − 16, and word 5 the number of symbols so far, at most `_GROWN`.

Legend: M models, T symbols coded so far, W words.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.extending import intrinsic

LOW = 1 << 31
"""A state lies in [LOW, LOW · 2^32)."""
_TOP = (1 << 15) - 16
_ONES = 0x0001_0001_0001_0001
"""1 in each of the four lanes."""
_HIGH = -0x7FFF_7FFF_7FFF_8000
"""The highest bit of each lane."""
_PLACES = tuple(0x0003_0002_0001_0000 + 4 * w * _ONES for w in range(4))
"""i in the lane of c[i], by word."""
_RATES = np.repeat(np.arange(3, 8), [6, 6, 6, 6, 1])
"""By the number of symbols so far: a frequency moves by 1/2^rate."""
_GROWN = len(_RATES) - 1
_KEPT = np.array([(0xFFFF >> int(rate)) * _ONES for rate in _RATES], np.int64)
"""Likewise: the bits of each lane that are its own after the word was shifted by the rate."""
_ABOVE = [[sum(1 << 16 * j for j in range(4) if 4 * w + j > symbol) for w in range(4)] for symbol in range(16)]
_RISE = (_TOP >> _RATES)[:, None, None] * np.array(_ABOVE, np.int64)
"""Likewise, by symbol and word: what is added to the lanes of the c[i] with i > symbol."""


IDS, VALUES = 0, 1
"""The states."""


def _digest() -> str:
    """SHA-256 of the sources of this folder."""
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


SOURCES = _digest()
compiled = numba.njit(nogil=True)
"""Compiles a function on its first call, without the GIL."""
inlined = numba.njit(nogil=True, forceinline=True)
"""Like `compiled`, and makes it part of every function that calls it."""


def cached(function: Any) -> Any:
    """The function compiled on its first call; the result is kept on disk if Numba finds a writable folder for that.

    Numba compiles a cached function again when its own file or its closure changes, but not when a function does that
    it calls from another file. An encoder and a decoder of different versions would not understand each other.
    Functions that are cached therefore have `SOURCES` in their closure.
    """
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return compiled(function)


@intrinsic
def _popcount(_: Any, x: Any) -> Any:
    """The number of bits of an int64 that are set: one instruction, which Numba has no function for."""
    return x(x), lambda _context, builder, _signature, arguments: builder.ctpop(arguments[0])


@inlined
def _adapt(models, m, symbol):  # type: ignore[no-untyped-def]
    """Moves the frequencies of model m towards `symbol`: x = c[i] − i by x/2^rate down, or up to 2^15 − 16 likewise."""
    age = models[m, 5]
    models[m, 5] = min(age + 1, _GROWN)
    rate, kept = _RATES[age], _KEPT[age]
    models[m, 0] += _RISE[age, symbol, 0] - (models[m, 0] >> rate & kept)
    models[m, 1] += _RISE[age, symbol, 1] - (models[m, 1] >> rate & kept)
    models[m, 2] += _RISE[age, symbol, 2] - (models[m, 2] >> rate & kept)
    models[m, 3] += _RISE[age, symbol, 3] - (models[m, 3] >> rate & kept)


@inlined
def _below(models, m, i):  # type: ignore[no-untyped-def]
    """c[i] of model m, the sum of the frequencies of the symbols below i, for i from 0 to 16."""
    return (models[m, i >> 2] >> ((i & 3) << 4) & 0x7FFF) + i


@inlined
def _find(models, m, slot):  # type: ignore[no-untyped-def]
    """The symbol of model m with c[symbol] <= slot < c[symbol + 1].

    A lane of slot + 2^15 − c[i] has its highest bit set if c[i] <= slot; the symbol is the number of these, less one.
    The bits of the four words are moved side by side to be counted at once.
    """
    slots = slot * _ONES | _HIGH
    n = (slots - models[m, 0] - _PLACES[0]) >> 3 & _ONES << 12
    n |= (slots - models[m, 1] - _PLACES[1]) >> 2 & _ONES << 13
    n |= (slots - models[m, 2] - _PLACES[2]) >> 1 & _ONES << 14
    n |= (slots - models[m, 3] - _PLACES[3]) & _HIGH
    return (_popcount(n) - 1) & 15  # the mask tells the compiler that it is no negative index


@compiled
def put(state, models, m, symbol, records, t):  # type: ignore[no-untyped-def]
    """Records `symbol`, 0 to 15, in model m as record t, to be coded by that state; returns t + 1."""
    low = _below(models, m, symbol)
    records[t] = (state << 32) | (low << 16) | (_below(models, m, symbol + 1) - low)
    _adapt(models, m, symbol)
    return t + 1


@compiled
def put_bits(state, value, count, records, t):  # type: ignore[no-untyped-def]
    """Records the `count` low bits of `value` with equal probabilities, the upper ones first; returns the next t.

    Up to 15 bits are one record, up to 30 two, and none need no record.
    """
    if count > 15:
        t = put_bits(state, value >> 15, count - 15, records, t)
        value, count = value & 32767, 15
    if count > 0:
        records[t] = (state << 32) | (value << (15 - count) << 16) | (1 << (15 - count))
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
        record = records[t]
        low, frequency = (record >> 16) & 32767, record & 65535
        x = x1 if record >> 32 else x0
        if x >= frequency << 48:
            at -= 1
            words[at] = x & 0xFFFFFFFF
            x >>= 32
        x = ((x // frequency) << 15) + x % frequency + low
        if record >> 32:
            x1 = x
        else:
            x0 = x
    return len(words) - at, x0, x1


@inlined
def _refilled(x, words, at):  # type: ignore[no-untyped-def]
    """(x, at): the state with the next word, if it has fallen below `LOW`. Behind the last word zeros are read."""
    if x < LOW:
        word = np.int64(0)
        if at < len(words):
            word = np.int64(words[at])
        x = (x << 32) | word
        at += 1
    return x, at


@inlined
def take(models, m, x, words, at):  # type: ignore[no-untyped-def]
    """(symbol, x, at): decodes a symbol of model m from state x. `at` counts the words that were read."""
    slot = x & 32767
    symbol = _find(models, m, slot)
    low = _below(models, m, symbol)
    x, at = _refilled((_below(models, m, symbol + 1) - low) * (x >> 15) + slot - low, words, at)
    _adapt(models, m, symbol)
    return symbol, x, at


@inlined
def take_bits(count, x, words, at):  # type: ignore[no-untyped-def]
    """(value, x, at): decodes `count` bits, 0 to 15, from state x."""
    slot = x & 32767
    value = slot >> (15 - count)
    x, at = _refilled(((x >> 15) << (15 - count)) + slot - (value << (15 - count)), words, at)
    return value, x, at
