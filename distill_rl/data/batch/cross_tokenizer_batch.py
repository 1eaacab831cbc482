"""One global batch of documents → rows for the student and the teachers, and the chunks that they share.

`BatchBuilder.align` handles each document on its own, so that the documents of a batch can be divided among processes;
`BatchBuilder.assemble` makes the rows of the batch from all of them. With one tokenizer, they tokenise and lay out. With
other tokenizers among the teachers there are five steps, of which `align` does the first three:

1. Tokenise: the same text with the student's tokenizer and with each teacher's.
2. Align: `TokenAligner.pair` cuts both sides at the last boundary they share within `max_length`, and gives every token
   the number of its chunk, a stretch of text that both sides spell. The student has one row for all teachers, so it is
   cut to the shortest of these results, and each teacher's side is cut again to match (`Alignment.cut`). If long
   documents are to be split, all tokens are aligned, and cut into pieces at boundaries that all sides share
   (`Splitter`); each piece is then handled like a document.
3. Select: chunks that cannot be trained on are dropped, paired stop tokens become chunks of one token each, and what is
   left is numbered from 0 in each document (`Alignment.trainable`). A number still belongs to a *token*.
4. Lay out: `collate.arrange` decides which documents share a row, so that they fit on every side. Row i of a teacher
   holds the same documents as row i of the student, in the same order, and chunks are numbered on from document to
   document.
5. Shift: position p predicts token p + 1, so the chunk number of token p + 1 is written at position p (`_chunk_rows`),
   just as `collate.lay_out` shifts labels. From here on a number belongs to a *prediction*, and the workers and losses
   shift nothing.

`losses.cross_tokenizer.Chunks.from_alignment` does steps 3 and 5 for callers of the losses who have alignments and no
batch; it makes flat tensors, numbered over all texts, and has no label mask.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from distill_rl.data import routing
from distill_rl.data.batch.collate import BatchPlan, arrange, divide, lay_out, pad_id
from distill_rl.data.batch.document_aligner import (
    NONE_STORED,
    AlignedDocument,
    AlignedPiece,
    CrossTokenizerTeacher,
    DocumentAligner,
    StoredTargets,
)
from distill_rl.data.batch.tokenization import Tokenization, unknown_token
from distill_rl.types import (
    IGNORE_INDEX,
    AlignmentInfo,
    BatchInfo,
    ChunkRows,
    Cursor,
    DocumentBatch,
    LeftOut,
    RankBatch,
    Row,
    TeacherPart,
    TokenRows,
    TokenWeights,
)


class BatchBuilder:
    """Builds every rank's part of a batch.

    Args:
        tokenization: the student's.
        plan: how rows are laid out and divided.
        teachers: one per running teacher; None for a teacher that reads the student's rows.
        stored: of the teachers whose targets are read or stored.
    """

    def __init__(
        self,
        tokenization: Tokenization,
        plan: BatchPlan,
        teachers: Sequence[CrossTokenizerTeacher | None] = (),
        *,
        stored: StoredTargets = NONE_STORED,
    ):
        self.tokenization, self._plan, self._stored = tokenization, plan, stored
        self.teachers = {i: teacher for i, teacher in enumerate(teachers) if teacher is not None}
        """Those with their own tokenizer, by index."""
        lengths = {i: plan.length_of(i) for i in self.teachers}
        self._aligner = DocumentAligner(tokenization, self.teachers, lengths, split=plan.split, stored=stored)

    def build(
        self, batch: DocumentBatch, skip: Collection[Row] = ()
    ) -> tuple[BatchInfo, list[RankBatch], list[list[RankBatch]]]:
        """Does `align` and `assemble` for a batch; for callers that have no processes to divide it among.

        Returns:
            As `assemble`, with the sub-batches of all ranks in one list per model, rank by rank.
        """
        began = time.perf_counter()
        info, student, teachers = self.assemble(batch.index, batch.cursor, [self.align(batch.documents, skip)])
        info = replace(info, seconds=time.perf_counter() - began)
        return info, [*chain(*student)], [[*chain(*teacher)] for teacher in teachers]

    def align(self, documents: Sequence[Mapping[str, Any]], skip: Collection[Row] = ()) -> list[AlignedDocument]:
        """Tokenises documents and, if any teacher has its own tokenizer, aligns them (steps 1 to 3); deterministic.

        If any teacher has its own tokenizer, a document that fails for another reason than a DataError is left out and
        says why (`bad`); otherwise its error is raised.

        Args:
            skip: rows of documents to leave out; they count as empty.

        Raises:
            DataError: a document that the user has to fix; names its row.
            ValueError: a document with a token that some model which reads the student's rows does not know.
        """
        found = self._aligner.align(documents, skip)
        known = self._plan.known_ids
        for document in found if known else ():
            ids = np.concatenate([piece.encoded.input_ids for piece in document.pieces])
            if problem := unknown_token(f"row {document.row}", ids.tolist(), known, self.tokenization.tokenizer):
                raise ValueError(str(problem))
        return found

    def assemble(
        self, index: int, cursor: Cursor, parts: Sequence[Sequence[AlignedDocument]]
    ) -> tuple[BatchInfo, list[list[RankBatch]], list[list[list[RankBatch]]]]:
        """Packs or pads the documents of one global batch and divides the rows (steps 4 and 5); deterministic.

        The result depends on the documents alone, and not on how they are divided into parts.

        Args:
            index, cursor: of the batch.
            parts: its documents in order, in one part or several.

        Returns:
            A summary for the driver; the student's rows as a list of sub-batches for each data-parallel rank; the same
            for each teacher. The student's parts carry the chunks. The parts of a sub-batch are contiguous runs of
            equal size, cut from the same rows; a teacher with its own tokenizer has its own rows, which hold the same
            documents.
        """
        began = time.perf_counter()
        documents = [document for part in parts for document in part]
        pieces = [piece for document in documents for piece in document.pieces]
        shares = RowShares.of(documents)
        members = self.members(documents)
        rows = lay_out([piece.encoded for piece in pieces], self._plan, members)
        num_labels = _count_labels(rows)
        infos: list[AlignmentInfo] = []
        of_student: list[TeacherPart] = []
        of_teachers: list[list[list[RankBatch]]] = []
        for i, sharding in enumerate(self._plan.teachers):
            weights = shares.token_weights(i, members, rows)
            teacher_rows, teacher_labels, chunks = rows, num_labels, None
            if i in self.teachers:
                encoded = [piece.of_teacher(i) for piece in pieces]
                teacher_rows = lay_out(encoded, self._plan, members, pad_id(self.teachers[i].tokenizer))
                teacher_labels = _count_labels(teacher_rows)
                chunks = _chunk_rows(pieces, i, members, rows, teacher_rows, shares.of_teacher(i))
                asked_labels = None if weights is None else weights.num_labels
                infos.append(self._describe(i, documents, chunks, asked_labels))
            of_student.append(TeacherPart(chunks, weights))
            refs = []
            if i in self._stored.teachers:
                refs = [tuple(pieces[j].refs[i] for j in row if pieces[j].refs[i].length) for row in members]
            asked = shares.asked(i, members)
            theirs = divide(teacher_rows, sharding, self._plan, index, teacher_labels, pieces=refs, asked=asked)
            of_teachers.append(theirs)
        by_row = shares.weights is not None
        student = divide(rows, self._plan.student, self._plan, index, num_labels, teachers=of_student, by_row=by_row)
        firsts = [document.pieces[0].encoded for document in documents]
        num_not_stored = sum(not document.is_stored for document in documents)
        info = BatchInfo(
            index=index,
            cursor=cursor,
            num_documents=len(documents),
            num_rows=rows.shape[0],
            num_tokens=sum(len(piece.encoded.input_ids) for piece in pieces),
            num_labels=num_labels,
            num_positions=rows.num_positions,
            num_truncated=sum(first.truncated for first in firsts),
            num_split=sum(len(document.pieces) > 1 for document in documents),
            seconds=time.perf_counter() - began,
            alignments=tuple(infos),
            bad_rows=tuple(document.bad for document in documents if document.bad is not None),
            num_left_out=sum(not document.is_kept for document in documents) - num_not_stored,
            num_not_stored=num_not_stored,
            left_out=_count_left_out(documents),
            num_incomplete=sum(bool(first.left_out) for first in firsts),
            num_unlabelled=sum(
                document.is_kept and not any(piece.encoded.has_labels for piece in document.pieces)
                for document in documents
            ),
        )
        return info, student, of_teachers

    def members(self, documents: Sequence[AlignedDocument]) -> list[list[int]]:
        """The pieces that each row of a batch holds, in order: their indices among all pieces of its documents."""
        pieces = [piece for document in documents for piece in document.pieces]
        sides = [
            [piece.encoded for piece in pieces],
            *([piece.of_teacher(i) for piece in pieces] for i in self.teachers),
        ]
        capacities = [self._plan.max_length, *(self._plan.length_of(i) for i in self.teachers)]
        return arrange(sides, capacities, self._plan, RowShares.of(documents).kinds)

    def _describe(
        self, i: int, documents: Sequence[AlignedDocument], chunks: ChunkRows, num_labels: int | None
    ) -> AlignmentInfo:
        """The statistics of teacher `i`'s alignments in a batch, over the documents that are kept and that it is asked for."""
        kept = (document for document in documents if document.is_kept and routing.asked(document.weights, i))
        present = [document.pieces[0].alignments[i] for document in kept]
        name_of_dp = f"dp/{self.teachers[i].aligner.backend}"
        methods = Counter(name_of_dp if alignment.method == "dp" else alignment.method for alignment in present)
        return AlignmentInfo(
            teacher=self.teachers[i].name,
            num_chunks=chunks.num_chunks,
            num_one_to_one=chunks.num_one_to_one,
            num_covered=chunks.num_covered,
            num_exact=sum(alignment.exact for alignment in present),
            methods=dict(methods),
            num_labels=num_labels,
        )


