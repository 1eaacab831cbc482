"""The `compact` format: a teacher's top-k targets for one piece of text in about a byte per entry.

Imported only if it is used, because its loops are compiled by Numba. docs/store-compact.md has the format. `encode` and
`decode` are header, checksum and arrays around the loops; then come the levels of log-probabilities, the entropy coder and
its models, and the encoder and decoder of a block's rows.

Legend: n tokens of one piece of text, k entries per token; M models, T symbols coded so far, W words.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from functools import cache
from itertools import accumulate
from typing import Any

import numba
import numpy as np
from numba.extending import intrinsic

VERSION = 1
_HEADER = struct.Struct("<IBBHIQQ")
"""CRC-32, version, flags, k, n, state 0, state 1; then 32-bit words, little-endian."""
_COUNTS, _RESTS, _LABELS = 1, 2, 4
_CRC_BYTES = 4
_SYMBOLS_PER_ENTRY, _SYMBOLS_PER_ROW = 9, 12
"""The most symbols of the coder: an id that is new takes 6, a step 3; count, rest and label of a row take 11."""
_MOST_K = (1 << 16) - 1


def encode(
    tokens: np.ndarray, targets: Mapping[str, np.ndarray], *, vocabulary_size: int, mass: float | None = None
) -> bytes:
    """A block with the targets of n tokens.

    Ids and their order are exact; log-probabilities are rounded within `error_bound`. Encoding what `decode` returned
    gives the same bytes.

    Args:
        tokens: int32 [n], the teacher's own token ids. `decode` needs them, too.
        targets: the wire form of `losses.TopKLogprobs`. `ids` int32 [n, k], below `vocabulary_size`, −1 at the end of a
            row for entries that are absent; `logprobs` any float [n, k], descending; and, where they are to be kept,
            `rest_logprob` [n], and `label_logprob` [n], of which any value, NaN too, is accepted.
        vocabulary_size: V.
        mass: keep only the fewest leading entries of each row whose probabilities sum to at least this, at least one,
            and add the others to the rest. None: keep all.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    missing = {"ids", "logprobs"} - set(targets)
    if missing:
        raise ValueError(f"targets: must hold ids and logprobs; {', '.join(sorted(missing))} missing")
    tokens = _as(tokens, "tokens", 1)
    ids, logprobs = _as(targets["ids"], "ids", 2), np.asarray(targets["logprobs"], np.float32)
    n, k = ids.shape
    rest, label = (_optional(targets, name, n) for name in ("rest_logprob", "label_logprob"))
    counts = _counted(tokens, ids, logprobs, rest, vocabulary_size)
    if mass is not None:
        counts, rest = _cut(logprobs, rest, counts, mass)
    levels = to_levels(logprobs)
    rests, labels = (np.empty(0, np.int32) if each is None else to_levels(each) for each in (rest, label))
    has_counts = bool((counts < k).any())
    room = n * (k * _SYMBOLS_PER_ENTRY + _SYMBOLS_PER_ROW)
    records, words = np.empty(room, np.int64), np.empty(room, np.uint32)
    used, x0, x1 = encode_rows(
        tokens, ids, levels, counts, rests, labels, has_counts, mass_table(), FRESH_MODELS.copy(), records, words
    )
    flags = _COUNTS * has_counts + _RESTS * (rest is not None) + _LABELS * (label is not None)
    body = _HEADER.pack(0, VERSION, flags, k, n, x0, x1)[_CRC_BYTES:] + words[room - used :].astype("<u4").tobytes()
    return struct.pack("<I", _checksum(tokens, vocabulary_size, body)) + body


