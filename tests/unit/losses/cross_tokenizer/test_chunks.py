"""Chunks and bridges made of what the aligner finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distill_rl.align import Alignment, TokenAligner
from distill_rl.align.projection import build_projection
from distill_rl.config.schema import AlignerConfig, DataConfig
from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.losses import Chunks, VocabularyProjection
from distill_rl.types import Cursor, DocumentBatch
from tests.helpers.tokenizers import tiny_tokenizer

CHATS = [
    [{"role": "user", "content": f"kalo {word}"}, {"role": "assistant", "content": f"ter an {word} mi mi"}]
    for word in ("sol", "ru ing est", "und", "oo be")
]


def aligned(student: list[int], teacher: list[int], stops: list[tuple[int, int]] | None = None) -> Alignment:
    """Of chunk numbers; ids are places."""
    sides = [np.array(numbers, np.int32) for numbers in (student, teacher)]
    ids = [np.arange(len(side), dtype=np.int32) for side in sides]
    return Alignment(*ids, *sides, int(sides[0].max()) + 1, "bytes", True, stop_pairs=stops or [])


def test_a_row_belongs_to_the_chunk_of_the_token_that_it_predicts() -> None:
    found = Chunks.from_alignment(aligned([-1, 0, 0, 1, -1, 2], [-1, 0, 1, 1, 2]))
    assert found.student.tolist() == [0, 0, 1, -1, 2, -1]
    assert found.teacher.tolist() == [0, 1, 1, 2, -1]
    assert found.count == 3


def test_a_chunk_that_nobody_predicts_is_left_out_on_both_sides() -> None:
    found = Chunks.from_alignment(aligned([0, 1, 2], [-1, 0, 1, 2]))
    assert found.student.tolist() == [0, 1, -1]
    assert found.teacher.tolist() == [-1, 0, 1, -1]
    assert found.count == 2


def test_stop_pairs_are_chunks_unless_that_is_declined() -> None:
    one = aligned([-1, 0, -1], [-1, 0, 0, -1], [(2, 3)])
    assert Chunks.from_alignment(one).student.tolist() == [0, 1, -1]
    assert Chunks.from_alignment(one).teacher.tolist() == [0, 0, 1, -1]
    assert Chunks.from_alignment(one, stops=False).count == 1


def test_several_texts_are_rows_of_one_length_numbered_through() -> None:
    texts = aligned([-1, 0], [-1, 0, 0]), aligned([-1, 0, 1], [-1, 0, 1])
    found = Chunks.from_alignment(*texts, teacher_length=4)
    assert found.student.tolist() == [0, -1, -1, 1, 2, -1]
    assert found.teacher.tolist() == [0, 0, -1, -1, 1, 2, -1, -1]
    assert found.count == 3


def test_a_text_that_is_longer_than_its_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="student_length: must hold the longest text, 3 tokens; got 2"):
        Chunks.from_alignment(aligned([-1, 0, 1], [-1, 0, 1]), student_length=2)


def test_they_are_the_chunks_that_a_run_compares() -> None:
    student, teacher = tiny_tokenizer(320), tiny_tokenizer(600, seed=7)
    plan = BatchPlan(BatchSharding(1, 4), (BatchSharding(1, 4),), 64, packing=False, pad_id=2)
    tokenization = Tokenization(student, DataConfig(max_length=64), format="messages")
    documents = tuple({"row": row, "messages": chat} for row, chat in enumerate(CHATS))
    other = CrossTokenizerTeacher.of("t0", student, teacher, AlignerConfig())
    _, (ours,), _ = BatchBuilder(tokenization, plan, [other]).build(DocumentBatch(0, documents, Cursor()))
    of_run = ours.teachers[0].chunks
    alignments = [TokenAligner(student, teacher).align_messages(chat) for chat in CHATS]
    alignments.sort(key=lambda each: -max(len(each.student_ids), len(each.teacher_ids)))  # as the rows of a run
    found = Chunks.from_alignment(
        *alignments,
        student_length=of_run.student.shape[1],
        teacher_length=of_run.teacher.shape[1],
    )
    assert found.count == of_run.num_chunks
    assert torch.equal(found.student >= 0, torch.from_numpy(of_run.student.reshape(-1)) >= 0)
    assert torch.equal(found.teacher >= 0, torch.from_numpy(of_run.teacher.reshape(-1)) >= 0)


def test_a_bridge_is_its_projection() -> None:
    student, teacher = tiny_tokenizer(320), tiny_tokenizer(600, seed=7)
    projection = build_projection(student, teacher, student_columns=320, teacher_columns=640)
    found = VocabularyProjection.from_projection(projection)
    assert (found.num_student, found.num_teacher) == (320, 640)
    names = ("indptr", "indices", "values", "student_common", "teacher_common", "student_stops", "teacher_stops")
    for name in names:
        assert getattr(found, name).tolist() == getattr(projection, name).tolist()
    assert len(found.student_stops) == 2  # </s>, and <|end|> of the chat template