def _count_left_out(documents: Sequence[AlignedDocument]) -> tuple[LeftOut, ...]:
    """What chat templates left out of a batch's documents: each part once, with its number of documents."""
    first: dict[str, Row] = {}
    counts: Counter[str] = Counter()
    for document in documents:
        for what in document.pieces[0].encoded.left_out:
            first.setdefault(what, document.row)
            counts[what] += 1
    return tuple(LeftOut(what, counts[what], row) for what, row in first.items())


def _chunk_rows(
    pieces: Sequence[AlignedPiece],
    teacher: int,
    members: Sequence[Sequence[int]],
    student_rows: TokenRows,
    teacher_rows: TokenRows,
    weights: np.ndarray | None = None,
) -> ChunkRows:
    """Step 5: the chunks of both sides, as numbers that belong to predictions."""
    on_student = np.full(student_rows.shape, -1, dtype=np.int32)
    on_teacher = np.full(teacher_rows.shape, -1, dtype=np.int32)
    for row, indices in enumerate(members):
        first_chunk = student_start = teacher_start = 0
        for i in indices:
            alignment = pieces[i].alignments[teacher]
            for row_chunks, start, token_chunks in (
                (on_student[row], student_start, alignment.student_chunk),
                (on_teacher[row], teacher_start, alignment.teacher_chunk),
            ):
                # The shift: token p is predicted at position p - 1. A document's first token is not predicted.
                numbers = token_chunks[1:]
                row_chunks[start : start + len(numbers)] = np.where(numbers >= 0, numbers + first_chunk, -1)
            first_chunk += alignment.num_chunks
            student_start += len(pieces[i].encoded.input_ids)  # which may be longer than in the alignment
            teacher_start += len(alignment.teacher_ids)
    assert student_rows.widths is not None
    assert teacher_rows.widths is not None
    alignments = [piece.alignments[teacher] for piece in pieces]
    counts = [(alignment.num_chunks, alignment.counts["1:1"]) for alignment in alignments]
    weighted = None
    if weights is not None:
        all_chunks, one_to_one = (weights @ np.array(counts, dtype=np.float64).reshape(-1, 2)).tolist()
        weighted = (all_chunks, one_to_one)
    return ChunkRows(
        widths=(student_rows.widths, teacher_rows.widths),
        student=on_student,
        teacher=on_teacher,
        num_chunks=sum(all_chunks for all_chunks, _ in counts),
        num_one_to_one=sum(one_to_one for _, one_to_one in counts),
        weighted=weighted,
        num_covered=int(np.count_nonzero((on_student >= 0) & (student_rows.labels != IGNORE_INDEX))),
    )


