"""Long documents in pieces: every token once, on every side, and no chunk divided."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distill_rl.align import Alignment
from distill_rl.data.batch.document_aligner import DocumentPiece, PieceLimits, Splitter, common_places, splitter_of
from distill_rl.data.batch.tokenization import Encoded
from tests.helpers.align import check_numbers, family
from tests.properties.test_align import families, lossless, make_aligner, plain_texts, quick

long_texts = st.lists(plain_texts, min_size=1, max_size=6).map(" ".join)
limits = st.integers(2, 24)


def whole(student: str, teachers: tuple[str, ...], text: str) -> tuple[Encoded, dict[int, Alignment]]:
    """A text as the first tokenizer reads it, and its alignments with the others."""
    aligners = [make_aligner(student, teacher) for teacher in teachers]
    for aligner in aligners:
        text = aligner.normalize(text)
    alignments = {}
    for i, aligner in enumerate(aligners):
        sides = aligner.tokenize_student(text, end=True), aligner.tokenize_teacher(text, end=True)
        alignments[i] = aligner.pair(*sides)
    ids = alignments[0].student_ids
    return Encoded(ids, np.ones(len(ids), dtype=bool)), alignments


def splitter(student: str, teachers: tuple[str, ...], lengths: list[int]) -> Splitter:
    others = {i: (family(name), length) for i, (name, length) in enumerate(zip(teachers, lengths[1:]))}
    return splitter_of(family(student), lengths[0], others)


def sides_of(pieces: list[DocumentPiece], num_teachers: int) -> list[list[np.ndarray]]:
    """The tokens of every side, piece by piece."""
    student = [encoded.input_ids for encoded, _, _ in pieces]
    return [student, *([pairs[i].teacher_ids for _, pairs, _ in pieces] for i in range(num_teachers))]


def joined(parts: list[np.ndarray], bos: int | None) -> np.ndarray:
    """The pieces put together again, without the bos that each but the first was given."""
    given_bos = bos is not None and len(parts[0]) and parts[0][0] == bos
    return np.concatenate([parts[0], *(part[1:] if given_bos else part for part in parts[1:])])


@quick
@given(
    families,
    st.lists(families, min_size=1, max_size=2).map(tuple),
    long_texts,
    st.lists(limits, min_size=3, max_size=3),
)
def test_every_token_is_in_one_piece_within_the_limits(student, teachers, text, lengths):
    encoded, alignments = whole(student, teachers, text)
    pieces = splitter(student, teachers, lengths).split(encoded, alignments)
    tokens = [encoded.input_ids, *(pair.teacher_ids for pair in alignments.values())]
    for parts, all_ids, limit, name in zip(sides_of(pieces, len(teachers)), tokens, lengths, (student, *teachers)):
        assert all(len(part) <= limit for part in parts)
        if not pieces[0][0].truncated:
            assert np.array_equal(joined(parts, family(name).bos_token_id), all_ids)
    for part, pairs, _ in pieces:
        assert len(part.label_mask) == len(part.input_ids)
        for pair in pairs.values():
            check_numbers(pair)
            assert np.array_equal(pair.student_ids, part.input_ids)


@quick
@given(lossless, lossless, long_texts, st.lists(limits, min_size=2, max_size=2))
def test_only_a_stretch_without_a_shared_boundary_is_cut(student, teacher, text, lengths):
    encoded, alignments = whole(student, (teacher,), text)
    split = splitter(student, (teacher,), lengths)
    pieces = split.split(encoded, alignments)
    places = common_places(len(encoded.input_ids), alignments)
    longest = np.diff(places, axis=0, prepend=0).max(axis=0, initial=0)
    bos = [
        int(len(pieces) > 1 and ids[0][0] == family(name).bos_token_id)
        for ids, name in zip(sides_of(pieces, 1), (student, teacher))
    ]
    if (longest + bos <= lengths).all():
        assert not pieces[0][0].truncated
        assert sum(pairs[0].num_chunks for _, pairs, _ in pieces) == alignments[0].num_chunks, "no chunk is divided"
    fits = len(encoded.input_ids) <= lengths[0] and len(alignments[0].teacher_ids) <= lengths[1]
    assert (len(pieces) == 1) == fits


@given(st.integers(0, 50), limits, st.booleans())
def test_with_one_tokenizer_all_pieces_but_the_last_are_full(size, limit, has_bos):
    """But for the one before a last token that would be alone, with nothing that predicts it."""
    ids = np.arange(10, 10 + size, dtype=np.int32)
    encoded = Encoded(ids, ids % 3 == 0, left_out=("names",))
    split = Splitter(PieceLimits(limit, (10,) if has_bos else ()), {})
    pieces = [piece.encoded for piece in split.split(encoded, {})]
    shorter = int(not has_bos and size > limit > 2 and size % limit == 1)
    lengths = [len(part.input_ids) for part in pieces]
    assert lengths[:-1] == [limit] * (len(pieces) - 2) + [limit - shorter] * (len(pieces) > 1)
    assert limit == 2 or len(pieces) == 1 or lengths[-1] > 1
    assert np.array_equal(joined([part.input_ids for part in pieces], 10 if has_bos else None), ids)
    for part in pieces[1:]:
        own = part.input_ids[1:] if has_bos else part.input_ids
        mask = part.label_mask[1:] if has_bos else part.label_mask
        assert np.array_equal(mask, own % 3 == 0), "the mask goes with its tokens"
        assert not has_bos or not part.label_mask[0]
    assert [part.left_out for part in pieces] == [("names",)] + [()] * (len(pieces) - 1)
    assert not any(part.truncated for part in pieces)
