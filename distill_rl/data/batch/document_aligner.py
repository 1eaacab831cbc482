"""Steps 1 to 3 of a batch with several tokenizers: documents → the student's tokens, and alignments with each teacher.

`cross_tokenizer_batch.py` lists all steps. Here each document is handled on its own, so the documents of a batch can be
divided at will.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from distill_rl.align import Alignment, TokenAligner, Tokenized
from distill_rl.config.schema import AlignerConfig
from distill_rl.data.batch.chat import TemplateCoverage, render_document
from distill_rl.data.batch.pieces import (
    NONE_STORED,
    NOTHING,
    STUDENT,
    DocumentPiece,
    Extent,
    StoredTargets,
    ref_of,
    splitter_of,
)
from distill_rl.data.batch.tokenization import NO_TOKENS, Encoded, StopTokens, Tokenization, name_of
from distill_rl.data.reading.layouts import template_options
from distill_rl.data.routing import asked, weights_of
from distill_rl.errors import DataError
from distill_rl.types import BadRow, PieceRef, Row, row_of


@dataclass(frozen=True, slots=True)
class CrossTokenizerTeacher:
    """A teacher with its own tokenizer, and the aligner between the student and it."""

    name: str
    tokenizer: Any
    aligner: TokenAligner
    coverage: TemplateCoverage
    """Of its chat template."""
    stops: StopTokens

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
        """A teacher with a new aligner between the student's tokenizer and its own.

        Args:
            tokenizer: the teacher's.
            student_stops, stops: the student's and this teacher's stop tokens, as `TokenAligner` takes them.

        Raises:
            ValueError: a slow tokenizer; an unknown method.
        """
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
        return cls(
            name,
            tokenizer,
            aligner,
            TemplateCoverage(tokenizer, f"teacher {name}'s tokenizer"),
            StopTokens.of(tokenizer, stops),
        )


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    """One document after step 1: all its tokens on every side."""

    student: Tokenized | None
    """None if no teacher with its own tokenizer is asked for the document."""
    encoded: Encoded
    """The student's tokens again, with the mask of those that are trained on."""
    teachers: dict[int, Tokenized]
    """By index of the teacher; only teachers with their own tokenizer that are asked for the document."""
    names: dict[int, bytes]
    """The document's name for each of these teachers."""


_EMPTY = np.zeros(0, dtype=np.int32)
LEFT_OUT = Alignment(_EMPTY, _EMPTY, _EMPTY, _EMPTY, 0, "none", exact=False)
"""Stands for a document that is left out of the batch, or that a teacher is not asked for; its row stays, empty."""


class AlignedPiece(NamedTuple):
    """What rows hold of a document, after step 3."""

    encoded: Encoded
    """The student's tokens."""
    alignments: dict[int, Alignment]
    """By index of every teacher with its own tokenizer; only chunks that can be trained on."""
    refs: dict[int, PieceRef]
    """By index of every teacher whose targets are read or stored."""

    def of_teacher(self, teacher: int) -> Encoded:
        """Its tokens. Only those in chunks are labelled: it computes nothing for the others."""
        alignment = self.alignments[teacher]
        return Encoded(alignment.teacher_ids, alignment.teacher_chunk >= 0)


@dataclass(frozen=True, slots=True)
class AlignedDocument:
    """A document after step 3, in one piece or in several (`pieces.py`).

    One that is left out is a single empty piece (`NO_TOKENS`, `LEFT_OUT`), so that its place in the batch stays. One that a
    teacher is not asked for is empty on that teacher's side.
    """

    row: Row
    pieces: Sequence[AlignedPiece]
    weights: tuple[float, ...] | None = None
    """Of the running teachers; None if they are not chosen by row."""
    is_kept: bool = True
    is_stored: bool = True
    """False for a document that is left out because some store does not have it."""
    bad: BadRow | None = None
    """Why the document is left out, if it failed."""


def aligned(
    document: Mapping[str, Any],
    pieces: Sequence[DocumentPiece] | None,
    names: Mapping[int, bytes],
    teachers: Collection[int],
    stored: StoredTargets,
    bad: BadRow | None = None,
) -> AlignedDocument:
    """A document that is divided into pieces, or left out: if there are none, or a store that should have them does not.

    Args:
        names: the document's name for teachers with their own tokenizer; the others use that of `Encoded`.
        teachers: those with their own tokenizer.
        bad: why there are no pieces, if the document failed.
    """
    row, weights = row_of(document), weights_of(document)
    is_stored = pieces is None or stored.have(pieces, names, weights)
    is_kept = pieces is not None and is_stored
    if pieces is None or not is_stored:
        pieces = [DocumentPiece(NO_TOKENS, dict.fromkeys(teachers, LEFT_OUT), {})]
    made = [
        AlignedPiece(
            piece.encoded,
            {i: piece.alignments.get(i, LEFT_OUT) for i in teachers},
            {i: ref_of(piece, i, names) if asked(weights, i) else NOTHING for i in stored.teachers},
        )
        for piece in pieces
    ]
    return AlignedDocument(row, made, weights, is_kept, is_stored, bad)


