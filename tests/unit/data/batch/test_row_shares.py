"""Batches of teachers that are chosen by row: rows, weights and chunks, with one tokenizer and with two."""

from __future__ import annotations

import numpy as np
import pytest

from distill_rl.config.schema import AlignerConfig, DataConfig
from distill_rl.data.batch.collate import BatchPlan, BatchSharding
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher, StoredTargets
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.data.routing import WEIGHTS
from distill_rl.types import IGNORE_INDEX, Cursor, DocumentBatch
from tests.helpers.corpus import corpus_rows
from tests.helpers.tokenizers import tiny_tokenizer

WIDTH, COUNT = 40, 24
WEIGHTS_OF = [(1.0, 0.0, 1.0), (0.0, 2.0, 1.0), (0.5, 2.0, 1.0), (0.0, 0.0, 1.0)]
"""Of documents 0, 1, 2, 3, 4 = 0, ...: for two teachers that are chosen by row and one that is not."""


def documents(weights: list[tuple[float, ...]] | None = WEIGHTS_OF) -> tuple[dict, ...]:
    rows = corpus_rows(COUNT, seed=2)
    texts = [" ".join(row["text"].split()[: 2 + i % 5]) if i % 4 else row["text"] for i, row in enumerate(rows)]
    plain = [{"row": i, "text": text} for i, text in enumerate(texts)]
    if weights is None:
        return tuple(plain)
    return tuple(document | {WEIGHTS: weights[i % len(weights)]} for i, document in enumerate(plain))


def builder(*, packing: bool, crossing: bool, dp: int = 1, split: bool = False) -> BatchBuilder:
    """Three teachers, of which the second has a tokenizer of its own if `crossing`."""
    student = tiny_tokenizer(320)
    other = CrossTokenizerTeacher.of("t1", student, tiny_tokenizer(600, seed=7), AlignerConfig()) if crossing else None
    plan = BatchPlan(BatchSharding(dp, 2), (BatchSharding(1, 2),) * 3, WIDTH, packing, pad_id=7, split=split)
    tokenization = Tokenization(student, DataConfig(max_length=WIDTH), format="text")
    return BatchBuilder(tokenization, plan, [None, other, None], stored=StoredTargets(frozenset({0, 1, 2})))


@pytest.mark.parametrize("split", [False, True], ids=["cut", "split"])
@pytest.mark.parametrize("crossing", [False, True], ids=["one tokenizer", "two"])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_rows_are_asked_for_as_a_whole(packing, crossing, split):
    made = builder(packing=packing, crossing=crossing, split=split)
    batch = DocumentBatch(0, documents(), Cursor())
    info, (student,), teachers = made.build(batch)
    assert info.num_documents == COUNT
    labelled = student.rows.labels != IGNORE_INDEX
    first, second, third = (part.weights for part in student.teachers)
    assert third is None
    assert teachers[2][0].asked is None
    for i, weights in enumerate((first, second)):
        assert weights is not None
        (part,) = teachers[i]
        assert part.asked is not None
        assert not weights.of_tokens[~labelled].any()
        assert weights.total == pytest.approx(weights.of_tokens.sum(dtype=np.float64))
        assert weights.num_labels == np.count_nonzero(weights.of_tokens)
        of_rows = [set(row[mask].tolist()) for row, mask in zip(weights.of_tokens, labelled)]
        # A row is asked for, with all of its labels, or not at all.
        assert [bool(found - {0.0}) for found in of_rows] == part.asked.tolist()
        assert all(found == {0.0} or 0.0 not in found for found in of_rows if found)
        assert {weight for found in of_rows for weight in found} == {each[i] for each in WEIGHTS_OF}
        for asked, pieces in zip(part.asked, part.pieces):
            assert asked == bool(pieces), "a store is told of what is asked for"
    if packing:
        docs_per_row = [(row == 0).sum() for row in student.rows.position_ids]
        assert max(docs_per_row) > 2


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_chunks_are_those_of_asked_documents(packing):
    made = builder(packing=packing, crossing=True)
    info, (student,), teachers = made.build(DocumentBatch(0, documents(), Cursor()))
    chunks, weights = student.teachers[1].chunks, student.teachers[1].weights
    assert chunks is not None
    assert weights is not None
    assert not (chunks.student[weights.of_tokens == 0] >= 0).any()
    (theirs,) = teachers[1]
    assert not (chunks.teacher[~theirs.asked] >= 0).any()
    alone = tuple(document for document in documents(None) if WEIGHTS_OF[document["row"] % 4][1] > 0)
    plain, (part,), _ = made.build(DocumentBatch(0, alone, Cursor()))
    assert part.teachers[1].chunks.num_chunks == chunks.num_chunks
    assert chunks.weighted == (2.0 * chunks.num_chunks, 2.0 * chunks.num_one_to_one)
    (ours,), (wanted,) = info.alignments, plain.alignments
    assert (ours.methods, ours.num_exact, ours.num_covered) == (wanted.methods, wanted.num_exact, wanted.num_covered)
    assert ours.num_labels == weights.num_labels == plain.num_labels


def test_documents_of_no_other_tokenizer_are_read_as_without_it():
    nobody = documents([(1.0, 0.0, 1.0)])
    _, (found,), _ = builder(packing=False, crossing=True).build(DocumentBatch(0, nobody, Cursor()))
    _, (wanted,), _ = builder(packing=False, crossing=False).build(DocumentBatch(0, documents(None), Cursor()))
    assert np.array_equal(found.rows.input_ids, wanted.rows.input_ids)
    assert np.array_equal(found.rows.labels, wanted.rows.labels)


def test_weights_of_one_leave_the_batch_as_it_is():
    made = builder(packing=True, crossing=True)
    _, (found,), theirs = made.build(DocumentBatch(0, documents([(1.0, 1.0, 1.0)]), Cursor()))
    _, (wanted,), others = made.build(DocumentBatch(0, documents(None), Cursor()))
    assert (wanted.by_row, found.by_row) == (False, True)
    for batch in (wanted, found):
        assert [part.weights for part in batch.teachers] == [None, None, None]
    assert np.array_equal(found.rows.input_ids, wanted.rows.input_ids)
    for one, other in zip(theirs, others):
        assert one[0].asked is None
        assert np.array_equal(one[0].rows.input_ids, other[0].rows.input_ids)


def test_ranks_get_the_weights_of_their_rows():
    whole = builder(packing=True, crossing=False).build(DocumentBatch(0, documents(), Cursor()))[1][0]
    parts = builder(packing=True, crossing=False, dp=2).build(DocumentBatch(0, documents(), Cursor()))[1]
    for i in range(2):
        joined = np.concatenate([part.teachers[i].weights.of_tokens for part in parts])
        assert np.array_equal(joined[: len(whole.rows.labels)], whole.teachers[i].weights.of_tokens)
        assert {part.teachers[i].weights.total for part in parts} == {whole.teachers[i].weights.total}
