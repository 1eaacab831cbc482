"""Steps 1 to 3 of a batch (`cross_tokenizer_batch.py` lists all): documents → tokens of every side, alignments, and the pieces that rows hold.

Each document is handled on its own, so the documents of a batch can be divided at will.

A document that fits into a row is one piece. With `cut`, so is any other: its beginning, and the rest is left out. With
`split`, it becomes several pieces, which are rows of the same batch:

1. A piece ends at the last place within the limits of all sides where all tokenizations of the text can be cut
   (`Alignment.boundaries`), and the next one begins there. With one tokenizer, every token ends at such a place.
2. If a tokenizer begins a text with special tokens such as bos, every piece begins with them. Only the last piece ends in
   eos.
3. A stretch without such a place that is longer than a row is cut at each side's own limit. The next piece begins behind
   it.

The first token of a piece is predicted only if one of these special tokens comes before it; without them a split loses one
token per piece. So that the last token, mostly eos, is not alone in a piece that trains nothing, the piece before ends one
place earlier then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import takewhile
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np

from distill_rl.align import Alignment, TokenAligner, Tokenized
from distill_rl.config.schema import AlignerConfig
from distill_rl.data.batch.chat import TemplateCoverage, render_document
from distill_rl.data.batch.tokenization import NO_TOKENS, Encoded, StopTokens, Tokenization, name_of
from distill_rl.data.reading.layouts import template_options
from distill_rl.data.routing import asked, weights_of
from distill_rl.errors import DataError
from distill_rl.types import BadRow, PieceRef, Row, row_of

NOTHING = PieceRef(b"", 0, 0, 0, True)
"""Stands for a piece that a teacher is not asked for."""

STUDENT = -1
"""The student's side, beside the indices of teachers that have their own tokenizer."""


class Extent(NamedTuple):
    """Which tokens of one side of a document a piece has."""

    first: int = 0
    """Tokens of the document before the piece."""
    prefix: int = 0
    """Special tokens that the piece begins with and that are not at this place in the document."""
    whole: bool = True
    """Whether the piece reaches the end of the document."""


class DocumentPiece(NamedTuple):
    """What rows hold of a document."""

    encoded: Encoded
    """The student's tokens."""
    alignments: dict[int, Alignment]
    """With each teacher that has its own tokenizer, by its index."""
    extents: dict[int, Extent]
    """By the index of such a teacher, and of STUDENT."""


@dataclass(frozen=True, slots=True)
class PieceLimits:
    """How one tokenizer's rows limit a piece."""

    limit: int
    """Most tokens of a piece, more than `prefix` has."""
    prefix: tuple[int, ...] = ()
    """Special tokens with which the tokenizer begins a text."""

    @classmethod
    def of(cls, tokenizer: Any, limit: int) -> PieceLimits:
        """The side of a tokenizer; the prefix is what an empty text and another begin with."""
        special = set(tokenizer.all_special_ids)
        shared = commonprefix([tokenizer(text)["input_ids"] for text in ("", "a")])  # noqa: RUF071 (of ids, not paths)
        return cls(limit, tuple(takewhile(special.__contains__, shared)))

    def of_document(self, ids: np.ndarray) -> np.ndarray:
        """int32 [0 or more]: the prefix, if a document begins with it."""
        begins = ids[: len(self.prefix)]
        return begins if begins.tolist() == list(self.prefix) else ids[:0]