class DocumentAligner:
    """Tokenises documents for the student and for teachers with tokenizers of their own, and aligns the results.

    Args:
        tokenization: the student's.
        teachers: at least one, by index of the teacher.
        max_lengths: most tokens in a row of each of them.
        split: whether documents that are too long for a row become several pieces; otherwise they are cut.
        stored: of the teachers whose targets are read or stored.
    """

    def __init__(
        self,
        tokenization: Tokenization,
        teachers: Mapping[int, CrossTokenizerTeacher],
        max_lengths: Mapping[int, int],
        *,
        split: bool = False,
        stored: StoredTargets = NONE_STORED,
    ):
        self._tokenization, self._teachers, self._max_lengths = tokenization, teachers, max_lengths
        self._stored = stored
        tokenizers = {i: (teacher.tokenizer, max_lengths[i]) for i, teacher in teachers.items()}
        self._splitter = splitter_of(tokenization.tokenizer, tokenization.max_length, tokenizers) if split else None

    def align(self, documents: Sequence[Mapping[str, Any]], skip: Collection[Row] = ()) -> list[AlignedDocument]:
        """Tokenises and aligns documents, and cuts or splits them.

        A document that fails for another reason than a DataError is left out, and says why (`bad`).

        Args:
            skip: rows of documents to leave out.

        Raises:
            DataError: a document that the user has to fix; names its row.
        """
        attempts = [_Attempt(document) for document in documents]
        for attempt in attempts:
            if row_of(attempt.document) not in skip:
                with attempt:
                    attempt.tokens = self.tokenize(attempt.document)
        present = [attempt.tokens for attempt in attempts if attempt.tokens is not None]
        for i, teacher in self._teachers.items():
            # A GPU aligner works on all documents at once; this changes no result.
            teacher.aligner.solve_ahead(
                (tokens.student, tokens.teachers[i])
                for tokens in present
                if tokens.student is not None and i in tokens.teachers
            )
        return [self._aligned(attempt) for attempt in attempts]

    def _aligned(self, attempt: _Attempt) -> AlignedDocument:
        pieces, names = None, {}
        if attempt.tokens is not None:
            names = attempt.tokens.names
            with attempt:
                pieces = self._pieces(attempt.tokens)
        return aligned(attempt.document, pieces, names, self._teachers, self._stored, attempt.bad)

    def pieces_of(self, document: Mapping[str, Any]) -> tuple[list[DocumentPiece], dict[int, bytes]]:
        """The pieces of one document, and its names for the teachers; no pieces for one that fails.

        Raises:
            DataError: a document that the user has to fix.
        """
        with _Attempt(document):
            tokens = self.tokenize(document)
            return self._pieces(tokens), tokens.names
        return [], {}

    def tokenize(self, document: Mapping[str, Any]) -> TokenizedDocument:
        """Step 1: all tokens of a document on every side, not cut to `max_length`.

        All sides read the same text, so it is normalised for every aligner first. Both sides of a text end in eos if
        they have one. Only teachers that are asked for the document count: without any, it is tokenised as for a student
        that has no such teacher.

        Raises:
            DataError: a document that the user has to fix.
        """
        teachers = self._asked(document)
        if not teachers:
            return TokenizedDocument(None, self._tokenization.encode_all(document), {}, {})
        if "messages" in document:
            return self._tokenize_chat(document, teachers)
        self._tokenization.require_text_allowed(document)
        text = document["text"]
        for teacher in teachers.values():
            text = teacher.aligner.normalize(text)
        # The student's side is the same in all aligners.
        student = next(iter(teachers.values())).aligner.tokenize_student(text, end=True)
        name = name_of(document["text"])
        encoded = Encoded(student.ids, np.ones(len(student.ids), dtype=bool), name=name)
        theirs = {i: teacher.aligner.tokenize_teacher(text, end=True) for i, teacher in teachers.items()}
        return TokenizedDocument(student, encoded, theirs, dict.fromkeys(theirs, name))

    def _asked(self, document: Mapping[str, Any]) -> Mapping[int, CrossTokenizerTeacher]:
        """The teachers with their own tokenizer that are asked for a document, by index."""
        weights = weights_of(document)
        if weights is None:
            return self._teachers
        return {i: teacher for i, teacher in self._teachers.items() if asked(weights, i)}

    def _tokenize_chat(
        self, document: Mapping[str, Any], teachers: Mapping[int, CrossTokenizerTeacher]
    ) -> TokenizedDocument:
        """Step 1 for chat messages, which every side renders with its own template."""
        # Only the turns of some roles are marked as trained on if `data.loss_on` or `data.loss_roles` say so, otherwise
        # all tokens. The document is not modified.
        for teacher in teachers.values():
            document = {key: teacher.aligner.normalize_all(value) for key, value in document.items()}
        text, spans, left_out = self._tokenization.render(document)
        aligner, options = next(iter(teachers.values())).aligner, template_options(document)
        as_tokens = self._tokenization.special_tokens_in_text
        student = aligner.tokenize_messages(
            document["messages"], "student", rendered=text, options=options, special_tokens_in_text=as_tokens
        )
        assert student.offsets is not None
        if spans is not None and student.text != text:
            # The aligner also normalised what the template itself writes, so the spans have moved.
            spans = [
                (len(aligner.normalize(text[:first])), len(aligner.normalize(text[:stop]))) for first, stop in spans
            ]
        mask = self._tokenization.labels(document, spans, student.ids, student.offsets)
        theirs = {}
        for i, teacher in teachers.items():
            theirs[i], missing = self._tokenize_for(teacher, document)
            left_out += missing
        encoded = Encoded(student.ids, mask, left_out=left_out, name=name_of(student.text))
        return TokenizedDocument(student, encoded, theirs, {i: name_of(other.text) for i, other in theirs.items()})

    def _tokenize_for(
        self, teacher: CrossTokenizerTeacher, document: Mapping[str, Any]
    ) -> tuple[Tokenized, tuple[str, ...]]:
        """A chat rendered with the teacher's template and tokenised for it, and what the template leaves out."""
        text, _, written = render_document(
            teacher.tokenizer, document, whose=teacher.coverage.whose, stops=teacher.stops.texts, text_only=True
        )
        left_out = teacher.coverage.check(document, written, self._tokenization.unrendered)
        tokens = teacher.aligner.tokenize_messages(
            document["messages"],
            "teacher",
            rendered=text,
            options=template_options(document),
            special_tokens_in_text=self._tokenization.special_tokens_in_text,
        )
        return tokens, left_out

    def _pieces(self, document: TokenizedDocument) -> list[DocumentPiece]:
        return self._split(document) if self._splitter else [self._cut(document)]

    def _cut(self, document: TokenizedDocument) -> DocumentPiece:
        """Steps 2 and 3: the beginning of a document, up to the last boundary shared with every teacher that is asked."""
        # All sides have at most their `max_length` tokens; the alignments hold only chunks that can be trained on.
        if document.student is None:
            encoded = document.encoded.cut(self._tokenization.max_length)
            return DocumentPiece(encoded, {}, {STUDENT: Extent(whole=not encoded.truncated)})
        alignments = {
            i: self._teachers[i].aligner.pair(
                document.student,
                tokens,
                max_student_tokens=self._tokenization.max_length,
                max_teacher_tokens=self._max_lengths[i],
            )
            for i, tokens in document.teachers.items()
        }
        encoded = document.encoded.cut(min(len(alignment.student_ids) for alignment in alignments.values()))
        mask = encoded.label_mask
        # Another teacher may have cut the student's row shorter than this alignment.
        cut = {i: alignment.cut(len(mask)) for i, alignment in alignments.items()}
        extents = {i: Extent(whole=len(pair.teacher_ids) == len(document.teachers[i].ids)) for i, pair in cut.items()}
        extents[STUDENT] = Extent(whole=len(mask) == len(document.encoded.input_ids))
        trained = {i: pair.trainable(mask[: len(pair.student_ids)]) for i, pair in cut.items()}
        return DocumentPiece(encoded, trained, extents)

    def _split(self, document: TokenizedDocument) -> list[DocumentPiece]:
        """Steps 2 and 3: all of a document, in pieces whose alignments hold only chunks that can be trained on."""
        assert self._splitter is not None
        alignments = {}
        if document.student is not None:
            alignments = {
                i: self._teachers[i].aligner.pair(document.student, tokens) for i, tokens in document.teachers.items()
            }
        return [
            DocumentPiece(encoded, {i: pair.trainable(encoded.label_mask) for i, pair in pairs.items()}, extents)
            for encoded, pairs, extents in self._splitter.split(document.encoded, alignments)
        ]


@dataclass
class _Attempt:
    """A document on its way. As a context it suppresses the error of a document that fails in the block, and keeps it.

    DataErrors pass, because the user has to fix those, and so does a lack of memory, which depends on the machine.
    """

    document: Mapping[str, Any]
    tokens: TokenizedDocument | None = None
    """After step 1; None if the document is left out."""
    bad: BadRow | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, DataError | MemoryError):
            return False
        self.bad = BadRow(row_of(self.document), f"{type(error).__name__}: {error}")
        return True