def decode(
    tokens: np.ndarray, block: bytes | memoryview | np.ndarray, *, vocabulary_size: int
) -> dict[str, np.ndarray]:
    """The targets of a block: `ids` int32 [n, k], `logprobs` fp32 [n, k], and those fp32 [n] that were encoded.

    Entries that are absent have id −1 and log-probability −inf.

    Args:
        tokens: int32 [n], those that the block was encoded with.
        block: as `encode` returned it.
        vocabulary_size: that which the block was encoded with.

    Raises:
        ValueError: the block is damaged, or belongs to other tokens or another vocabulary.
    """
    tokens = _as(tokens, "tokens", 1)
    data = bytes(block)
    if len(data) < _HEADER.size or len(data) % 4:
        raise ValueError(f"block: must have {_HEADER.size} bytes and then words of 4; has {len(data)}")
    crc, version, flags, k, n, x0, x1 = _HEADER.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"block: must have version {VERSION}; has {version}")
    if n != len(tokens):
        raise ValueError(f"block: must have a row per token; has {n} rows for {len(tokens)} tokens")
    if crc != _checksum(tokens, vocabulary_size, data[_CRC_BYTES:]):
        raise ValueError("block: its checksum is wrong; it is damaged, or was encoded with other tokens")
    low, high = LOW, LOW << 32
    if not (low <= x0 < high and low <= x1 < high and k >= 1 and flags < 8):
        raise ValueError("block: its header is impossible")
    named: dict[str, Any] = {
        "ids": np.empty((n, k), np.int32),
        "logprobs": np.empty((n, k), np.float32),
        "rest_logprob": np.empty(n, np.float32),
        "label_logprob": np.empty(n, np.float32),
    }
    has_counts, has_rests, has_labels = (bool(flags & flag) for flag in (_COUNTS, _RESTS, _LABELS))
    words = np.frombuffer(data, "<u4", offset=_HEADER.size).astype(np.uint32)
    states = np.array([x0, x1], np.int64)
    parts, tables = (has_counts, has_rests, has_labels), (mass_table(), logprob_table())
    at = decode_rows(tokens, vocabulary_size, parts, tables, FRESH_MODELS.copy(), words, states, *named.values())
    # The encoder starts from LOW with both states, so the decoder ends there, having read every word.
    if at != len(words) or (states != low).any():
        raise ValueError("block: its contents are impossible")
    optional = {"rest_logprob": has_rests, "label_logprob": has_labels}
    return {name: array for name, array in named.items() if optional.get(name, True)}


def _checksum(tokens: np.ndarray, vocabulary_size: int, body: bytes) -> int:
    """CRC-32 of the vocabulary's size as 8 bytes, the tokens as 4 each, and the block behind its checksum."""
    known = struct.pack("<Q", vocabulary_size) + tokens.astype("<i4").tobytes()
    return zlib.crc32(body, zlib.crc32(known))


def _as(array: np.ndarray, name: str, dimensions: int) -> np.ndarray:
    """A copy of the array in int32: contiguous, aligned and writable, so that Numba compiles for one kind of array."""
    given = np.asarray(array)
    if given.ndim != dimensions or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"{name}: must be integers in {dimensions} dimensions; got {given.dtype} {list(given.shape)}")
    copy = np.array(given, np.int32, order="C")
    if given.dtype != np.int32 and (copy != given).any():
        raise ValueError(f"{name}: must fit into int32; got {given.min()} to {given.max()}")
    return copy


def _optional(targets: Mapping[str, np.ndarray], name: str, n: int) -> np.ndarray | None:
    """fp32 [n] of that name, or None if there is none. Raises ValueError for another shape."""
    if name not in targets:
        return None
    given = np.asarray(targets[name], np.float32)
    if given.shape != (n,):
        raise ValueError(f"{name}: must have shape [{n}]; got {list(given.shape)}")
    return given


def _counted(
    tokens: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, rest: np.ndarray | None, vocabulary_size: int
) -> np.ndarray:
    """int32 [n], the number of present entries of each row."""
    n, k = ids.shape
    if len(tokens) != n or logprobs.shape != (n, k):
        raise ValueError(f"ids, logprobs: must have shape [{len(tokens)}, k]; got {[n, k]} and {list(logprobs.shape)}")
    if not 1 <= k <= _MOST_K:
        raise ValueError(f"ids: must have 1 to {_MOST_K} entries per row; got {k}")
    if not 1 <= vocabulary_size <= 1 << 31:
        raise ValueError(f"vocabulary_size: must be from 1 to 2^31; got {vocabulary_size}")
    present = ids >= 0
    counts = present.sum(1, dtype=np.int32)
    if (ids < -1).any() or (ids >= vocabulary_size).any():
        raise ValueError(f"ids: must be from 0 to {vocabulary_size - 1}, or -1 for an absent entry")
    if (counts < 1).any() or (present != (np.arange(k) < counts[:, None])).any():
        raise ValueError("ids: must begin with an entry in each row; absent entries stand at its end")
    if not (logprobs[:, :-1] >= logprobs[:, 1:]).all() or np.isnan(logprobs[:, 0]).any():
        raise ValueError("logprobs: must descend along each row, without NaN")
    if rest is not None and np.isnan(rest).any():
        raise ValueError("rest_logprob: must not be NaN")
    return counts