def _count_labels(rows: TokenRows) -> int:
    return int(np.count_nonzero(rows.labels != IGNORE_INDEX))


@dataclass(frozen=True)
class RowShares:
    """The weights of the teachers for the pieces of a batch.

    Pieces share a row only if the same teachers are asked for them (`kinds`), so that a teacher is asked for whole rows.
    """

    weights: np.ndarray | None
    """float64 [pieces, teachers]; None if teachers are not chosen by row, or there are no documents"""
    lengths: np.ndarray
    """int64 [pieces]: tokens of the student"""

    @classmethod
    def of(cls, documents: Sequence[AlignedDocument]) -> RowShares:
        """Those of documents, all of which have weights, or none."""
        pieces = [(document.weights, piece) for document in documents for piece in document.pieces]
        lengths = np.array([len(piece.encoded.input_ids) for _, piece in pieces], dtype=np.int64)
        weights = [of_teachers for of_teachers, _ in pieces if of_teachers is not None]
        return cls(np.array(weights, dtype=np.float64) if weights else None, lengths)

    @cached_property
    def kinds(self) -> list[Hashable] | None:
        """Per piece, the teachers that are asked for it; an empty piece is of the first one's kind that is not."""
        if self.weights is None:
            return None
        is_asked = self.weights > 0
        first = is_asked[int((self.lengths > 0).argmax())]
        return [tuple(kind) for kind in np.where(self.lengths[:, None] > 0, is_asked, first).tolist()]

    def of_teacher(self, teacher: int) -> np.ndarray | None:
        """float64 [pieces], its weights; None if all are 1, but for pieces that are empty."""
        if self.weights is None or (self.weights[self.lengths > 0, teacher] == 1).all():
            return None
        return self.weights[:, teacher]

    def asked(self, teacher: int, members: Sequence[Sequence[int]]) -> np.ndarray | None:
        """bool [R]: the rows that a teacher is asked for; None: all of them.

        Args:
            members: the pieces of every row.
        """
        weights = self.of_teacher(teacher)
        if weights is None:
            return None
        is_asked = (weights > 0) & (self.lengths > 0)
        return np.array([bool(is_asked[list(row)].any()) for row in members], dtype=bool)

    def token_weights(self, teacher: int, members: Sequence[Sequence[int]], rows: TokenRows) -> TokenWeights | None:
        """The weights of the tokens of rows for a teacher; None if all are 1.

        Args:
            members: the pieces of every row.
            rows: the student's.
        """
        weights = self.of_teacher(teacher)
        if weights is None:
            return None
        of_tokens = np.zeros(rows.shape, dtype=np.float32)
        for row, indices in enumerate(members):
            start = 0
            for i in indices:
                of_tokens[row, start : start + self.lengths[i]] = weights[i]
                start += self.lengths[i]
        of_tokens[rows.labels == IGNORE_INDEX] = 0
        return TokenWeights(of_tokens, float(of_tokens.sum(dtype=np.float64)), int(np.count_nonzero(of_tokens)))
