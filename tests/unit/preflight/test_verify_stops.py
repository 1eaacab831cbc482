"""The checks of stop tokens pass for a built projection, and fail if the student could not learn to stop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distill_rl.align import TokenAligner
from distill_rl.align.chats import Chat
from distill_rl.align.projection import Projection, build_projection
from distill_rl.align.verify import PropertyCheck, align_training_rows
from distill_rl.preflight.verify import check_stops
from tests.helpers.tokenizers import TURN_END, tiny_tokenizer

CHAT = [{"role": "user", "content": "kalo mi"}, {"role": "assistant", "content": "ter an"}]


@pytest.fixture(scope="module")
def aligner() -> TokenAligner:
    student, teacher = tiny_tokenizer(320), tiny_tokenizer(330, seed=1)
    return TokenAligner(student, teacher)


@pytest.fixture(scope="module")
def projection() -> Projection:
    return build_projection(tiny_tokenizer(320), tiny_tokenizer(330, seed=1), student_columns=320, teacher_columns=330)


def checked(aligner: TokenAligner, projection: Projection) -> list[PropertyCheck]:
    return check_stops(aligner, projection, align_training_rows(aligner, [], [Chat(CHAT)]))


def test_built_projection_passes(aligner: TokenAligner, projection: Projection) -> None:
    results = checked(aligner, projection)
    assert [check.passed for check in results] == [True] * 3
    assert results[0].detail == "2 paired stop tokens"


def test_projection_without_a_paired_stop_fails(aligner: TokenAligner, projection: Projection) -> None:
    (turn,) = tiny_tokenizer(330, seed=1).convert_tokens_to_ids([TURN_END])
    eos_only = projection.teacher_stops[projection.teacher_stops != turn]
    first, *_ = checked(aligner, replace(projection, teacher_stops=eos_only))
    assert first.passed is False
    assert f"the teacher's id {turn} is paired as a stop; the projection's are {eos_only.tolist()}" in first.detail


def test_stop_mapped_to_text_fails(aligner: TokenAligner, projection: Projection) -> None:
    stop = int(projection.student_stops[0])
    indices = projection.indices.copy()
    indices[projection.indptr[stop]] = 300
    _, second, _ = checked(aligner, replace(projection, indices=indices))
    assert second.passed is False
    assert f"the projection maps {stop} to [300], which are no stops" in second.detail


def test_certain_teacher_lowers_a_stop_without_stop_tokens(aligner: TokenAligner, projection: Projection) -> None:
    """The third check detects this: if the losses know no stop tokens, KD lowers a stop that is not in common."""
    turn = [tiny_tokenizer(*size_and_seed).convert_tokens_to_ids(TURN_END) for size_and_seed in ((320, 0), (330, 1))]
    apart = ~((projection.student_common == turn[0]) | (projection.teacher_common == turn[1]))
    nothing = np.zeros(0, np.int32)
    broken = replace(
        projection,
        student_stops=nothing,
        teacher_stops=nothing,
        student_common=projection.student_common[apart],
        teacher_common=projection.teacher_common[apart],
    )
    *_, third = checked(aligner, broken)
    assert third.passed is False
    assert f"moves the logit of the student's id {turn[0]} by -" in third.detail