def _cut(
    logprobs: np.ndarray, rest: np.ndarray | None, counts: np.ndarray, mass: float
) -> tuple[np.ndarray, np.ndarray | None]:
    """(counts, rest) with the fewest leading entries that hold `mass`; the rest gains what the others held."""
    if not 0 < mass <= 1:
        raise ValueError(f"mass: must be above 0 and at most 1; got {mass}")
    place = np.arange(logprobs.shape[1])
    present = place < counts[:, None]
    probabilities = np.where(present, np.exp(logprobs.astype(np.float64)), 0)
    kept = np.minimum(counts, 1 + (np.cumsum(probabilities, 1) < mass).sum(1)).astype(np.int32)
    if rest is not None:
        dropped = np.where(place < kept[:, None], 0, probabilities).sum(1)
        with np.errstate(divide="ignore"):
            changed = np.log(np.exp(rest.astype(np.float64)) + dropped)
        rest = np.where(kept < counts, changed, rest).astype(np.float64)
    return kept, rest


# Log-probabilities as integer levels, which are finer where the probability is larger.
#
# What an error of a log-probability costs a KD loss is proportional to the probability, so probable tokens get small
# steps. Level 0 is log-probability 0, and levels rise as probabilities fall. Everything that the decoder computes from
# levels is integer arithmetic or a table of exactly representable floats, so it is the same on every machine.

LEAST = 1000
"""The largest −logprob with a level. What lies beyond is probability 0, even in fp64, and becomes −inf."""
SEGMENTS = ((0, 2, 128), (2, 4, 64), (4, 6, 32), (6, 8, 16), (8, LEAST, 8))
"""(least and greatest −logprob, levels per unit) of each segment."""

_STARTS = [*(start for start, _, _ in SEGMENTS), LEAST]
_FIRST = [0, *accumulate((end - start) * density for start, end, density in SEGMENTS)]
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
    return np.select([depth <= end for _, end, _ in SEGMENTS], [0.5 / density for _, _, density in SEGMENTS], np.inf)


@cache
def mass_table() -> np.ndarray:
    """int64 [COUNT], the probability of every level in units of 2^-30, rounded down; 0 for −inf and NaN.

    Made from powers of e^(−1/128) in integers with 96 fractional bits, so that no machine's `exp` has a say.
    """
    bits, finest = 96, SEGMENTS[0][2]
    one = 1 << bits
    # e^(−1/128) by its series: the terms are (−1/128)^i / i!, and vanish after about 15.
    factor, term, i = 0, one, 0
    while term:
        factor += term if i % 2 == 0 else -term
        i += 1
        term //= finest * i
    table = np.zeros(COUNT, np.int64)
    mass, level, density = one, 0, finest
    for i, (_, _, here) in enumerate(SEGMENTS, start=1):
        while density > here:
            factor, density = factor * factor >> bits, density // 2
        while level < _FIRST[i] and mass >> (bits - MASS_BITS):
            table[level] = mass >> (bits - MASS_BITS)
            mass = mass * factor >> bits
            level += 1
    return table


# The entropy coder: rANS over adaptive models of 16 symbols, compiled by Numba.
#
# A block's symbols are coded by two states of 63 bits, which share one stream of 32-bit words: state 0 codes ids, state 1
# log-probabilities, so that a processor can work on both at once. Probabilities have 15 bits. A model keeps the
# cumulative frequencies of its symbols and moves them towards every symbol that was coded, by 1/8 at first, and by 1/128
# from the 25th symbol on. All of this is integer arithmetic: it is the same on every machine.
#
# The decoder reads forwards. rANS encodes backwards, so the encoder first runs the models forwards and records every
# symbol's interval, and `finish` then codes the records from the last to the first.
#
# A model is a row of six int64, because four frequencies in one word are searched and moved together: Numba does not
# vectorise loops that are this short. With c[i] the sum of the frequencies of the symbols below i, the lane i % 4 of word
# i // 4, 16 bits wide, holds c[i] − i, which is from 0 to 2^15 − 16. The difference to c[i] keeps every frequency at 1 or
# more. Word 4 holds the constant c[16] − 16 = 2^15 − 16, and word 5 the number of symbols so far, at most `_GROWN`.

# The coder's models: which there are, and what their symbols mean.
#
# Every block starts with equally frequent symbols. Frequencies learnt from real targets would save 1 % of a block of 64
# tokens, and less of longer ones.

