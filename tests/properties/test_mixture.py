"""Properties of mixtures and of the order of large data: exact shares, complete epochs, pure functions of the place."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.data.order import Blocks, WindowedOrder
from distill_rl.data.reading import source as mixture
from distill_rl.data.reading.source import MixtureSchedule

weights = st.lists(
    st.one_of(st.integers(1, 20).map(float), st.floats(0.01, 100).map(lambda x: round(x, 3))), min_size=1, max_size=8
)
sizes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1, max_size=30).filter(
    lambda blocks: any(rows for rows, _ in blocks)
)
seeds = st.integers(0, 2**63 - 1)


@given(weights, st.integers(1, 400))
@settings(max_examples=50, deadline=None)
def test_every_count_is_within_one_of_its_share(parts, total):
    schedule, shares = MixtureSchedule(parts), [Fraction(str(weight)) for weight in parts]
    whole = sum(shares)
    shares = [share / whole for share in shares]
    counts = [0] * len(parts)
    for i in range(total):
        source, rank = schedule(i)
        assert rank == counts[source]
        counts[source] += 1
        for count, share in zip(counts, shares):
            assert abs(count - share * (i + 1)) < 1


@given(weights, st.lists(st.integers(0, 1000), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_a_place_of_the_schedule_needs_no_other(parts, places):
    straight = MixtureSchedule(parts)
    expected = [straight(i) for i in range(max(places) + 1)]
    jumping = MixtureSchedule(parts)
    assert [jumping(i) for i in places] == [expected[i] for i in places]


def test_the_length_of_a_stretch_changes_nothing(monkeypatch):
    parts = [1.2345, 3.3337, 0.0111]
    whole = MixtureSchedule(parts)
    expected = [whole(i) for i in range(5000)]
    monkeypatch.setattr(mixture, "_STRETCH", 37)
    cut = MixtureSchedule(parts)
    assert [cut(i) for i in reversed(range(5000))] == expected[::-1]


@given(sizes, seeds, st.integers(1, 120), st.integers(0, 3))
@settings(deadline=None)
def test_every_row_is_read_once_per_epoch(blocks, seed, window, epoch):
    order = WindowedOrder(seed, of(blocks), window_bytes=window)
    rows = sum(count for count, _ in blocks)
    assert Counter(order(epoch * rows + i) for i in range(rows)) == Counter(range(rows))


@given(sizes, seeds, st.integers(1, 120), st.data())
@settings(deadline=None)
def test_a_place_of_the_order_needs_no_other(blocks, seed, window, data):
    rows = sum(count for count, _ in blocks)
    straight = WindowedOrder(seed, of(blocks), window_bytes=window)
    expected = [straight(i) for i in range(3 * rows)]
    places = data.draw(st.lists(st.integers(0, 3 * rows - 1), min_size=1, max_size=20))
    jumping = WindowedOrder(seed, of(blocks), window_bytes=window)
    assert [jumping(i) for i in places] == [expected[i] for i in places]


@given(sizes, st.data())
def test_blocks_without_rows_hold_the_others(blocks, data):
    rows = sum(count for count, _ in blocks)
    removed = np.array(sorted(data.draw(st.sets(st.integers(0, rows - 1), max_size=rows - 1))), dtype=np.int64)
    counts = np.repeat(np.arange(len(blocks)), [count for count, _ in blocks])
    left = np.bincount(np.delete(counts, removed), minlength=len(blocks))
    assert of(blocks).without(removed).ends.tolist() == np.cumsum(left).tolist()


def of(blocks: list[tuple[int, int]]) -> Blocks:
    return Blocks(np.cumsum([count for count, _ in blocks]), np.array([size for _, size in blocks]))
