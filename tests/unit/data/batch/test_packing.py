"""First fit by example; tests/properties/test_packing.py has properties for random lengths."""

from __future__ import annotations

import numpy as np
import pytest

from distill_rl.data.batch.collate import deal_by_length, first_fit


def test_documents_go_into_the_first_row_with_room():
    assert first_fit([5, 6, 4, 3, 1, 1], 10) == [[0, 2, 4], [1, 3, 5]]


def test_a_full_row_takes_only_empty_documents():
    assert first_fit([4, 0, 1], 4) == [[0, 1], [2]]


def test_documents_of_several_lengths_need_room_on_every_side():
    lengths = [(5, 2), (3, 9), (4, 4), (2, 1)]
    assert first_fit(lengths, 10) == [[0, 2], [1, 3]]
    assert first_fit(lengths, (14, 16)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("capacity", [4, (4, 8)])
def test_no_documents(capacity):
    assert first_fit([], capacity) == []


@pytest.mark.parametrize("length", [5, -1])
def test_lengths_outside_the_capacity_are_refused(length):
    with pytest.raises(ValueError, match="document 1"):
        first_fit([1, length], 4)
    with pytest.raises(ValueError, match=f"document 1 has {length} tokens, a row holds 4"):
        first_fit([(1, 1), (1, length)], (9, 4))


def test_groups_of_like_length_alternate_between_ranks():
    lengths = [3, 9, 5, 1, 8, 4, 7, 2]
    dealt = [lengths[i] for i in deal_by_length(lengths, group=2, ranks=2)]
    assert dealt == [9, 8, 4, 3, 7, 5, 2, 1]


def test_groups_that_do_not_divide_evenly_stay_with_one_rank():
    assert deal_by_length([1, 3, 2], group=1, ranks=2) == [1, 2, 0]


def test_documents_of_equal_length_keep_their_order():
    assert deal_by_length([4, 4, 4, 4], group=1, ranks=1) == [0, 1, 2, 3]


def test_first_fit_of_many_rows_is_the_plain_one():
    draw = np.random.default_rng(0)
    sizes = np.where(draw.random((1200, 2)) < 0.6, 90, draw.integers(0, 90, (1200, 2)))
    rows: list[list[int]] = []
    room: list[np.ndarray] = []
    for i, size in enumerate(sizes):
        row = next((r for r, left in enumerate(room) if (left >= size).all()), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(np.array([100, 110]))
        rows[row].append(i)
        room[row] -= size
    assert len(rows) > 400
    assert first_fit(sizes, [100, 110]) == rows
