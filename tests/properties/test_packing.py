"""Packing and padding, for random documents: nothing lost, nothing mixed, the same to learn either way."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.config.facts import row_width
from distill_rl.data.collate import BatchPlan, BatchSharding, Encoded, lay_out
from distill_rl.data.packing import first_fit
from distill_rl.types import IGNORE_INDEX, TokenRows

MAX_LENGTH = 24
PAD = 0
shares = st.builds(BatchSharding, st.integers(1, 3), st.integers(1, 3))


@st.composite
def documents(draw: st.DrawFn) -> list[Encoded]:
    """Documents whose token ids occur nowhere else, so that each can be found again; PAD is none of them."""
    lengths = draw(st.lists(st.integers(0, MAX_LENGTH), min_size=1, max_size=20))
    result, first = [], 1
    for length in lengths:
        mask = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        ids = np.arange(first, first + length, dtype=np.int32)
        result.append(Encoded(ids, np.asarray(mask, dtype=bool), False))
        first += length
    return result


@st.composite
def plans(draw: st.DrawFn, packing: bool | None = None) -> BatchPlan:
    packs = draw(st.booleans()) if packing is None else packing
    others = tuple(draw(st.lists(shares, max_size=2)))
    return BatchPlan(draw(shares), others, MAX_LENGTH, packs, PAD).for_device(on_gpu=draw(st.booleans()))


def segments(rows: TokenRows) -> list[tuple[list[int], list[int], list[int]]]:
    """The documents of the rows by position restarts: ids, labels, positions; with the padding that continues them."""
    found = []
    for ids, labels, positions in zip(rows.input_ids, rows.labels, rows.position_ids):
        starts = [*np.flatnonzero(positions == 0), len(positions)]
        for start, stop in itertools.pairwise(starts):
            found.append((ids[start:stop].tolist(), labels[start:stop].tolist(), positions[start:stop].tolist()))
    return found


def learnt(rows: TokenRows) -> Counter:
    """(input, label, position) of every position, the padding left out."""
    real = rows.input_ids != PAD
    return Counter(zip(rows.input_ids[real].tolist(), rows.labels[real].tolist(), rows.position_ids[real].tolist()))


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(30, 50))
def test_first_fit_places_every_document_once_and_overfills_no_row(lengths, capacity):
    rows = first_fit(lengths, capacity)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(row == sorted(row) and sum(lengths[number] for number in row) <= capacity for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(30, 50))
def test_first_fit_opens_a_row_only_when_no_earlier_one_has_room(lengths, capacity):
    rows = first_fit(lengths, capacity)
    for number, row in enumerate(rows):
        for document in row:
            for earlier in rows[:number]:
                held = sum(lengths[other] for other in earlier if other < document)
                assert held + lengths[document] > capacity


@given(documents(), plans())
@settings(max_examples=200, deadline=None)
def test_every_document_appears_once_and_intact_and_no_label_crosses(encoded, plan):
    found = [segment for segment in segments(lay_out(encoded, plan)) if segment[0][0] != PAD]
    by_first = {ids[0]: (ids, labels, positions) for ids, labels, positions in found}
    assert len(found) == len(by_first) == sum(len(document.input_ids) > 0 for document in encoded)
    for document in encoded:
        if not len(document.input_ids):
            continue
        size = len(document.input_ids)
        ids, labels, positions = (each[:size] for each in by_first[int(document.input_ids[0])])
        assert ids == document.input_ids.tolist()
        assert positions == list(range(size))
        targets = zip(ids[1:], document.label_mask[1:])
        assert labels == [target if wanted else IGNORE_INDEX for target, wanted in targets] + [IGNORE_INDEX]


@given(documents(), plans())
@settings(max_examples=100, deadline=None)
def test_padding_continues_the_last_document_of_its_row_without_labels(encoded, plan):
    rows = lay_out(encoded, plan)
    assert rows.shape[0] % plan.row_multiple == 0
    assert rows.shape[1] == row_width(
        max((np.flatnonzero(ids != PAD).max(initial=-1) + 1 for ids in rows.input_ids), default=0), on_gpu=plan.on_gpu
    )
    for ids, labels, positions in segments(rows):
        assert positions == list(range(len(ids)))
        real = np.count_nonzero(np.asarray(ids) != PAD)
        assert set(ids[real:]) <= {PAD}
        assert set(labels[max(real - 1, 0) :]) == {IGNORE_INDEX}
    starts = (rows.position_ids == 0).sum(axis=1)
    held = [len({int(document.input_ids[0]) for document in encoded if len(document.input_ids)} & set(ids.tolist()))
            for ids in rows.input_ids]  # fmt: skip
    assert starts.tolist() == [max(count, 1) for count in held]


@given(documents(), plans(packing=True), plans(packing=False))
@settings(max_examples=100, deadline=None)
def test_packed_and_padded_rows_carry_the_same_to_learn(encoded, packed, padded):
    assert learnt(lay_out(encoded, packed)) == learnt(lay_out(encoded, padded))
