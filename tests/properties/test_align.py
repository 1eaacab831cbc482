"""Invariants of alignment, for every family of tokenizers and for texts that are difficult to tokenise."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distill_rl.align import Alignment, TokenAligner
from tests.helpers.align import (
    FAMILIES,
    LOSSLESS,
    SENTENCES,
    SPECIALS,
    check_chunks_spell_alike,
    check_numbers,
    check_row,
    family,
)

PIECES = (
    *SENTENCES, *SPECIALS, " ", "  ", "\n", "\r\n", "\t", "▁", "<0xE2>", "12345", "1", "🧑‍🚀", "é", "e\u0301", "ﬁ", "İ", "A", "中",
    "\u00a0", "\u200b", "</s", "ka", "Mi-ter", "\x00", "\u2581\u2581", "❤️", "नमस्ते", "ก็",
)  # fmt: skip
hard_texts = st.lists(
    st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=("Cs",)), max_size=4), max_size=12
).map("".join)
plain_texts = hard_texts.map(lambda text: text.replace("▁", "_").replace("<0x", "<x"))
lossless = st.sampled_from(LOSSLESS)
families = st.sampled_from(FAMILIES)
quick = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def make_aligner(student: str, teacher: str, method: str = "auto", fast_ids: bool = True) -> TokenAligner:
    return TokenAligner(family(student), family(teacher), method, fast_ids=fast_ids)


def same(left: Alignment, right: Alignment) -> bool:
    return left.to_dict() == right.to_dict() and all(
        np.array_equal(getattr(left, name), getattr(right, name)) for name in ("student_ids", "teacher_ids")
    )


@quick
@given(lossless, lossless, plain_texts)
def test_lossless_rows_agree_with_the_slow_walk(student, teacher, text):
    aligner = make_aligner(student, teacher)
    result = aligner.align(text)
    assert result.exact
    check_numbers(result)
    check_row(family(student), family(teacher), aligner.normalize(text), result)


@quick
@given(families, families, hard_texts)
def test_any_row_is_exact_or_flagged(student, teacher, text):
    aligner = make_aligner(student, teacher)
    result = aligner.align(text)
    check_numbers(result)
    check_row(family(student), family(teacher), aligner.normalize(text), result)


@quick
@given(families, families, hard_texts)
def test_swapping_the_sides_swaps_the_result(student, teacher, text):
    there, back = make_aligner(student, teacher).align(text), make_aligner(teacher, student).align(text)
    assert same(there, back.swapped())
    by_ids = make_aligner(student, teacher).align_ids(there.student_ids, there.teacher_ids)
    ids_back = make_aligner(teacher, student).align_ids(there.teacher_ids, there.student_ids)
    assert (by_ids.exact, by_ids.num_chunks) == (ids_back.exact, ids_back.num_chunks)
    if by_ids.exact:
        assert same(by_ids, ids_back.swapped())


@quick
@given(families, hard_texts)
def test_tokenizer_with_itself_is_all_one_to_one(name, text):
    result = make_aligner(name, name).align(text)
    special = make_aligner(name, name).student.special[result.student_ids]
    assert result.counts["1:1"] == result.num_chunks
    assert np.array_equal(result.student_chunk, result.teacher_chunk)
    # Only a lone dummy space is neither special nor in a chunk.
    assert np.count_nonzero(result.student_chunk[~special] < 0) <= 1


@settings(max_examples=25, deadline=None)
@given(families, families, st.lists(hard_texts, max_size=5), st.none() | st.integers(0, 20))
def test_batch_equals_its_rows_one_by_one(student, teacher, texts, limit):
    aligner = make_aligner(student, teacher)
    batch = aligner.align_batch(texts, max_student_tokens=limit, max_teacher_tokens=limit)
    assert len(batch) == len(texts)
    for text, result in zip(texts, batch):
        assert same(result, aligner.align(text, max_student_tokens=limit, max_teacher_tokens=limit))


@quick
@given(families, families, hard_texts, st.integers(0, 7), st.integers(0, 7), st.booleans())
def test_padding_of_any_id_changes_nothing(student, teacher, text, before, after, valid):
    aligner = make_aligner(student, teacher)
    bare = aligner.align_ids(aligner.tokenize_student(text).ids, aligner.tokenize_teacher(text).ids)
    pad = aligner.student.roles["eos"] if valid else -100
    ids = np.concatenate([np.full(before, pad), bare.student_ids, np.full(after, pad)])
    mask = np.zeros(len(ids), np.int64)
    mask[before : before + len(bare.student_ids)] = 1
    padded = aligner.align_ids(ids.tolist(), bare.teacher_ids, student_mask=mask.tolist())
    assert np.array_equal(padded.student_chunk[mask == 1], bare.student_chunk)
    assert (padded.student_chunk[mask == 0] == -1).all()
    assert np.array_equal(padded.teacher_chunk, bare.teacher_chunk)
    assert padded.stop_pairs == [(left + before, right) for left, right in bare.stop_pairs]
    assert (padded.exact, padded.method) == (bare.exact, bare.method)


@quick
@given(lossless, lossless, plain_texts, st.integers(0, 30), st.integers(0, 30))
def test_cut_row_ends_at_the_last_shared_boundary(student, teacher, text, left, right):
    aligner = make_aligner(student, teacher)
    whole = aligner.align(text)
    result = aligner.align(text, max_student_tokens=left, max_teacher_tokens=right)
    check_numbers(result)
    sizes = len(result.student_ids), len(result.teacher_ids)
    assert sizes[0] <= left
    assert sizes[1] <= right
    assert result.dropped == (len(whole.student_ids) - sizes[0], len(whole.teacher_ids) - sizes[1])
    assert np.array_equal(result.student_chunk, whole.student_chunk[: sizes[0]])
    assert np.array_equal(result.teacher_chunk, whole.teacher_chunk[: sizes[1]])
    assert result.exact
    kept = result.num_chunks
    if kept < whole.num_chunks:
        ends = [np.flatnonzero(chunk == kept)[-1] + 1 for chunk in (whole.student_chunk, whole.teacher_chunk)]
        assert ends[0] > left or ends[1] > right


@quick
@given(families, families, hard_texts, st.integers(1, 30), st.integers(1, 30))
def test_cut_keeps_first_chunks_and_half_of_a_limit(student, teacher, text, left, right):
    whole = make_aligner(student, teacher).align(text)
    result = whole.cut(left, right)
    check_numbers(result)
    rows = []
    for side, limit in (("student", left), ("teacher", right)):
        ids, all_ids, chunk, all_chunks = (
            getattr(row, f"{side}_{name}") for name in ("ids", "chunk") for row in (result, whole)
        )
        size = len(ids)
        assert size <= limit
        assert np.array_equal(ids, all_ids[:size])
        numbers = all_chunks[:size]
        assert np.array_equal(chunk, np.where(numbers < result.num_chunks, numbers, -1))
        rows.append((len(all_ids), limit, size))
    too_long = [row for row in rows if row[0] > row[1]]
    assert whole.exact or not too_long or any(2 * size >= limit for _, limit, size in too_long)
    assert all(place[0] <= rows[0][2] and place[1] <= rows[1][2] for place in result.lossy_ends.tolist())
    assert same(whole.swapped().cut(right, left), result.swapped())


@quick
@given(families, families, hard_texts)
def test_fast_ids_change_no_result(student, teacher, text):
    fast, slow = make_aligner(student, teacher), make_aligner(student, teacher, fast_ids=False)
    assert same(fast.align(text), slow.align(text))
    ids = fast.tokenize_student(text).ids, fast.tokenize_teacher(text).ids
    assert same(fast.align_ids(*ids), slow.align_ids(*ids))


@quick
@given(families, families, hard_texts, st.sampled_from(["bytes", "offsets", "dp"]))
def test_every_method_gives_correct_chunks_and_exact_flag(student, teacher, text, method):
    result, best = make_aligner(student, teacher, method).align(text), make_aligner(student, teacher).align(text)
    check_numbers(result)
    check_chunks_spell_alike(family(student), family(teacher), result)
    assert result.method == method
    assert result.exact == best.exact


@quick
@given(lossless, lossless, plain_texts, st.data())
def test_ids_with_one_changed_are_never_exact(student, teacher, text, data):
    aligner = make_aligner(student, teacher)
    result = aligner.align(text)
    places = np.flatnonzero(result.student_chunk >= 0)
    if not len(places):
        return
    place = data.draw(st.sampled_from(places.tolist()))
    other = data.draw(st.integers(0, aligner.student.size - 1))
    if aligner.student.token_bytes(other).strip() == aligner.student.token_bytes(result.student_ids[place]).strip():
        return
    changed = result.student_ids.copy()
    changed[place] = other
    again = aligner.align_ids(changed, result.teacher_ids)
    check_numbers(again)
    assert not again.exact
    check_chunks_spell_alike(family(student), family(teacher), again)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_aligns_the_sentences(name):
    aligner = make_aligner(name, "byte_level")
    result = [aligner.align(text) for text in SENTENCES]
    assert all(row.num_chunks > 3 for row in result)
    assert all(row.exact for row in result) == (
        name != "wordpiece"
    )  # unigram, which is lossy, knows every letter of these
    assert aligner.align("\u2603 and on").exact == (name in LOSSLESS)
