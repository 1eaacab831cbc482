"""What a document is called in a store of targets, and which teachers' targets are read or stored."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from distill_rl.data.routing import asked
from distill_rl.types import NAME_BYTES, PieceRef

if TYPE_CHECKING:
    from distill_rl.data.batch.pieces import Piece


def name_of(text: str) -> bytes:
    """The name of a document, 16 bytes: BLAKE2b of its text in Unicode's form NFC, as UTF-8.

    Args:
        text: as the tokenizer gets it; of a chat, what the chat template makes of it. Lone surrogates are allowed.
    """
    normalised = unicodedata.normalize("NFC", text)
    return blake2b(normalised.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES).digest()


def ref_and_tokens(piece: Piece, teacher: int, names: Mapping[int, bytes]) -> tuple[PieceRef, np.ndarray]:
    """By which a store finds a piece as a teacher reads it, and the teacher's tokens of it, int32 [n].

    Args:
        names: the document's name for teachers with their own tokenizer; the others read the student's tokens.
    """
    from distill_rl.data.batch.pieces import STUDENT, Extent

    is_own = teacher in piece.alignments
    tokens = piece.alignments[teacher].teacher_ids if is_own else piece.encoded.input_ids
    extent = piece.extents.get(teacher if is_own else STUDENT, Extent())
    name = names.get(teacher, b"") if is_own else piece.encoded.name
    return PieceRef(name, extent.first, extent.prefix, len(tokens), extent.whole), tokens


def ref_of(piece: Piece, teacher: int, names: Mapping[int, bytes]) -> PieceRef:
    """The first part of `ref_and_tokens`."""
    return ref_and_tokens(piece, teacher, names)[0]


@dataclass(frozen=True, slots=True)
class StoredTargets:
    """The teachers whose targets are read or stored."""

    teachers: frozenset[int] = frozenset()
    """Their indices: rows for them say which pieces they hold (`RankBatch.pieces`)."""
    required: Mapping[int, Callable[[PieceRef, np.ndarray], bool]] = field(default_factory=dict)
    """By the index of each whose store decides what is trained on: whether the store has a piece with these tokens."""

    def no_refs(self) -> dict[int, list[PieceRef]]:
        """An empty list for each of these teachers."""
        return {i: [] for i in self.teachers}

    def have(self, pieces: Sequence[Piece], names: Mapping[int, bytes], weights: Sequence[float] | None = None) -> bool:
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
NOTHING = PieceRef(b"", 0, 0, 0, True)
"""Stands for a piece that a teacher is not asked for."""