@dataclass(frozen=True, slots=True)
class Splitter:
    """Splits documents into pieces that fit a row on every side.

    Args:
        teachers: those with their own tokenizer, by index.
    """

    student: PieceLimits
    teachers: Mapping[int, PieceLimits]

    def split(self, encoded: Encoded, alignments: Mapping[int, Alignment]) -> list[DocumentPiece]:
        """All tokens of a document in pieces, in order; at least one piece.

        Args:
            encoded: the student's tokens.
            alignments: of all of these tokens with each teacher's. Empty: there is no other tokenizer.
        """
        teachers = list(alignments)
        sides = {STUDENT: encoded.input_ids, **{i: alignments[i].teacher_ids for i in teachers}}
        rules = {STUDENT: self.student, **self.teachers}
        limits = np.array([rules[name].limit for name in sides], dtype=np.int64)
        end = np.array([len(ids) for ids in sides.values()], dtype=np.int64)
        if (end <= limits).all():
            return [DocumentPiece(encoded, dict(alignments), dict.fromkeys(sides, Extent()))]
        if not end[0]:
            nothing = {i: alignment.part((0, 0), (0, 0)) for i, alignment in alignments.items()}
            return [DocumentPiece(encoded, nothing, {name: Extent(whole=not len(ids)) for name, ids in sides.items()})]
        prefixes = [rules[name].of_document(ids) for name, ids in sides.items()]
        rooms = limits - np.array([len(prefix) for prefix in prefixes], dtype=np.int64)
        places = common_places(len(encoded.input_ids), alignments)
        pieces: list[DocumentPiece] = []
        start, room, before = np.zeros_like(end), limits, [prefix[:0] for prefix in prefixes]
        left_out = False
        while start[0] < end[0]:
            stop, following = _next_places(places, start, room)
            if end[0] - following[0] == 1 and not len(prefixes[0]):
                stop, following = _place_before(places, start, stop, following, rooms)
            left_out |= bool((stop < following).any())
            first, last = start.tolist(), stop.tolist()
            part, pairs = encoded.part(first[0], last[0], before[0]), {}
            for side, i in enumerate(teachers, start=1):
                pair = alignments[i].part((first[0], first[side]), (last[0], last[side]))
                pairs[i] = pair.preceded_by(before[0], before[side])
            wholes = (stop == end).tolist()
            extents = {name: Extent(first[k], len(before[k]), wholes[k]) for k, name in enumerate(sides)}
            pieces.append(DocumentPiece(part if not pieces else replace(part, left_out=()), pairs, extents))
            start, room, before = following, rooms, prefixes
        return [piece._replace(encoded=replace(piece.encoded, truncated=left_out)) for piece in pieces]


def splitter_of(tokenizer: Any, max_length: int, teachers: Mapping[int, tuple[Any, int]]) -> Splitter:
    """The splitter for a student's tokenizer and those of teachers.

    Args:
        max_length: most tokens of the student in a row.
        teachers: tokenizer and most tokens in a row of each teacher that has its own, by its index.
    """
    sides = {i: PieceLimits.of(other, length) for i, (other, length) in teachers.items()}
    return Splitter(PieceLimits.of(tokenizer, max_length), sides)


def common_places(num_tokens: int, alignments: Mapping[int, Alignment]) -> np.ndarray:
    """int64 [k, 1 + teachers], ascending: where a document can be divided on all sides, its end included.

    Each place is the number of tokens before it: the student's, then each teacher's. The student's are all different;
    of places that differ only on a teacher's side the last counts.

    Args:
        num_tokens: of the student.
    """
    if not alignments:
        return np.arange(1, num_tokens + 1, dtype=np.int64)[:, None]
    of_teachers = []
    for alignment in alignments.values():
        places = np.concatenate([alignment.boundaries, [[num_tokens, len(alignment.teacher_ids)]]])
        is_last = np.append(np.diff(places[:, 0]) > 0, True)
        of_teachers.append(places[is_last])
    student = reduce(np.intersect1d, [places[:, 0] for places in of_teachers])
    columns = [places[places[:, 0].searchsorted(student), 1] for places in of_teachers]
    return np.stack([student, *columns], axis=1)


