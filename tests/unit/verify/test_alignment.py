"""The checks on alignments pass on what the aligner gives, and each finds the fault that it is there for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distill_rl.align import Alignment, TokenAligner
from distill_rl.verify import alignment as checks
from distill_rl.verify.check import check_bound, check_each
from tests.helpers.align import family
from tests.helpers.tokenizers import seeded_words, tiny_tokenizer

STUDENT, TEACHER = tiny_tokenizer(320, seed=1), tiny_tokenizer(420, seed=2)
ALIGNER = TokenAligner(STUDENT, TEACHER)
TEXT = " ".join(seeded_words(1, 40)) + " 中é🙂 12345"
FOUND = ALIGNER.align(TEXT)


def test_the_text_has_chunks_of_several_kinds_so_that_the_checks_have_something_to_look_at() -> None:
    assert FOUND.exact
    assert sum(count > 0 for count in FOUND.counts.values()) >= 3


def test_all_checks_pass_on_tokenizers_that_differ() -> None:
    texts = [TEXT, "", "x", "\u2581 and \r\n\t  tabs", " ".join(seeded_words(7, 200))]
    found = checks.check_alignment(ALIGNER, STUDENT, TEACHER, texts)
    assert [check.name for check in found if not check.passed] == []
    assert len({check.name for check in found}) == len(found) == 7


def moved(found: Alignment) -> Alignment:
    """The first token of a student's chunk of several given to the chunk before it."""
    sizes = np.bincount(found.student_chunk[found.student_chunk >= 0])
    number = next(number for number in range(1, len(sizes)) if sizes[number] > 1)
    chunks = found.student_chunk.copy()
    chunks[np.flatnonzero(chunks == number)[0]] = number - 1
    return replace(found, student_chunk=chunks)


def merged(found: Alignment) -> Alignment:
    """The first two chunks taken for one."""
    sides = (np.where(side > 0, side - 1, side) for side in (found.student_chunk, found.teacher_chunk))
    student, teacher = sides
    return replace(found, student_chunk=student, teacher_chunk=teacher, num_chunks=found.num_chunks - 1)


def holed(found: Alignment) -> Alignment:
    return replace(found, teacher_chunk=np.where(found.teacher_chunk > 1, found.teacher_chunk + 1, found.teacher_chunk))


def test_a_token_in_the_wrong_chunk_is_found_by_its_bytes() -> None:
    assert checks.bytes_problem(ALIGNER, TEXT, FOUND) is None
    assert "for the student" in (checks.bytes_problem(ALIGNER, TEXT, moved(FOUND)) or "")


def test_chunks_that_do_not_spell_the_text_are_found() -> None:
    assert checks.bytes_problem(ALIGNER, "another text", FOUND) is not None


def test_two_chunks_taken_for_one_are_found_by_the_boundary_inside() -> None:
    assert checks.boundary_problem(ALIGNER, TEXT, FOUND) is None
    assert "inside a chunk" in (checks.boundary_problem(ALIGNER, TEXT, merged(FOUND)) or "")


def test_a_hole_in_the_numbers_is_found() -> None:
    assert checks.order_problem(FOUND) is None
    assert "teacher" in (checks.order_problem(holed(FOUND)) or "")


def test_numbers_that_stop_early_or_are_missing_are_found() -> None:
    assert checks.order_problem(replace(FOUND, num_chunks=FOUND.num_chunks + 1)) is not None
    nothing = np.full_like(FOUND.student_chunk, -1)
    assert "has none" in (checks.order_problem(replace(FOUND, student_chunk=nothing)) or "")


@pytest.mark.parametrize("change", [moved, merged, holed])
def test_two_alignments_that_differ_are_told_apart(change) -> None:
    assert checks.difference(FOUND, ALIGNER.align(TEXT)) is None
    assert checks.difference(FOUND, change(FOUND)) is not None


def test_a_pair_that_differs_is_no_identity() -> None:
    assert checks.identity_problem(TokenAligner(STUDENT, STUDENT).align(TEXT)) is None
    assert checks.identity_problem(FOUND) is not None


def test_padding_that_is_taken_for_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.padding_problem(ALIGNER, FOUND) is None
    plain = TokenAligner.align_ids
    monkeypatch.setattr(TokenAligner, "align_ids", lambda self, ours, theirs, **masks: plain(self, ours, theirs))
    assert checks.padding_problem(ALIGNER, FOUND) is not None


def test_a_check_of_many_names_the_first_fault_and_counts_them() -> None:
    check = check_each("holds", [None, "bad", None, "worse"], "rows")
    assert (check.passed, check.detail) == (False, "2 of 4 rows fail, first at index 1: bad")
    assert check_each("holds", [None, None], "rows").detail == "2 rows"


def test_a_check_of_nothing_neither_passes_nor_fails() -> None:
    check = check_each("holds", [], "rows")
    assert (check.passed, check.detail) == (None, "0 rows")
    found = [*checks.check_alignment(ALIGNER, STUDENT, TEACHER, []), *checks.check_chats(ALIGNER, [])]
    assert len(found) == 9
    assert all(check.passed is None for check in found)


def test_rows_of_which_none_is_exact_leave_those_checks_open() -> None:
    lossy = family("wordpiece")
    found = checks.check_alignment(TokenAligner(STUDENT, lossy), STUDENT, lossy, ["The cat SAT", "On 12 MATS"])
    assert {check.name: check.detail for check in found if check.passed is None} == {
        "a chunk spells the same bytes of the text on both sides": "0 exact rows",
        "no chunk could be divided": "0 exact rows",
    }
    assert all(check.passed is not False for check in found)
    chats = [[{"role": "user", "content": "The cat"}, {"role": "assistant", "content": "SAT"}]]
    first, _ = checks.check_chats(TokenAligner(STUDENT, lossy), chats)
    assert (first.passed, first.detail) == (None, "0 exact chats")


@pytest.mark.parametrize(("value", "passed"), [(0.0, True), (1e-6, True), (2e-6, False), (float("nan"), False)])
def test_a_bound_holds_up_to_itself_and_never_for_nan(value: float, passed: bool) -> None:
    assert check_bound("small", value, 1e-6, "off by").passed is passed
