"""Documents are tokenised and aligned one by one, so a batch gives the same in parts."""

from __future__ import annotations

import numpy as np
import pytest

from distill_rl.config.schema import AlignerConfig
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher, DocumentAligner
from distill_rl.data.batch.tokenization import Tokenization
from tests.helpers.corpus import corpus_rows
from tests.helpers.tokenizers import tiny_tokenizer


@pytest.mark.parametrize("messages", [False, True])
def test_parts_of_a_batch_give_what_the_whole_gives(messages):
    student, teacher = tiny_tokenizer(), tiny_tokenizer(600, seed=7)
    tokenization = Tokenization(
        student, format="auto", loss_on="assistant" if messages else "all", max_length=160, untaught_stops=True
    )
    teachers = {1: CrossTokenizerTeacher.of("t", student, teacher, AlignerConfig())}
    aligner = DocumentAligner(tokenization, teachers, {1: 160})
    documents = [{"row": i, **row} for i, row in enumerate(corpus_rows(9, 4, messages))]
    whole = aligner.align(documents, skip=(2, 7))
    parts = [aligner.align(documents[:5], skip=(2, 7)), aligner.align(documents[5:], skip=(2, 7))]
    encoded = [tokens for part in parts for tokens in part.encoded]
    alignments = [alignment for part in parts for alignment in part.alignments[1]]
    assert sum(alignment.num_chunks for alignment in alignments) > 50
    for tokens, expected in zip(encoded, whole.encoded, strict=True):
        assert np.array_equal(tokens.input_ids, expected.input_ids)
        assert np.array_equal(tokens.label_mask, expected.label_mask)
    for alignment, expected in zip(alignments, whole.alignments[1], strict=True):
        for name in ("student_ids", "teacher_ids", "student_chunk", "teacher_chunk"):
            assert np.array_equal(getattr(alignment, name), getattr(expected, name))
