"""Where rows end that are too long: exact ones as before any limit, lossy ones without losing what is still to be learnt."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest

from distill_rl.align import Alignment, TokenAligner
from distill_rl.align.alignment import outside_of_chunks
from tests.helpers.align import DATA, check_numbers, family, real, slow_table

LIMIT = 24


@cache
def aligner(student: str, teacher: str) -> TokenAligner:
    return TokenAligner(family(student), family(teacher))


def made(student: list[int], teacher: list[int], **fields) -> Alignment:
    """An alignment of these chunks; ids count from 0."""
    sides = [np.array(chunk, np.int32) for chunk in (student, teacher)]
    ids = [np.arange(len(chunk), dtype=np.int32) for chunk in sides]
    return Alignment(*ids, *sides, int(sides[0].max()) + 1, "offsets", **{"exact": False, **fields})


def test_a_row_without_a_chunk_is_cut_at_the_boundaries_that_both_sides_have():
    text = "Àáâ Èéê Òóô Ùúû " * 30  # the teacher drops every accent
    pair = aligner("byte_level", "wordpiece")
    whole, found = (pair.align(text, max_student_tokens=limit, max_teacher_tokens=limit) for limit in (None, LIMIT))
    assert whole.num_chunks == found.num_chunks == 0
    assert LIMIT // 2 <= len(found.student_ids) <= LIMIT
    assert 0 < len(found.teacher_ids) <= LIMIT
    kept = b"".join(slow_table(family("byte_level"))[number] for number in found.student_ids.tolist()).decode()
    assert text.startswith(kept)
    assert np.array_equal(pair.tokenize_teacher(kept).ids, found.teacher_ids), "both sides keep the same text"
    assert found.dropped == (
        len(whole.student_ids) - len(found.student_ids),
        len(whole.teacher_ids) - len(found.teacher_ids),
    )
    back = TokenAligner(family("wordpiece"), family("byte_level")).align(
        text, max_student_tokens=LIMIT, max_teacher_tokens=LIMIT
    )
    assert np.array_equal(back.swapped().lossy_ends, found.lossy_ends)
    assert back.swapped().dropped == found.dropped


def test_where_the_sides_share_no_boundary_each_is_cut_at_its_own_limit():
    pair = aligner("byte_level", "unigram")
    text = "\u2603" * 60  # one unknown token
    whole = pair.align(text)
    found = pair.align(text, max_student_tokens=LIMIT, max_teacher_tokens=LIMIT)
    assert len(whole.student_ids) > LIMIT
    assert len(whole.teacher_ids) < 5
    assert np.array_equal(found.student_ids, whole.student_ids[:LIMIT])
    assert np.array_equal(found.teacher_ids, whole.teacher_ids)
    assert (found.student_chunk == -1).all()
    assert (found.teacher_chunk == -1).all()
    assert found.dropped == (len(whole.student_ids) - LIMIT, 0)
    assert not found.exact


def test_a_chunk_that_a_cut_goes_through_is_none_on_both_sides():
    whole = made([0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2], [0, 1, 1, 2])
    found = whole.cut(8)
    assert found.student_chunk.tolist() == [0, 0, -1, -1, -1, -1, -1, -1]
    assert found.teacher_chunk.tolist() == [0, -1, -1, -1]
    assert found.num_chunks == 1
    assert found.dropped == (3, 0)
    check_numbers(found)
    assert len(whole.cut(4).student_ids) == 2, "the end of the first chunk uses half of the limit"


def test_an_exact_row_ends_at_the_last_common_boundary_however_far_that_is():
    sides = [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2], [0, 1, 1, 2]
    found = made(*sides, exact=True).cut(8)
    assert (len(found.student_ids), len(found.teacher_ids)) == (2, 1)
    assert made([0] * 9, [0], exact=True).cut(8).dropped == (9, 1)


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ((10, 20), (10, 20)),  # the place (3, 3) is far from both limits
        ((5, 20), (3, 3)),  # near to the student's
        ((40, 5), (3, 3)),  # near to the teacher's, the student's side fits
        ((40, 10), (40, 10)),  # that the student's side fits is no reason to drop nearly all of it
        ((0, 20), (0, 0)),
    ],
)
def test_only_what_is_too_long_decides_whether_a_place_is_near_enough(limits, sizes):
    whole = made([-1] * 40, [-1] * 40, lossy_ends=np.array([[3, 3]]))
    found = whole.cut(*limits)
    assert (len(found.student_ids), len(found.teacher_ids)) == sizes
    again = whole.swapped().cut(*limits[::-1])
    assert (len(again.teacher_ids), len(again.student_ids)) == sizes


def test_places_inside_of_chunks_are_no_places():
    student, teacher = (np.array(chunk, np.int32) for chunk in ([-1, 0, 0, -1, 1, 1], [0, -1, -1, 1, 1, -1]))
    places = np.array([[0, 0], [1, 0], [2, 1], [3, 1], [4, 3], [4, 4], [5, 4], [6, 5], [6, 6]])
    assert outside_of_chunks(places, student, teacher).tolist() == [[0, 0], [1, 0], [3, 1], [4, 3], [6, 5], [6, 6]]
    nothing = np.full(6, -1, np.int32)
    assert outside_of_chunks(places, nothing, nothing).tolist() == places.tolist()
    assert outside_of_chunks(places[:0], student, teacher).shape == (0, 2)


@pytest.mark.skipif(not (DATA / "tokenizers").is_dir(), reason="real tokenizers and texts are not in ../shared/data")
@pytest.mark.parametrize(("teacher", "language"), [("t5-small", "cmn_hans"), ("t5-small", "tha"), ("bert-uncased", "tha"), ("bert-uncased", "emoji")])  # fmt: skip
def test_a_teacher_that_cannot_read_a_script_does_not_shorten_the_student(teacher, language):
    rows = map(json.loads, (DATA / "corpus/multilingual/udhr.jsonl").read_text("utf-8").splitlines())
    texts = {row["lang"]: row["text"][:2000] for row in rows} | {"emoji": "🧑🚀👨👩👧👦🎉" * 90}
    found = TokenAligner(real("qwen3"), real(teacher)).align(
        texts[language], max_student_tokens=64, max_teacher_tokens=64
    )
    assert 32 <= len(found.student_ids) <= 64
    check_numbers(found)