# Numbers of any size in 16 symbols: below 200 the class, with the place in it as bits; from there on the escape.
SIZE_BASE = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 40, 72, 200], np.int64)
"""The least number of each class."""
SIZE_BITS = np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 4, 5, 7, 0], np.int64)
"""Bits of the place in a class. The last class, of 2^7 numbers, would reach to 199."""
SIZES = 200
SIZE_OF = np.repeat(np.arange(15), 1 << SIZE_BITS[:15])
"""The class of each number below `SIZES`."""
ESCAPE = 15

# Where each kind of model begins. What a kind's models are chosen by is in `index_model`, `step_model` and `rest_model`.
INDEX = 0
"""2 · 7 · 4 · 6 models: the index of an id among the candidates, by classes; `ESCAPE`: it is none"""
STEP = INDEX + 2 * 7 * 4 * 6
"""7 · 9: levels between neighbours in a row, by classes"""
KNOWN = STEP + 7 * 9
"""2: bit length, less one, of 1 + the place of an id that was no candidate before; `NEW`: it is new"""
NEW_LENGTH = KNOWN + 2
"""1: bit length, less 3, of a new id"""
FIRST = NEW_LENGTH + 1
"""1: the level of a row's first entry by 32; 15: `FIRST_LENGTH` follows"""
FIRST_FINE = FIRST + 1
"""15, by the symbol of `FIRST`: the level's next four bits; one more follows"""
FIRST_LENGTH = FIRST_FINE + 15
"""1: bit length of a first level less 480"""
STEP_LENGTH = FIRST_LENGTH + 1
"""1: bit length of a step of 200 or more"""
ROW_FULL = STEP_LENGTH + 1
"""1: whether the row has k entries (`ALL`) or fewer (`FEWER`)"""
COUNT_SIZE = ROW_FULL + 1
"""1: number of entries less one, by classes"""
COUNT_LENGTH = COUNT_SIZE + 1
"""1: its bit length, if it is 200 or more"""
REST = COUNT_LENGTH + 1
"""16, by the mass left: difference of the rest's level from the guess, folded; `REST_FAR`, `REST_NOTHING`"""
REST_LENGTH = REST + 16
"""1: bit length of half of a folded difference"""
LABEL = REST_LENGTH + 1
"""2, by whether the next token is in the row: `EQUAL` to its level, `BELOW` the row's last level, or `ANY`"""
LABEL_LENGTH = LABEL + 2
"""1: bit length of the label's level less the row's last level"""
MODELS = LABEL_LENGTH + 1

LONG_FIRST = 480
"""From this level on, a row's first level is coded by its bit length."""
MISSED_INDEX = 16
"""What an id that is no candidate counts as in the running mean of indices."""
NEW = 15
ALL, FEWER = 0, 1
REST_FAR, REST_NOTHING = 14, 15
EQUAL, BELOW, ANY = 0, 1, 2


_FIRST_LANES = [i * ((1 << 11) - 1) for i in range(16)]
_FIRST_WORDS = [sum(_FIRST_LANES[4 * w + j] << 16 * j for j in range(4)) for w in range(4)]
FRESH_MODELS = np.tile(np.array([*_FIRST_WORDS, (1 << 15) - 16, 0], np.int64), (MODELS, 1))
"""int64 [MODELS, 6], of which every block gets a copy: all symbols equally frequent, none coded yet."""
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


compiled = numba.njit(nogil=True)
"""Compiles a function on its first call, without the GIL."""
inlined = numba.njit(nogil=True, forceinline=True)
"""Like `compiled`, and makes it part of every function that calls it."""


def cached(function: Any) -> Any:
    """The function compiled on its first call; the result is kept on disk if Numba finds a writable folder for that.

    Numba compiles it again when this file changes. So all that it calls must be in this file: an encoder and a decoder of
    different versions would not understand each other.
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
    """The symbol of model m with c[symbol] <= slot < c[symbol + 1]."""
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


# Numbers of any size as symbols of models and bits. Compiled by Numba.
#
# Each `put_…` records what the `take_…` below it decodes.

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


# In which context an entry is coded, and the lists that ids are looked up in. Compiled by Numba.
#
# Entries of rows, and so candidates, are int64: level · 2^32 + id.


@inlined
def index_model(same, r, candidates, head, end, recent):  # type: ignore[no-untyped-def]
    """The model of an id's index among the candidates.

    Args:
        same: 1 if the candidates followed the same token, else 0.
        r: place in the row.
        candidates: those from `head` to `end` are left. How far apart the levels of the first two are is a context.
        recent: a running mean of the row's indices, times 4.
    """
    near = np.int64(0)
    if end - head > 1:
        gap = (candidates[head + 1] >> 32) - (candidates[head] >> 32)
        near = np.int64(gap >= 1) + np.int64(gap >= 3) + np.int64(gap >= 9)
    return INDEX + ((same * 7 + short_length(r, 6)) * 4 + near) * 6 + short_length(recent, 5)


@inlined
def step_model(r, recent):  # type: ignore[no-untyped-def]
    """The model of the step from place r − 1 to place r; `recent` is a running mean of the row's steps."""
    return STEP + short_length(r, 6) * 9 + short_length(recent, 8)


