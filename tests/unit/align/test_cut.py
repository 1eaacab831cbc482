"""Where rows that are too long are cut: exact ones at a shared boundary, lossy ones without losing most of the text."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest

from distill_rl.align import Alignment, TokenAligner
from tests.helpers.align import DATA, check_numbers, family, real, slow_table

LIMIT = 24


@cache
def make_aligner(student: str, teacher: str) -> TokenAligner:
    return TokenAligner(family(student), family(teacher))


def alignment(student: list[int], teacher: list[int], **fields) -> Alignment:
    """An alignment of these chunks; ids count from 0."""
    sides = [np.array(chunk, np.int32) for chunk in (student, teacher)]
    ids = [np.arange(len(chunk), dtype=np.int32) for chunk in sides]
    return Alignment(*ids, *sides, int(sides[0].max()) + 1, "offsets", **{"exact": False, **fields})


def test_row_without_chunks_is_cut_at_shared_boundaries():
    text = "Àáâ Èéê Òóô Ùúû " * 30  # the teacher drops every accent
    aligner = make_aligner("byte_level", "wordpiece")
    whole, result = (aligner.align(text, max_student_tokens=limit, max_teacher_tokens=limit) for limit in (None, LIMIT))
    assert whole.num_chunks == result.num_chunks == 0
    assert LIMIT // 2 <= len(result.student_ids) <= LIMIT
    assert 0 < len(result.teacher_ids) <= LIMIT
    kept = b"".join(slow_table(family("byte_level"))[number] for number in result.student_ids.tolist()).decode()
    assert text.startswith(kept)
    assert np.array_equal(aligner.tokenize_teacher(kept).ids, result.teacher_ids), "both sides keep the same text"
    assert result.dropped == (
        len(whole.student_ids) - len(result.student_ids),
        len(whole.teacher_ids) - len(result.teacher_ids),
    )
    back = TokenAligner(family("wordpiece"), family("byte_level")).align(
        text, max_student_tokens=LIMIT, max_teacher_tokens=LIMIT
    )
    assert np.array_equal(back.swapped().lossy_ends, result.lossy_ends)
    assert back.swapped().dropped == result.dropped


def test_without_shared_boundary_sides_are_cut_at_their_limits():
    aligner = make_aligner("byte_level", "unigram")
    text = "\u2603" * 60  # one unknown token
    whole = aligner.align(text)
    result = aligner.align(text, max_student_tokens=LIMIT, max_teacher_tokens=LIMIT)
    assert len(whole.student_ids) > LIMIT
    assert len(whole.teacher_ids) < 5
    assert np.array_equal(result.student_ids, whole.student_ids[:LIMIT])
    assert np.array_equal(result.teacher_ids, whole.teacher_ids)
    assert (result.student_chunk == -1).all()
    assert (result.teacher_chunk == -1).all()
    assert result.dropped == (len(whole.student_ids) - LIMIT, 0)
    assert not result.exact


def test_divided_chunk_is_removed_on_both_sides():
    whole = alignment([0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2], [0, 1, 1, 2])
    result = whole.cut(8)
    assert result.student_chunk.tolist() == [0, 0, -1, -1, -1, -1, -1, -1]
    assert result.teacher_chunk.tolist() == [0, -1, -1, -1]
    assert result.num_chunks == 1
    assert result.dropped == (3, 0)
    check_numbers(result)
    assert len(whole.cut(4).student_ids) == 2, "the end of the first chunk uses half of the limit"


def test_exact_row_ends_at_the_last_common_boundary():
    sides = [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2], [0, 1, 1, 2]
    result = alignment(*sides, exact=True).cut(8)
    assert (len(result.student_ids), len(result.teacher_ids)) == (2, 1)
    assert alignment([0] * 9, [0], exact=True).cut(8).dropped == (9, 1)


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ((10, 20), (10, 20)),  # the boundary (3, 3) is far from both limits
        ((5, 20), (3, 3)),  # close to the student's limit
        ((40, 5), (3, 3)),  # close to the teacher's limit; the student's side fits
        ((40, 10), (40, 10)),  # the student's side fits, so it must not lose nearly all tokens
        ((0, 20), (0, 0)),
    ],
)
def test_only_sides_over_their_limit_need_a_near_boundary(limits, sizes):
    whole = alignment([-1] * 40, [-1] * 40, lossy_ends=np.array([[3, 3]]))
    result = whole.cut(*limits)
    assert (len(result.student_ids), len(result.teacher_ids)) == sizes
    again = whole.swapped().cut(*limits[::-1])
    assert (len(again.teacher_ids), len(again.student_ids)) == sizes


def test_places_inside_chunks_are_removed():
    whole, none = alignment([-1, 0, 0, -1, 1, 1], [0, -1, -1, 1, 1, -1]), alignment([-1] * 6, [-1] * 6)
    places = np.array([[0, 0], [1, 0], [2, 1], [3, 1], [4, 3], [4, 4], [5, 4], [6, 5], [6, 6]])
    assert whole.outside_of_chunks(places).tolist() == [[0, 0], [1, 0], [3, 1], [4, 3], [6, 5], [6, 6]]
    assert none.outside_of_chunks(places).tolist() == places.tolist()
    assert whole.outside_of_chunks(places[:0]).shape == (0, 2)


@cache
def with_real_teacher(teacher: str) -> TokenAligner:
    return TokenAligner(real("qwen3"), real(teacher))


@pytest.mark.skipif(not (DATA / "tokenizers").is_dir(), reason="real tokenizers and texts are not in ../shared/data")
@pytest.mark.parametrize(
    ("teacher", "language"),
    [("t5-small", "cmn_hans"), ("t5-small", "tha"), ("bert-uncased", "tha"), ("bert-uncased", "emoji")],
)
def test_unreadable_script_does_not_shorten_the_student(teacher, language):
    rows = map(json.loads, (DATA / "corpus/multilingual/udhr.jsonl").read_text("utf-8").splitlines())
    texts = {row["lang"]: row["text"][:2000] for row in rows} | {"emoji": "🧑🚀👨👩👧👦🎉" * 90}
    result = with_real_teacher(teacher).align(texts[language], max_student_tokens=64, max_teacher_tokens=64)
    assert 32 <= len(result.student_ids) <= 64
    check_numbers(result)
