"""One global batch of documents → token rows for a student and for teachers of other tokenizers, with what they share."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from distill_rl.align import Alignment, TokenAligner, Tokenized
from distill_rl.config.schema import AlignerConfig
from distill_rl.data.chat import render_document
from distill_rl.data.collate import (
    NOTHING,
    BatchPlan,
    Encoded,
    Tokenization,
    build_batch,
    describe,
    divide,
    lay_out,
    pad_id,
    starting_in,
)
from distill_rl.errors import DataError
from distill_rl.types import (
    IGNORE_INDEX,
    AlignmentInfo,
    BadRow,
    BatchInfo,
    ChunkRows,
    DocumentBatch,
    RankBatch,
    TokenRows,
)

Given = TypeVar("Given")
Made = TypeVar("Made")
Tokens = tuple[Tokenized, Encoded, list[Tokenized | None]]
"""One document not cut yet: the student's side, with what is learnt of it, and every teacher's."""
Parts = tuple[BatchInfo, list[RankBatch], list[list[RankBatch]]]


@dataclass(frozen=True, slots=True)
class CrossTokenizerTeacher:
    """A teacher of another tokenizer, as the aligner sees it."""

    name: str
    tokenizer: Any
    aligner: TokenAligner
    dp_engine: str

    @classmethod
    def of(
        cls,
        name: str,
        student_tokenizer: Any,
        tokenizer: Any,
        settings: AlignerConfig,
        *,
        student_stops: Sequence[int] = (),
        stops: Sequence[int] = (),
    ) -> CrossTokenizerTeacher:
        """student_stops, stops: of the student and of this teacher, as `TokenAligner` takes them."""
        aligner = TokenAligner(
            student_tokenizer,
            tokenizer,
            settings.method,
            fast_ids=settings.fast_ids,
            backend=settings.dp.backend,
            band=settings.dp.band,
            student_stops=student_stops,
            teacher_stops=stops,
        )
        return cls(name, tokenizer, aligner, settings.dp.backend)


@dataclass(frozen=True, slots=True)
class AlignedDocument:
    """One document as the student and one teacher read it; a chunk number per token, -1 where nothing is compared."""

    teacher_ids: np.ndarray
    """int32 [m]"""
    student_chunk: np.ndarray
    """int32 [n]"""
    teacher_chunk: np.ndarray
    """int32 [m]"""
    num_chunks: int
    num_one_to_one: int
    exact: bool
    method: str


_NO_TOKENS = np.zeros(0, dtype=np.int32)
NO_PAIR = AlignedDocument(_NO_TOKENS, _NO_TOKENS, _NO_TOKENS, 0, 0, exact=False, method="none")
"""of a row that is left out"""


class BatchBuilder:
    """Documents → parts for every rank.

    Args:
        tokenization: the student's.
        plan: how rows are laid out and divided; without packing where there is a teacher.
        teachers: one per running teacher, None for one that reads the student's rows.
    """

    def __init__(
        self, tokenization: Tokenization, plan: BatchPlan, teachers: Sequence[CrossTokenizerTeacher | None] = ()
    ):
        self._tokenization, self._plan, self._teachers = tokenization, plan, tuple(teachers)
        self._others = [teacher for teacher in teachers if teacher is not None]

    def build(self, batch: DocumentBatch, skip: Collection[int] = ()) -> Parts:
        """As `collate.build_batch`; the student's parts carry the chunks, a teacher's parts are rows of its own.

        Args:
            skip: rows of the data to leave empty.

        Raises:
            DataError: a document that cannot be tokenised, by its row.
        """
        if not self._others:
            return build_batch(batch, self._tokenization, self._plan, skip)
        began = time.perf_counter()
        bad: list[BadRow] = []
        kept = [document for document in batch.documents if document["row"] not in skip]
        read = {document["row"]: _or_none(self._tokenize, document, document, bad) for document in kept}
        self._solve_ahead([each for each in read.values() if each is not None])
        nothing = NOTHING, [None if teacher is None else NO_PAIR for teacher in self._teachers]
        documents_of = [
            (_or_none(self._pair, tokens, document, bad) if (tokens := read.get(document["row"])) else None) or nothing
            for document in batch.documents
        ]
        encoded = [student for student, _ in documents_of]
        rows = lay_out(encoded, self._plan)
        num_labels = int(np.count_nonzero(rows.labels != IGNORE_INDEX))
        chunks: list[ChunkRows | None] = []
        infos: list[AlignmentInfo] = []
        teachers: list[list[RankBatch]] = []
        for number, (teacher, share) in enumerate(zip(self._teachers, self._plan.teachers)):
            if teacher is None:
                chunks.append(None)
                teachers.append(divide(rows, share, self._plan, batch.index, num_labels))
                continue
            paired = [pairs[number] for _, pairs in documents_of]
            theirs, shared = self._teacher_rows(teacher, paired, rows)
            chunks.append(shared)
            infos.append(_describe(teacher.name, paired, shared))
            supervised = int(np.count_nonzero(theirs.labels != IGNORE_INDEX))
            teachers.append(divide(theirs, share, self._plan, batch.index, supervised))
        info = describe(batch, encoded, rows, began, tuple(infos), tuple(bad))
        return info, divide(rows, self._plan.student, self._plan, batch.index, num_labels, chunks), teachers

    def _solve_ahead(self, documents: Sequence[Tokens]) -> None:
        for number, teacher in enumerate(self._teachers):
            if teacher is not None:
                pairs = ((student, theirs[number]) for student, _, theirs in documents)
                teacher.aligner.solve_ahead((student, other) for student, other in pairs if other is not None)

    def _pair(self, tokens: Tokens) -> tuple[Encoded, list[AlignedDocument | None]]:
        """The student's tokens up to the last boundary that it shares with every teacher, and each teacher's."""
        student, encoded, theirs = tokens
        limits = dict.fromkeys(("max_student_tokens", "max_teacher_tokens"), self._tokenization.max_length)
        alignments = [
            None if teacher is None or other is None else teacher.aligner.pair(student, other, **limits)
            for teacher, other in zip(self._teachers, theirs)
        ]
        encoded = encoded.cut(min(len(found.student_ids) for found in alignments if found is not None))
        return encoded, [
            None if teacher is None or found is None else _pair_up(found, encoded.label_mask, teacher)
            for teacher, found in zip(self._teachers, alignments)
        ]

    def _tokenize(self, document: Mapping[str, Any]) -> Tokens:
        """Both sides of one document, not cut yet; the same text, normalised once for all."""
        if "messages" in document:
            return self._tokenize_chat(document)
        self._tokenization.require_text_is_learnt(document)
        text = document["text"]
        for teacher in self._others:
            text = teacher.aligner.normalize(text)
        student = self._others[0].aligner.tokenize_student(text, end=True)
        encoded = Encoded(student.ids, np.ones(len(student.ids), dtype=bool), truncated=False)
        theirs = [
            None if teacher is None else teacher.aligner.tokenize_teacher(text, end=True) for teacher in self._teachers
        ]
        return student, encoded, theirs

    def _tokenize_chat(self, document: Mapping[str, Any]) -> Tokens:
        messages = [dict(message) for message in document["messages"]]
        for teacher in self._others:
            for message in messages:
                message["content"] = teacher.aligner.normalize(message["content"])
        row = document["row"]
        tokenizer, assistant_only = self._tokenization.tokenizer, self._tokenization.assistant_only
        text, spans = render_document(tokenizer, messages, row, find_assistant=assistant_only)
        aligner = self._others[0].aligner
        student = aligner.tokenize_messages(messages, "student", rendered=text)
        assert student.offsets is not None
        mask = np.ones(len(student.ids), dtype=bool)
        if assistant_only:
            if student.text != text:  # the template's own words were composed, too
                spans = [
                    (len(aligner.normalize(text[:first])), len(aligner.normalize(text[:stop]))) for first, stop in spans
                ]
            mask = starting_in(spans, student.offsets[:, 0])
        theirs = [None if teacher is None else _tokenize_for(teacher, messages, row) for teacher in self._teachers]
        return student, Encoded(student.ids, mask, truncated=False), theirs

    def _teacher_rows(
        self, teacher: CrossTokenizerTeacher, paired: Sequence[AlignedDocument | None], rows: TokenRows
    ) -> tuple[TokenRows, ChunkRows]:
        """A teacher's rows, one document to each as the student's, and the chunks that both have."""
        found = [each for each in paired if each is not None]
        encoded = [Encoded(each.teacher_ids, each.teacher_chunk >= 0, truncated=False) for each in found]
        teacher_rows = lay_out(encoded, self._plan, pad_id(teacher.tokenizer))
        ours, theirs = (np.full(each.shape, -1, dtype=np.int32) for each in (rows, teacher_rows))
        for row, each in enumerate(found):
            # The prediction of token p is made at p - 1.
            ours[row, : max(len(each.student_chunk) - 1, 0)] = each.student_chunk[1:]
            theirs[row, : max(len(each.teacher_chunk) - 1, 0)] = each.teacher_chunk[1:]
        covered = int(np.count_nonzero((ours >= 0) & (rows.labels != IGNORE_INDEX)))
        chunks, one_to_one = (sum(getattr(each, name) for each in found) for name in ("num_chunks", "num_one_to_one"))
        return teacher_rows, ChunkRows(ours, theirs, chunks, one_to_one, covered)


def _or_none(
    function: Callable[[Given], Made], given: Given, document: Mapping[str, Any], bad: list[BadRow]
) -> Made | None:
    """What an alignment stumbles over is left out and reported; what the user has to mend is raised."""
    try:
        return function(given)
    except DataError:
        raise
    except Exception as error:
        bad.append(BadRow(int(document["row"]), f"{type(error).__name__}: {error}"))
        return None


def _tokenize_for(teacher: CrossTokenizerTeacher, messages: Sequence[Mapping[str, str]], row: int) -> Tokenized:
    whose = f"teacher {teacher.name}'s tokenizer"
    text, _ = render_document(teacher.tokenizer, messages, row, find_assistant=False, whose=whose)
    return teacher.aligner.tokenize_messages(messages, "teacher", rendered=text)


def _pair_up(alignment: Alignment, label_mask: np.ndarray, teacher: CrossTokenizerTeacher) -> AlignedDocument:
    """Keeps the chunks from which something is learnt, and adds the paired stop tokens as chunks of one token each.

    A chunk counts if all its tokens of the student are to be learnt and its first token has a predecessor, on both
    sides, that predicts it.

    Args:
        label_mask: of the student's row, which may end before this alignment does.
    """
    alignment = alignment.cut(len(label_mask))
    ours, theirs = alignment.student_chunk.copy(), alignment.teacher_chunk.copy()
    count = alignment.num_chunks
    for i, j in alignment.stop_pairs:
        ours[i] = theirs[j] = count
        count += 1
    # The last entry is what a -1 reads.
    kept = np.ones(count + 1, dtype=bool)
    kept[-1] = False
    kept[ours[~label_mask[: len(ours)]]] = False
    kept[ours[:1]] = kept[theirs[:1]] = False
    numbers = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
    ours, theirs = numbers[ours], numbers[theirs]
    total = int(kept.sum())
    lengths = [np.bincount(side[side >= 0], minlength=total) for side in (ours, theirs)]
    one_to_one = int(np.count_nonzero((lengths[0] == 1) & (lengths[1] == 1)))
    method = f"dp/{teacher.dp_engine}" if alignment.method == "dp" else alignment.method
    return AlignedDocument(alignment.teacher_ids, ours, theirs, total, one_to_one, alignment.exact, method)


def _describe(name: str, paired: Sequence[AlignedDocument | None], shared: ChunkRows) -> AlignmentInfo:
    found = [each for each in paired if each is not None and each is not NO_PAIR]
    return AlignmentInfo(
        teacher=name,
        num_chunks=shared.num_chunks,
        num_one_to_one=shared.num_one_to_one,
        num_covered=shared.num_covered,
        num_exact=sum(each.exact for each in found),
        methods=dict(Counter(each.method for each in found)),
    )