@compiled
def rest_model(left):  # type: ignore[no-untyped-def]
    """The model of the rest, given the mass that the row leaves."""
    return REST + (bit_length(max(left, 0)) >> 1)


@compiled
def guessed_rest(left, masses):  # type: ignore[no-untyped-def]
    """The least level whose mass is at most that which the row leaves."""
    low, high = np.int64(0), np.int64(MINUS_INFINITY)  # masses[high] is 0
    while low < high:
        middle = (low + high) >> 1
        if masses[middle] <= max(left, 0):
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def same_token(tokens):  # type: ignore[no-untyped-def]
    """int32 [n]: the last row before each with the same token, or -1."""
    n = len(tokens)
    size = 4
    while size < 2 * n:
        size *= 2
    slots, previous = np.full(size, -1, np.int32), np.full(n, -1, np.int32)
    for i in range(n):
        at = slot_of(tokens[i], size)
        while slots[at] >= 0 and tokens[slots[at]] != tokens[i]:
            at = (at + 1) & (size - 1)
        previous[i] = slots[at]
        slots[at] = i
    return previous


@inlined
def slot_of(item, size):  # type: ignore[no-untyped-def]
    """Where to look first for an item in a hash table of `size` slots, a power of two."""
    return (np.int64(item) * 40503 >> 3) & (size - 1)


@compiled
def fill(candidates, i, previous, counts, entries):  # type: ignore[no-untyped-def]
    """Fills in row i's candidates; returns their number, and 1 if they followed the same token, else 0.

    They are the entries of the last row with the same token, or else of the row above.
    """
    same = np.int64(previous[i] >= 0)
    source = np.int64(previous[i]) if same else np.int64(i - 1)
    if source < 0:
        return np.int64(0), same
    end = np.int64(counts[source])
    for r in range(end):
        candidates[r] = entries[source, r]
    return end, same


@inlined
def remove(candidates, head, index):  # type: ignore[no-untyped-def]
    """Takes the candidate at `head` + `index` out and returns it; the others are those from `head` + 1 on.

    The array has room for four more than there are.
    """
    # Most indices are below 4. For these there is no loop, whose end a processor could not predict.
    a, b, c, d = candidates[head], candidates[head + 1], candidates[head + 2], candidates[head + 3]
    candidates[head + 1] = a if index > 0 else b
    candidates[head + 2] = b if index > 1 else c
    candidates[head + 3] = c if index > 2 else d
    taken = (a if index < 1 else b) if index < 2 else (c if index < 3 else d)
    for q in range(head + 4, head + index + 1):
        taken, candidates[q] = candidates[q], taken
    return taken


@inlined
def promote(order, p):  # type: ignore[no-untyped-def]
    """Moves what is at place p of `order` forward by a quarter, and returns its new place.

    It changes places with what was there. What is promoted often comes to the front.
    """
    f = 3 * p >> 2
    order[p], order[f] = order[f], order[p]
    return f


# The encoder of a block's rows: what is coded, and in which order. Compiled by Numba and imported only if it is used.
#
# A row's ids are guessed from an earlier row: the last one after the same token, or else the row above. Its list, in its
# order, are the candidates. Each id is coded as its index among the candidates that are left, and taken out of them. As
# related rows put ids in similar orders, most indices are small. An id that is no candidate is looked up among those to
# which that happened before in the block, in a list in which the frequent ones come forward; a new one is written out.
#
# Log-probabilities are coded as steps from level to level along the row. The rest's level is coded as its difference from
# the mass that the row's levels leave. The label's usually costs nothing: the next token is known, and so is its place in
# the row.
#
# Ids are independent of levels but for the candidates' levels, which are those of earlier rows.


