"""The checks of alignments pass for the aligner's results, and each detects the fault that it is for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distill_rl.align import Alignment, TokenAligner
from distill_rl.align import verify as checks
from distill_rl.align.chats import Chat
from distill_rl.align.verify import check_bound, check_each
from tests.helpers.align import family
from tests.helpers.tokenizers import seeded_words, tiny_tokenizer

STUDENT, TEACHER = tiny_tokenizer(320, seed=1), tiny_tokenizer(420, seed=2)
ALIGNER = TokenAligner(STUDENT, TEACHER)
TEXT = " ".join(seeded_words(1, 40)) + " 中é🙂 12345"
FOUND = ALIGNER.align(TEXT)


def test_the_text_has_several_kinds_of_chunks() -> None:
    assert FOUND.exact
    assert sum(count > 0 for count in FOUND.counts.values()) >= 3


def test_all_checks_pass_on_different_tokenizers() -> None:
    texts = [TEXT, "", "x", "\u2581 and \r\n\t  tabs", " ".join(seeded_words(7, 200))]
    result = checks.check_alignment(ALIGNER, STUDENT, TEACHER, texts)
    assert [check.name for check in result if not check.passed] == []
    assert len({check.name for check in result}) == len(result) == 7


def moved(result: Alignment) -> Alignment:
    """Moves the first token of a student's chunk with several tokens to the chunk before it."""
    sizes = np.bincount(result.student_chunk[result.student_chunk >= 0])
    number = next(number for number in range(1, len(sizes)) if sizes[number] > 1)
    chunks = result.student_chunk.copy()
    chunks[np.flatnonzero(chunks == number)[0]] = number - 1
    return replace(result, student_chunk=chunks)


def merged(result: Alignment) -> Alignment:
    """Merges the first two chunks."""
    sides = (np.where(side > 0, side - 1, side) for side in (result.student_chunk, result.teacher_chunk))
    student, teacher = sides
    return replace(result, student_chunk=student, teacher_chunk=teacher, num_chunks=result.num_chunks - 1)


def holed(result: Alignment) -> Alignment:
    return replace(
        result, teacher_chunk=np.where(result.teacher_chunk > 1, result.teacher_chunk + 1, result.teacher_chunk)
    )


def test_token_in_the_wrong_chunk_is_found() -> None:
    assert checks.bytes_problem(ALIGNER, TEXT, FOUND) is None
    assert "for the student" in (checks.bytes_problem(ALIGNER, TEXT, moved(FOUND)) or "")


def test_chunks_of_another_text_are_found() -> None:
    assert checks.bytes_problem(ALIGNER, "another text", FOUND) is not None


def test_merged_chunks_are_found() -> None:
    assert checks.boundary_problem(ALIGNER, TEXT, FOUND) is None
    assert "inside a chunk" in (checks.boundary_problem(ALIGNER, TEXT, merged(FOUND)) or "")


def test_gap_in_the_chunk_indices_is_found() -> None:
    assert checks.order_problem(FOUND) is None
    assert "teacher" in (checks.order_problem(holed(FOUND)) or "")


def test_missing_chunk_indices_are_found() -> None:
    assert checks.order_problem(replace(FOUND, num_chunks=FOUND.num_chunks + 1)) is not None
    nothing = np.full_like(FOUND.student_chunk, -1)
    assert "has none" in (checks.order_problem(replace(FOUND, student_chunk=nothing)) or "")


@pytest.mark.parametrize("change", [moved, merged, holed])
def test_different_alignments_are_found(change) -> None:
    assert checks.difference(FOUND, ALIGNER.align(TEXT)) is None
    assert checks.difference(FOUND, change(FOUND)) is not None


def test_exactness_alone_is_a_difference_and_named() -> None:
    assert checks.difference(FOUND, replace(FOUND, exact=not FOUND.exact)) == "exact is True, but False"


def test_different_tokenizers_are_no_identity() -> None:
    assert checks.identity_problem(TokenAligner(STUDENT, STUDENT).align(TEXT)) is None
    assert checks.identity_problem(FOUND) is not None


def test_ignored_padding_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.padding_problem(ALIGNER, FOUND) is None
    plain = TokenAligner.align_ids
    monkeypatch.setattr(
        TokenAligner, "align_ids", lambda self, student_ids, teacher_ids, **masks: plain(self, student_ids, teacher_ids)
    )
    assert checks.padding_problem(ALIGNER, FOUND) is not None


def test_check_each_counts_failures_and_names_the_first() -> None:
    check = check_each("holds", [None, "bad", None, "worse"], "rows")
    assert (check.passed, check.detail) == (False, "2 of 4 rows fail, first at index 1: bad")
    assert check_each("holds", [None, None], "rows").detail == "2 rows"


def test_check_of_nothing_neither_passes_nor_fails() -> None:
    check = check_each("holds", [], "rows")
    assert (check.passed, check.detail) == (None, "0 rows")
    result = [*checks.check_alignment(ALIGNER, STUDENT, TEACHER, []), *checks.check_chats(ALIGNER, [])]
    assert len(result) == 9
    assert all(check.passed is None for check in result)


def test_without_exact_rows_their_checks_stay_open() -> None:
    lossy = family("wordpiece")
    result = checks.check_alignment(TokenAligner(STUDENT, lossy), STUDENT, lossy, ["The cat SAT", "On 12 MATS"])
    assert {check.name: check.detail for check in result if check.passed is None} == {
        "a chunk spells the same bytes of the text on both sides": "0 exact rows",
        "no chunk could be divided": "0 exact rows",
    }
    assert all(check.passed is not False for check in result)
    chats = [Chat([{"role": "user", "content": "The cat"}, {"role": "assistant", "content": "SAT"}])]
    first, _ = checks.check_chats(TokenAligner(STUDENT, lossy), chats)
    assert (first.passed, first.detail) == (None, "0 exact chats")


@pytest.mark.parametrize(("value", "passed"), [(0.0, True), (1e-6, True), (2e-6, False), (float("nan"), False)])
def test_bound_is_inclusive_and_fails_for_nan(value: float, passed: bool) -> None:
    assert check_bound("small", [0.0, value], 1e-6, "off by").passed is passed
