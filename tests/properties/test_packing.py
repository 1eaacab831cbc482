"""Properties of packing and padding: no document is lost or mixed, and both carry the same labels."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.config.facts import row_width
from distill_rl.data.batch.collate import BatchPlan, BatchSharding, arrange, deal_by_length, divide, first_fit, lay_out
from distill_rl.data.batch.tokenization import Encoded
from distill_rl.models.forward import micro_batches
from distill_rl.types import IGNORE_INDEX, TokenRows
from tests.helpers.rows import laid_out

MAX_LENGTH = 24
PAD = 0
shardings = st.builds(BatchSharding, st.integers(1, 3), st.integers(1, 3))


@st.composite
def documents(draw: st.DrawFn) -> list[Encoded]:
    """Documents whose token ids are unique, so that each can be found again; none is PAD."""
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
    others = tuple(draw(st.lists(shardings, max_size=2)))
    return BatchPlan(draw(shardings), others, MAX_LENGTH, packs, PAD).for_device(on_gpu=draw(st.booleans()))


def segments(rows: TokenRows) -> list[tuple[list[int], list[int], list[int]]]:
    """The documents of the rows, split at position restarts: ids, labels, positions, including trailing padding."""
    result = []
    for ids, labels, positions in zip(rows.input_ids, rows.labels, rows.position_ids):
        starts = [*np.flatnonzero(positions == 0), len(positions)]
        for start, stop in itertools.pairwise(starts):
            result.append((ids[start:stop].tolist(), labels[start:stop].tolist(), positions[start:stop].tolist()))
    return result


def trained_on(rows: TokenRows) -> Counter:
    """(input, label, position) of every position that is not padding."""
    real = rows.input_ids != PAD
    return Counter(zip(rows.input_ids[real].tolist(), rows.labels[real].tolist(), rows.position_ids[real].tolist()))


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(30, 50))
def test_first_fit_places_each_document_once_within_capacity(lengths, capacity):
    rows = first_fit(lengths, capacity)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(row == sorted(row) and sum(lengths[document] for document in row) <= capacity for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(30, 50))
def test_first_fit_opens_a_row_only_if_no_earlier_one_has_room(lengths, capacity):
    rows = first_fit(lengths, capacity)
    for i, row in enumerate(rows):
        for document in row:
            for earlier in rows[:i]:
                held = sum(lengths[other] for other in earlier if other < document)
                assert held + lengths[document] > capacity


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), max_size=60))
def test_rows_of_several_sides_are_full_on_one_of_them(lengths):
    capacities = np.array([35, 40])
    rows = first_fit(lengths, capacities)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1, 2)
    for i, row in enumerate(rows):
        assert row == sorted(row)
        assert (sizes[row].sum(axis=0) <= capacities).all()
        for document, earlier in itertools.product(row, rows[:i]):
            held = sizes[[other for other in earlier if other < document]].sum(axis=0)
            assert (held + sizes[document] > capacities).any()


@given(st.data(), documents(), plans())
@settings(max_examples=100, deadline=None)
def test_both_sides_hold_the_same_documents_in_each_row(data, encoded, plan):
    lengths = data.draw(st.lists(st.integers(0, MAX_LENGTH), min_size=len(encoded), max_size=len(encoded)))
    other = [Encoded(np.full(n, i + 1, np.int32), np.ones(n, bool)) for i, n in enumerate(lengths)]
    members = arrange([encoded, other], [MAX_LENGTH, MAX_LENGTH + 9], plan)
    ours, theirs = lay_out(encoded, plan, members), lay_out(other, plan, members, PAD)
    assert ours.shape[0] == theirs.shape[0]
    for row, indices in enumerate(members):
        mine = [id for i in indices for id in encoded[i].input_ids]
        assert ours.input_ids[row, : len(mine)].tolist() == mine
        assert set(ours.input_ids[row, len(mine) :]) <= {PAD}
        found = list(dict.fromkeys(theirs.input_ids[row].tolist()))
        assert [id for id in found if id != PAD] == [i + 1 for i in indices if lengths[i]]


@given(documents(), plans(), st.one_of(st.none(), st.integers(1, 3)))
@settings(max_examples=200, deadline=None)
def test_every_micro_batch_has_one_width_that_holds_its_labels(encoded, plan, units):
    if units is not None:
        plan = replace(plan, rows_per_sub_batch=units * plan.row_multiple)
    members = arrange([encoded], [MAX_LENGTH], plan)
    assert sorted(i for row in members for i in row) == list(range(len(encoded)))
    rows = lay_out(encoded, plan, members)
    for sharding in (plan.student, *plan.teachers):
        labels = positions = 0
        for part in chain(*divide(rows, sharding, plan, 0, 0)):
            for _, micro_batch in micro_batches(part, sharding.micro_batch_size):
                labels += np.count_nonzero(micro_batch.labels != IGNORE_INDEX)
                positions += micro_batch.input_ids.size
        assert labels == np.count_nonzero(rows.labels != IGNORE_INDEX)
        assert positions == rows.num_positions <= rows.input_ids.size


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 4), st.integers(1, 4))
def test_dealing_by_length_balances_the_ranks(lengths, group, ranks):
    dealt = [lengths[i] for i in deal_by_length(lengths, group, ranks)]
    assert sorted(dealt) == sorted(lengths)
    if len(lengths) % (group * ranks) == 0 and lengths:
        parts = np.array(dealt).reshape(ranks, -1, group)
        widths = parts.max(axis=2)  # of rank and place
        assert (widths[:, :-1] >= widths[:, 1:]).all()
        assert (widths[:, 1:].max(axis=0, initial=0) <= widths[:, :-1].min(axis=0, initial=31)).all()


@given(documents(), plans())
@settings(max_examples=200, deadline=None)
def test_documents_appear_once_and_labels_stay_inside(encoded, plan):
    real = [segment for segment in segments(laid_out(encoded, plan)) if segment[0][0] != PAD]
    by_first = {ids[0]: (ids, labels, positions) for ids, labels, positions in real}
    assert len(real) == len(by_first) == sum(len(document.input_ids) > 0 for document in encoded)
    for document in encoded:
        if not len(document.input_ids):
            continue
        size = len(document.input_ids)
        ids, labels, positions = (column[:size] for column in by_first[int(document.input_ids[0])])
        assert ids == document.input_ids.tolist()
        assert positions == list(range(size))
        targets = zip(ids[1:], document.label_mask[1:])
        assert labels == [target if wanted else IGNORE_INDEX for target, wanted in targets] + [IGNORE_INDEX]


@given(documents(), plans())
@settings(max_examples=100, deadline=None)
def test_padding_continues_the_last_document_unlabelled(encoded, plan):
    rows = laid_out(encoded, plan)
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
    first_tokens = {int(document.input_ids[0]) for document in encoded if len(document.input_ids)}
    held = [len(first_tokens & set(ids.tolist())) for ids in rows.input_ids]
    assert starts.tolist() == [max(count, 1) for count in held]


@given(documents(), plans(packing=True), plans(packing=False))
@settings(max_examples=100, deadline=None)
def test_packed_and_padded_rows_train_on_the_same(encoded, packed, padded):
    assert trained_on(laid_out(encoded, packed)) == trained_on(laid_out(encoded, padded))