@cached
def encode_rows(tokens, ids, levels, counts, rests, labels, has_counts, masses, models, records, words):  # type: ignore[no-untyped-def]
    """Codes a block; returns (number of words, state 0, state 1).

    Args:
        tokens: int32 [n].
        ids, levels: int32 [n, k]; read up to `counts` [n], of which each is at least 1.
        rests, labels: levels, int32 [n], or empty: not part of the block.
        has_counts: whether rows may have fewer than k entries.
        masses: `mass_table`.
        models: int64 [M, 6], a copy of FRESH_MODELS.
        records: int64, with room for all symbols.
        words: uint32, with room for as many; filled from its end.
    """
    n, k = ids.shape
    previous, candidates, entries = same_token(tokens), np.empty(k + 4, np.int64), np.empty((n, k), np.int64)
    size = 4
    while size < 2 * n * k:
        size *= 2
    missed = (
        np.full(size, -1, np.int32),  # a hash table of the numbers that ids have by their first occurrence
        np.empty(n * k, np.int32),  # the ids, by number
        np.empty(n * k, np.int32),  # their places in the order, by number
        np.empty(n * k, np.int32),  # the order, of numbers
    )
    known, t = np.int64(0), np.int64(0)
    for i in range(n):
        count = np.int64(counts[i])
        if has_counts:
            t = put(IDS, models, ROW_FULL, ALL if count == k else FEWER, records, t)
            if count < k:
                t = put_size(IDS, models, COUNT_SIZE, COUNT_LENGTH, count - 1, records, t)
        end, same = fill(candidates, i, previous, counts, entries)
        head, recent_index, recent_step = np.int64(0), np.int64(0), np.int64(0)
        level, hit, left = np.int64(0), np.int64(-1), np.int64(1) << MASS_BITS
        following = np.int64(tokens[i + 1]) if i + 1 < n else np.int64(-1)
        for r in range(count):
            x = np.int64(ids[i, r])
            m = index_model(same, r, candidates, head, end, recent_index)
            index = _index_of(x, candidates, head, end)
            if index >= 0:
                symbol = SIZE_OF[index]
                t = put(IDS, models, m, symbol, records, t)
                t = put_bits(IDS, index - SIZE_BASE[symbol], SIZE_BITS[symbol], records, t)
                remove(candidates, head, index)
                head += 1
            else:
                index = np.int64(MISSED_INDEX)
                t = put(IDS, models, m, ESCAPE, records, t)
                known, t = _put_missed(x, same, missed, known, models, records, t)
            recent_index = (recent_index * 3 + index * 4 + 3) >> 2
            step = np.int64(levels[i, r]) - level
            level += step
            if r == 0:
                t = _put_first(level, models, records, t)
                recent_step = level >> 2
            else:
                t = put_size(VALUES, models, step_model(r, recent_step), STEP_LENGTH, step, records, t)
                recent_step = (recent_step + step + 1) >> 1
            entries[i, r] = level << 32 | x
            left -= masses[level]
            if x == following:
                hit = level
        if len(rests) > 0:
            t = _put_rest(np.int64(rests[i]), left, masses, models, records, t)
        if len(labels) > 0:
            t = _put_label(np.int64(labels[i]), hit, level, models, records, t)
    return finish(records, t, words)


@compiled
def _index_of(x, candidates, head, end):  # type: ignore[no-untyped-def]
    """The index of id x among the candidates, or -1 if it is not among the first `SIZES`."""
    for q in range(head, min(end, head + SIZES)):
        if candidates[q] & 0xFFFFFFFF == x:
            return q - head
    return np.int64(-1)


@compiled
def _put_missed(x, same, missed, known, models, records, t):  # type: ignore[no-untyped-def]
    """(known, t): records an id that is no candidate, of which there were `known` before."""
    slots, names, places, order = missed
    at = slot_of(x, len(slots))
    while slots[at] >= 0 and names[slots[at]] != x:
        at = (at + 1) & (len(slots) - 1)
    if slots[at] >= 0:
        p = np.int64(places[slots[at]])
        length = bit_length(p + 1)
        short = min(length - 1, NEW - 1)
        t = put(IDS, models, KNOWN + same, short, records, t)
        if short == NEW - 1:
            t = put_bits(IDS, length - NEW, 4, records, t)
        t = put_below(IDS, p + 1, length, records, t)
        f = promote(order, p)
        places[order[p]] = p
        places[order[f]] = f
        return known, t
    t = put(IDS, models, KNOWN + same, NEW, records, t)
    length = bit_length(x)
    short = min(max(length - 3, 0), 15)
    t = put(IDS, models, NEW_LENGTH, short, records, t)
    if short == 0:
        t = put_bits(IDS, x, 3, records, t)
    else:
        if short == 15:
            t = put_bits(IDS, length - 18, 4, records, t)
        t = put_below(IDS, x, length, records, t)
    slots[at], names[known], places[known] = known, x, known
    order[known] = known
    return known + 1, t


