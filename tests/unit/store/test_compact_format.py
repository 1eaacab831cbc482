"""docs/store-compact.md describes the format: a decoder written from that page alone reads the same targets."""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np
import pytest

from distill_rl.store.compact import decode, encode
from tests.helpers.top_k_targets import realistic

SEGMENTS = [(0, 2, 128), (2, 4, 64), (4, 6, 32), (6, 8, 16), (8, 1000, 8)]
LEAST_OF = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 40, 72]
BITS_OF = [0] * 8 + [1, 1, 2, 3, 4, 5, 7]


def depths() -> list[float]:
    """−log-probability of each finite level."""
    values = [start + j / density for start, end, density in SEGMENTS for j in range((end - start) * density)]
    return [*values, 1000.0]


DEPTHS = depths()
INFINITE = len(DEPTHS)


def logprob(level: int) -> float:
    return -DEPTHS[level] if level < INFINITE else -math.inf if level == INFINITE else math.nan


def mass(level: int) -> int:
    return math.floor(2**30 * math.exp(-DEPTHS[level])) if level < INFINITE else 0


class Model:
    """Adaptive frequencies of 16 symbols."""

    def __init__(self) -> None:
        self.d = [i * 2048 - i for i in range(17)]
        self.seen = 0

    def adapt(self, symbol: int) -> None:
        r = min(3 + self.seen // 6, 7)
        self.seen += 1
        for i in range(1, 16):
            self.d[i] += ((2**15 - 16) >> r if i > symbol else 0) - (self.d[i] >> r)


class Reader:
    """The states and words of a block, and its models by name."""

    def __init__(self, block: bytes) -> None:
        self.states = list(struct.unpack_from("<QQ", block, 12))
        self.words = list(struct.unpack(f"<{(len(block) - 28) // 4}I", block[28:]))[::-1]
        self.models: dict[tuple, Model] = {}

    def _interval(self, state: int, low: int, frequency: int) -> None:
        x = self.states[state]
        x = frequency * (x >> 15) + x % 2**15 - low
        self.states[state] = x if x >= 2**31 else (x << 32) + self.words.pop()

    def symbol(self, state: int, *name: object) -> int:
        model = self.models.setdefault(name, Model())
        s = self.states[state] % 2**15
        c = [d + i for i, d in enumerate(model.d)]
        symbol = max(i for i in range(16) if c[i] <= s)
        self._interval(state, c[symbol], c[symbol + 1] - c[symbol])
        model.adapt(symbol)
        return symbol

    def bits(self, state: int, count: int) -> int:
        if count > 15:
            return (self.bits(state, count - 15) << 15) + self.bits(state, 15)
        if count <= 0:
            return 0
        value = self.states[state] % 2**15 >> (15 - count)
        self._interval(state, value << (15 - count), 1 << (15 - count))
        return value

    def below(self, state: int, length: int) -> int:
        return (1 << (length - 1)) + self.bits(state, length - 1)

    def length(self, state: int, *name: object) -> int:
        length = self.symbol(state, *name)
        return self.below(state, length) if length else 0

    def size(self, state: int, long: str, *name: object) -> int:
        symbol = self.symbol(state, *name)
        if symbol == 15:
            return self.length(state, long)
        return LEAST_OF[symbol] + self.bits(state, BITS_OF[symbol])


def missed_id(read: Reader, same: bool, missed: list[int]) -> int:
    symbol = read.symbol(0, "place", same)
    if symbol < 15:
        place = read.below(0, symbol + 1 if symbol < 14 else 15 + read.bits(0, 4)) - 1
        to = 3 * place // 4
        missed[place], missed[to] = missed[to], missed[place]
        return missed[to]
    symbol = read.symbol(0, "new")
    if symbol == 0:
        missed.append(read.bits(0, 3))
    else:
        missed.append(read.below(0, symbol + 3 if symbol < 15 else 18 + read.bits(0, 4)))
    return missed[-1]


def first_level(read: Reader) -> int:
    coarse = read.symbol(1, "first")
    if coarse == 15:
        return 480 + read.length(1, "long first")
    return 32 * coarse + 2 * read.symbol(1, "fine", coarse) + read.bits(1, 1)


def rest_level(read: Reader, left: int, masses: list[int]) -> int:
    f = read.symbol(1, "rest", max(left, 0).bit_length() // 2)
    if f == 15:
        return INFINITE
    if f == 14:
        lowest = read.bits(1, 1)
        f = 2 * read.length(1, "long rest") + lowest
    guess = next(level for level, each in enumerate(masses) if each <= max(left, 0))
    return guess + (f // 2 if f % 2 == 0 else -(f + 1) // 2)


def label_level(read: Reader, hit: int | None, last: int) -> int:
    symbol = read.symbol(1, "label", hit is not None)
    if symbol == 0:
        assert hit is not None
        return hit
    return last + read.length(1, "long label") if symbol == 1 else read.bits(1, 15)


def decoded(tokens: list[int], block: bytes, vocabulary_size: int) -> dict[str, np.ndarray]:
    """What the page says that a block holds."""
    crc, version, flags, k, n = struct.unpack_from("<IBBHI", block)
    assert crc == zlib.crc32(struct.pack("<Q", vocabulary_size) + struct.pack(f"<{n}i", *tokens) + block[4:])
    assert (version, n) == (1, len(tokens))
    read, masses = Reader(block), [mass(level) for level in range(INFINITE + 1)]
    rows: list[list[tuple[int, int]]] = []
    missed: list[int] = []
    rests, labels = [], []
    for i in range(n):
        count = k
        if flags & 1 and read.symbol(0, "full") == 1:
            count = 1 + read.size(0, "long count", "count")
        before = [j for j in range(i) if tokens[j] == tokens[i]]
        same = bool(before)
        candidates = list(rows[before[-1]] if before else rows[-1] if rows else [])
        row: list[tuple[int, int]] = []
        a = b = 0
        for r in range(count):
            gap = candidates[1][1] - candidates[0][1] if len(candidates) > 1 else 0
            near = sum(gap >= least for least in (1, 3, 9))
            place = min(r.bit_length(), 6)
            symbol = read.symbol(0, "index", same, place, near, min(a.bit_length(), 5))
            if symbol == 15:
                index, x = 16, missed_id(read, same, missed)
            else:
                index = LEAST_OF[symbol] + read.bits(0, BITS_OF[symbol])
                x = candidates.pop(index)[0]
            a = (3 * a + 4 * index + 3) // 4
            if r == 0:
                level = first_level(read)
                b = level // 4
            else:
                step = read.size(1, "long step", "step", place, min(b.bit_length(), 8))
                level += step
                b = (b + step + 1) // 2
            row.append((x, level))
        rows.append(row)
        if flags & 2:
            rests.append(rest_level(read, 2**30 - sum(masses[level] for _, level in row), masses))
        if flags & 4:
            levels = dict(row)
            labels.append(label_level(read, levels.get(tokens[i + 1]) if i + 1 < n else None, row[-1][1]))
    assert read.states == [2**31, 2**31]
    assert not read.words
    padded = [row + [(-1, INFINITE)] * (k - len(row)) for row in rows]
    named = {
        "ids": np.array([[x for x, _ in row] for row in padded], np.int32),
        "logprobs": np.array([[logprob(level) for _, level in row] for row in padded], np.float32),
    }
    named |= {"rest_logprob": np.array([logprob(level) for level in rests], np.float32)} if flags & 2 else {}
    return named | ({"label_logprob": np.array([logprob(level) for level in labels], np.float32)} if flags & 4 else {})


@pytest.mark.parametrize(("k", "size", "options"), [(24, 3000, {}), (250, 40_000, {}), (64, 3000, {"mass": 0.9})])
def test_a_decoder_written_from_the_page_agrees(k, size, options):
    tokens, targets = realistic(40, size, k)
    targets["ids"] = targets["ids"] * (2_000_000_000 // size)  # some need all their bits
    targets["label_logprob"][::5] = [np.nan, -np.inf, 0, -3, -900, *[-20] * 3]
    targets["rest_logprob"][::7] = [-np.inf, 0, -1, -50, -400, -5]
    targets["logprobs"][3] = targets["logprobs"][3] - 40
    targets["logprobs"][4, k // 2 :] = -np.inf
    block = encode(tokens, targets, vocabulary_size=1 << 31, **options)
    expected = decode(tokens, block, vocabulary_size=1 << 31)
    read = decoded(tokens.tolist(), block, 1 << 31)
    assert list(read) == list(expected)
    for name, array in read.items():
        np.testing.assert_array_equal(array, expected[name])
