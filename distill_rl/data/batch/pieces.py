"""One document → the pieces of it that rows hold (`data.long_documents`), and how a store of targets finds them.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from distill_rl.align import Alignment
from distill_rl.data.batch.tokenization import Encoded
from distill_rl.data.routing import asked
from distill_rl.types import PieceRef

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
        empty, other = (tokenizer(text)["input_ids"] for text in ("", "a"))
        shared = takewhile(lambda pair: pair[0] == pair[1] and pair[0] in special, zip(empty, other))
        return cls(limit, tuple(id for id, _ in shared))

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
        sides = [encoded.input_ids, *(alignments[i].teacher_ids for i in teachers)]
        rules = [self.student, *(self.teachers[i] for i in teachers)]
        limits = np.array([side.limit for side in rules], dtype=np.int64)
        end = np.array([len(ids) for ids in sides], dtype=np.int64)
        names = [STUDENT, *teachers]
        if (end <= limits).all():
            return [DocumentPiece(encoded, dict(alignments), dict.fromkeys(names, Extent()))]
        if not end[0]:
            nothing = {i: alignment.part((0, 0), (0, 0)) for i, alignment in alignments.items()}
            return [DocumentPiece(encoded, nothing, {name: Extent(whole=not count) for name, count in zip(names, end)})]
        prefixes = [side.of_document(ids) for side, ids in zip(rules, sides)]
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
            part = encoded.part(int(start[0]), int(stop[0]), before[0])
            pairs = {
                i: alignments[i]
                .part((int(start[0]), int(start[side])), (int(stop[0]), int(stop[side])))
                .preceded_by(before[0], before[side])
                for side, i in enumerate(teachers, start=1)
            }
            extents = {
                name: Extent(int(start[side]), len(before[side]), bool(stop[side] == end[side]))
                for side, name in enumerate(names)
            }
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


def ref_of(piece: DocumentPiece, teacher: int, names: Mapping[int, bytes]) -> PieceRef:
    """The first part of `ref_and_tokens`."""
    return ref_and_tokens(piece, teacher, names)[0]


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