@compiled
def _put_first(level, models, records, t):  # type: ignore[no-untyped-def]
    """Records the level of a row's first entry; returns the next t."""
    coarse = min(level >> 5, 15)
    t = put(VALUES, models, FIRST, coarse, records, t)
    if coarse == 15:
        return put_length(VALUES, models, FIRST_LENGTH, level - LONG_FIRST, records, t)
    t = put(VALUES, models, FIRST_FINE + coarse, (level >> 1) & 15, records, t)
    return put_bits(VALUES, level & 1, 1, records, t)


@compiled
def _put_rest(rest, left, masses, models, records, t):  # type: ignore[no-untyped-def]
    """Records the rest's level as its difference from the guess: 0, −1, 1, −2, … become 0, 1, 2, 3, …"""
    m = rest_model(left)
    if rest == MINUS_INFINITY:
        return put(VALUES, models, m, REST_NOTHING, records, t)
    off = rest - guessed_rest(left, masses)
    folded = 2 * off if off >= 0 else -2 * off - 1
    if folded < REST_FAR:
        return put(VALUES, models, m, folded, records, t)
    t = put(VALUES, models, m, REST_FAR, records, t)
    t = put_bits(VALUES, folded & 1, 1, records, t)
    return put_length(VALUES, models, REST_LENGTH, folded >> 1, records, t)


@compiled
def _put_label(label, hit, last, models, records, t):  # type: ignore[no-untyped-def]
    """Records the label's level, given that of the next token in the row, or -1, and that of the row's last entry."""
    m = LABEL + np.int64(hit >= 0)
    if label == hit:
        return put(VALUES, models, m, EQUAL, records, t)
    if label >= last:
        t = put(VALUES, models, m, BELOW, records, t)
        return put_length(VALUES, models, LABEL_LENGTH, label - last, records, t)
    t = put(VALUES, models, m, ANY, records, t)
    return put_bits(VALUES, label, 15, records, t)


# The decoder of a block's rows, which does what the encoder does in the same order. Compiled by Numba.
#
# Nothing is assumed about the block: whatever it holds, no index leaves its array, and every loop ends.

_MALFORMED = -1


@cached
def decode_rows(tokens, vocabulary_size, parts, tables, models, words, states, ids, logprobs, rests, labels):  # type: ignore[no-untyped-def]
    """Decodes a block into its arrays; returns how many words it read, or -1 if the block is malformed.

    Args:
        tokens: int32 [n].
        parts: whether rows may have fewer than k entries, whether there are rests, and labels.
        tables: `mass_table` and `logprob_table`.
        models: int64 [M, 6], a copy of FRESH_MODELS.
        words: uint32, of the block.
        states: int64 [2], the block's states; the states at its end are written to it.
        ids, logprobs: int32 and fp32 [n, k], written.
        rests, labels: fp32 [n], written if the block has them.
    """
    has_counts, has_rests, has_labels = parts
    masses, table = tables
    n, k = ids.shape
    previous, candidates = same_token(tokens), np.empty(k + 4, np.int64)
    entries, counts = np.empty((n, k), np.int64), np.empty(n, np.int32)
    order = np.empty(n * k, np.int32)
    known, at, x0, x1 = np.int64(0), np.int64(0), states[0], states[1]
    for i in range(n):
        count = np.int64(k)
        if has_counts:
            count, x0, at = _take_count(k, models, x0, words, at)
            if count > k:
                return np.int64(_MALFORMED)
        counts[i] = count
        end, same = fill(candidates, i, previous, counts, entries)
        head, recent_index, recent_step = np.int64(0), np.int64(0), np.int64(0)
        level, hit, left = np.int64(0), np.int64(-1), np.int64(1) << MASS_BITS
        following = np.int64(tokens[i + 1]) if i + 1 < n else np.int64(-1)
        for r in range(count):
            symbol, x0, at = take(models, index_model(same, r, candidates, head, end, recent_index), x0, words, at)
            if symbol == ESCAPE:
                index = np.int64(MISSED_INDEX)
                x, known, x0, at = _take_missed(same, order, known, models, x0, words, at)
                if x < 0 or x >= vocabulary_size:
                    return np.int64(_MALFORMED)
            else:
                index = SIZE_BASE[symbol]
                if SIZE_BITS[symbol] > 0:
                    more, x0, at = take_bits(SIZE_BITS[symbol], x0, words, at)
                    index += more
                if head + index >= end:
                    return np.int64(_MALFORMED)
                x = remove(candidates, head, index) & 0xFFFFFFFF
                head += 1
            recent_index = (recent_index * 3 + index * 4 + 3) >> 2
            if r == 0:
                level, x1, at = _take_first(models, x1, words, at)
                recent_step = level >> 2
            else:
                step, x1, at = take_size(models, step_model(r, recent_step), STEP_LENGTH, x1, words, at)
                level += step
                recent_step = (recent_step + step + 1) >> 1
            if level > MINUS_INFINITY:
                return np.int64(_MALFORMED)
            ids[i, r], entries[i, r], logprobs[i, r] = x, level << 32 | x, table[level]
            left -= masses[level]
            if x == following:
                hit = level
        for r in range(count, k):
            ids[i, r], logprobs[i, r] = -1, -np.inf
        if has_rests:
            rest, x1, at = _take_rest(left, masses, models, x1, words, at)
            if rest < 0 or rest > MINUS_INFINITY:
                return np.int64(_MALFORMED)
            rests[i] = table[rest]
        if has_labels:
            label, x1, at = _take_label(hit, level, models, x1, words, at)
            if label < 0 or label > NOT_A_NUMBER:
                return np.int64(_MALFORMED)
            labels[i] = table[label]
        if at > len(words):
            return np.int64(_MALFORMED)
    states[0], states[1] = x0, x1
    return at