def _next_places(places: np.ndarray, start: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the piece that begins at `start` ends, and where the one after it begins."""
    # They are the same unless no place lies within the room: then the piece ends where the room does.
    fitting = min(int(places[:, side].searchsorted(start[side] + room[side], "right")) for side in range(len(start)))
    if fitting and places[fitting - 1, 0] > start[0]:
        return places[fitting - 1], places[fitting - 1]
    following = places[int(places[:, 0].searchsorted(start[0], "right"))]
    return np.minimum(start + room, following), following


def _place_before(
    places: np.ndarray, start: np.ndarray, stop: np.ndarray, following: np.ndarray, room: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The end of a piece one place earlier, and again as the begin of the last piece, which then has a token more."""
    # Without a place that leaves two tokens to the piece, and to the last one no more than its room: the given two.
    earlier = int(places[:, 0].searchsorted(stop[0])) - 1
    if earlier < 0 or places[earlier, 0] - start[0] < 2 or (places[-1] - places[earlier] > room).any():
        return stop, following
    return places[earlier], places[earlier]


def ref_and_tokens(piece: DocumentPiece, teacher: int, names: Mapping[int, bytes]) -> tuple[PieceRef, np.ndarray]:
    """By which a store finds a piece as a teacher reads it, and the teacher's tokens of it, int32 [n].

    Args:
        names: the document's name for teachers with their own tokenizer; the others read the student's tokens.
    """
    is_own = teacher in piece.alignments
    tokens = piece.alignments[teacher].teacher_ids if is_own else piece.encoded.input_ids
    extent = piece.extents.get(teacher if is_own else STUDENT, Extent())
    name = names.get(teacher, b"") if is_own else piece.encoded.name
    return PieceRef(name, extent.first, extent.prefix, len(tokens), extent.whole), tokens


@dataclass(frozen=True, slots=True)
class StoredTargets:
    """The teachers whose targets are read or stored."""

    teachers: frozenset[int] = frozenset()
    """Their indices: rows for them say which pieces they hold (`RankBatch.pieces`)."""
    required: Mapping[int, Callable[[PieceRef, np.ndarray], bool]] = field(default_factory=dict)
    """By the index of each whose store decides what is trained on: whether the store has a piece with these tokens."""

    def have(
        self, pieces: Sequence[DocumentPiece], names: Mapping[int, bytes], weights: Sequence[float] | None = None
    ) -> bool:
        """Whether every store that decides has all pieces of a document, if its teacher is asked for it.

        Args:
            names: as for `ref_and_tokens`.
            weights: the document's, if teachers are chosen by row (`routing.weights_of`).
        """
        return all(
            has(*ref_and_tokens(piece, i, names))
            for i, has in self.required.items()
            if asked(weights, i)
            for piece in pieces
        )


NONE_STORED = StoredTargets()


# Steps 1 to 3 of a batch with several tokenizers: documents → the student's tokens, and alignments with each teacher.


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
        coverage = TemplateCoverage(tokenizer, f"teacher {name}'s tokenizer")
        return cls(name, tokenizer, aligner, coverage, StopTokens.of(tokenizer, stops))


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
    """A document after step 3, in one piece or in several (`Splitter`).

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


class DocumentAligner:
    """Tokenises documents for the student and for teachers with tokenizers of their own, and aligns the results.

    Args:
        tokenization: the student's.
        teachers: those with their own tokenizer, by index of the teacher.
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

        If there are teachers, a document that fails for another reason than a DataError is left out, and says why
        (`bad`); otherwise its error is raised.

        Args:
            skip: rows of documents to leave out.

        Raises:
            DataError: a document that the user has to fix; names its row.
        """
        attempts = [_Attempt(document, raises=not self._teachers) for document in documents]
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
        """The document in pieces, or left out: if it has failed, or a store that should have the pieces does not."""
        pieces, names, weights, stored = None, dict[int, bytes](), weights_of(attempt.document), self._stored
        if attempt.tokens is not None:
            names = attempt.tokens.names
            with attempt:
                pieces = self._pieces(attempt.tokens)
        is_stored = pieces is None or stored.have(pieces, names, weights)
        is_kept = pieces is not None and is_stored
        if pieces is None or not is_stored:
            pieces = [DocumentPiece(NO_TOKENS, dict.fromkeys(self._teachers, LEFT_OUT), {})]
        made = [
            AlignedPiece(
                piece.encoded,
                {i: piece.alignments.get(i, LEFT_OUT) for i in self._teachers},
                {i: ref_and_tokens(piece, i, names)[0] if asked(weights, i) else NOTHING for i in stored.teachers},
            )
            for piece in pieces
        ]
        return AlignedDocument(row_of(attempt.document), made, weights, is_kept, is_stored, attempt.bad)

    def pieces_of(self, document: Mapping[str, Any]) -> tuple[list[DocumentPiece], dict[int, bytes]]:
        """The pieces of one document, and its names for the teachers; no pieces for one that fails (`align`).

        Raises:
            DataError: a document that the user has to fix.
        """
        with _Attempt(document, raises=not self._teachers):
            tokens = self.tokenize(document)
            return self._pieces(tokens), tokens.names
        return [], {}

    def tokenize(self, document: Mapping[str, Any]) -> TokenizedDocument:
        """Step 1: all tokens of a document on every side, not cut to `max_length`.

        All sides read the same text, so it is normalised for every aligner first. Both sides of a text end in eos if
        they have one, and read the text of a special token as that token. Only teachers that are asked for the document count: without any, it is tokenised as for a student
        that has no such teacher.

        Raises:
            DataError: a document that the user has to fix.
        """
        weights = weights_of(document)
        teachers = {i: teacher for i, teacher in self._teachers.items() if asked(weights, i)}
        if not teachers:
            return TokenizedDocument(None, self._tokenization.encode_all(document), {}, {})
        if "messages" in document:
            return self._tokenize_chat(document, teachers)
        self._tokenization.require_text_allowed(document)
        text = document["text"]
        for teacher in teachers.values():
            text = teacher.aligner.normalize(text)
        # The student's side is the same in all aligners.
        written = any(teacher.aligner.has_specials(text) for teacher in teachers.values())
        student = next(iter(teachers.values())).aligner.tokenize_student(text, end=True, with_specials=written)
        name = name_of(document["text"])
        encoded = Encoded(student.ids, np.ones(len(student.ids), dtype=bool), name=name)
        theirs = {
            i: teacher.aligner.tokenize_teacher(text, end=True, with_specials=written)
            for i, teacher in teachers.items()
        }
        return TokenizedDocument(student, encoded, theirs, dict.fromkeys(theirs, name))

    def _tokenize_chat(
        self, document: Mapping[str, Any], teachers: Mapping[int, CrossTokenizerTeacher]
    ) -> TokenizedDocument:
        """Step 1 for chat messages, which every side renders with its own template."""
        # Only the turns of some roles are marked as trained on if `data.loss_on` or `data.loss_roles` say so, otherwise
        # all tokens. The document is not modified.
        for teacher in teachers.values():
            document = {key: teacher.aligner.normalize_all(value) for key, value in document.items()}
        text, spans, left_out = self._tokenization.render(document)
        aligner = next(iter(teachers.values())).aligner
        student = self._tokenize_rendered(aligner, document, "student", text)
        assert student.offsets is not None
        if spans is not None and student.text != text:
            # The aligner also normalised what the template itself writes, so the spans have moved.
            spans = [
                (len(aligner.normalize(text[:first])), len(aligner.normalize(text[:stop]))) for first, stop in spans
            ]
        mask = self._tokenization.labels(document, spans, student.ids, student.offsets)
        theirs = {}
        for i, teacher in teachers.items():
            written_for, _, written = render_document(
                teacher.tokenizer,
                document,
                whose=teacher.coverage.whose,
                stops=teacher.stops.texts,
                stops_in_text=self._tokenization.special_tokens_in_text,
                text_only=True,
            )
            left_out += teacher.coverage.check(document, written, self._tokenization.unrendered)
            theirs[i] = self._tokenize_rendered(teacher.aligner, document, "teacher", written_for)
        encoded = Encoded(student.ids, mask, left_out=left_out, name=name_of(student.text))
        return TokenizedDocument(student, encoded, theirs, {i: name_of(other.text) for i, other in theirs.items()})

    def _tokenize_rendered(self, aligner: TokenAligner, document: Mapping[str, Any], side: str, text: str) -> Tokenized:
        """A chat tokenised for one side, whose template has written the text."""
        as_tokens, options = self._tokenization.special_tokens_in_text, template_options(document)
        messages = document["messages"]
        return aligner.tokenize_messages(
            messages, side, rendered=text, options=options, special_tokens_in_text=as_tokens
        )

    def _pieces(self, document: TokenizedDocument) -> list[DocumentPiece]:
        """Steps 2 and 3: a document in pieces whose alignments hold only chunks that can be trained on."""
        alignments = {
            i: self._teachers[i].aligner.pair(document.student, tokens)
            for i, tokens in document.teachers.items()
            if document.student is not None
        }
        if self._splitter is None:
            return [self._cut(document, alignments)]
        return [
            DocumentPiece(encoded, {i: pair.trainable(encoded.label_mask) for i, pair in pairs.items()}, extents)
            for encoded, pairs, extents in self._splitter.split(document.encoded, alignments)
        ]

    def _cut(self, document: TokenizedDocument, alignments: Mapping[int, Alignment]) -> DocumentPiece:
        """The beginning of a document, up to the last boundary shared with every teacher that is asked."""
        # All sides have at most their `max_length` tokens.
        if not alignments:
            encoded = document.encoded.cut(self._tokenization.max_length)
            return DocumentPiece(encoded, {}, {STUDENT: Extent(whole=not encoded.truncated)})
        most = self._tokenization.max_length
        cut = {i: alignment.cut(most, self._max_lengths[i]) for i, alignment in alignments.items()}
        encoded = document.encoded.cut(min(len(pair.student_ids) for pair in cut.values()))
        mask = encoded.label_mask
        # Another teacher may have cut the student's row shorter than this alignment.
        cut = {i: pair.cut(len(mask)) for i, pair in cut.items()}
        extents = {i: Extent(whole=len(pair.teacher_ids) == len(document.teachers[i].ids)) for i, pair in cut.items()}
        extents[STUDENT] = Extent(whole=len(mask) == len(document.encoded.input_ids))
        trained = {i: pair.trainable(mask[: len(pair.student_ids)]) for i, pair in cut.items()}
        return DocumentPiece(encoded, trained, extents)


@dataclass
class _Attempt:
    """A document on its way. As a context it suppresses the error of a document that fails in the block, and keeps it.

    DataErrors pass, because the user has to fix those, and so does a lack of memory, which depends on the machine.
    """

    document: Mapping[str, Any]
    raises: bool
    """Whether all errors pass."""
    tokens: TokenizedDocument | None = None
    """After step 1; None if the document is left out."""
    bad: BadRow | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if self.raises or not isinstance(error, Exception) or isinstance(error, DataError | MemoryError):
            return False
        self.bad = BadRow(row_of(self.document), f"{type(error).__name__}: {error}")
        return True