@compiled
def _take_count(k, models, x, words, at):  # type: ignore[no-untyped-def]
    """(count, x, at): a row's number of entries, above k if it is impossible."""
    symbol, x, at = take(models, ROW_FULL, x, words, at)
    if symbol == ALL:
        return np.int64(k), x, at
    count, x, at = take_size(models, COUNT_SIZE, COUNT_LENGTH, x, words, at)
    return count + 1, x, at


@inlined
def _take_missed(same, order, known, models, x, words, at):  # type: ignore[no-untyped-def]
    """(id, known, x, at): an id that is no candidate, of which there were `known` before. An impossible place gives -1."""
    short, x, at = take(models, KNOWN + same, x, words, at)
    if short < NEW:
        length = short + 1
        if short == NEW - 1:
            more, x, at = take_bits(np.int64(4), x, words, at)
            length += more
        place, x, at = take_below(length, x, words, at)
        if place > known:
            return np.int64(-1), known, x, at
        return np.int64(order[promote(order, place - 1)]), known, x, at
    short, x, at = take(models, NEW_LENGTH, x, words, at)
    if short == 0:
        value, x, at = take_bits(np.int64(3), x, words, at)
    else:
        length = short + 3
        if short == 15:
            more, x, at = take_bits(np.int64(4), x, words, at)
            length += more
        value, x, at = take_below(min(length, 31), x, words, at)
    order[known] = value
    return value, known + 1, x, at


@compiled
def _take_first(models, x, words, at):  # type: ignore[no-untyped-def]
    """(level, x, at) of a row's first entry."""
    coarse, x, at = take(models, FIRST, x, words, at)
    if coarse == 15:
        level, x, at = take_length(models, FIRST_LENGTH, x, words, at)
        return LONG_FIRST + level, x, at
    fine, x, at = take(models, FIRST_FINE + coarse, x, words, at)
    finest, x, at = take_bits(np.int64(1), x, words, at)
    return (coarse << 5) + (fine << 1) + finest, x, at


@compiled
def _take_rest(left, masses, models, x, words, at):  # type: ignore[no-untyped-def]
    """(level, x, at) of the rest; the level may be impossible."""
    folded, x, at = take(models, rest_model(left), x, words, at)
    if folded == REST_NOTHING:
        return np.int64(MINUS_INFINITY), x, at
    if folded == REST_FAR:
        sign, x, at = take_bits(np.int64(1), x, words, at)
        size, x, at = take_length(models, REST_LENGTH, x, words, at)
        folded = 2 * size + sign
    off = -((folded + 1) >> 1) if folded & 1 else folded >> 1
    return guessed_rest(left, masses) + off, x, at


@compiled
def _take_label(hit, last, models, x, words, at):  # type: ignore[no-untyped-def]
    """(level, x, at) of the label; the level may be impossible. See `_put_label` for `hit` and `last`."""
    symbol, x, at = take(models, LABEL + np.int64(hit >= 0), x, words, at)
    if symbol == EQUAL:
        return hit, x, at
    if symbol == BELOW:
        below, x, at = take_length(models, LABEL_LENGTH, x, words, at)
        return last + below, x, at
    return take_bits(np.int64(15), x, words, at)
