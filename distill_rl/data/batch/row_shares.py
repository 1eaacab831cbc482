"""Which teachers are asked for the rows of a batch, and the weights of its tokens for them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distill_rl.data.batch.document_aligner import AlignedDocument
from distill_rl.types import IGNORE_INDEX, TokenRows, TokenWeights


@dataclass(frozen=True)
class RowShares:
    """The weights of the teachers for the pieces of a batch.

    Pieces share a row only if the same teachers are asked for them (`kinds`), so that a teacher is asked for whole rows.
    """

    weights: np.ndarray
    """float64 [pieces, teachers]"""
    lengths: np.ndarray
    """int64 [pieces]: tokens of the student"""

    @classmethod
    def of(cls, documents: Sequence[AlignedDocument]) -> RowShares | None:
        """None if teachers are not chosen by row, or there are no documents."""
        pieces = [
            (document.weights, len(piece.encoded.input_ids))
            for document in documents
            if document.weights is not None
            for piece in document.pieces
        ]
        if not pieces:
            return None
        weights = np.array([of_teachers for of_teachers, _ in pieces], dtype=np.float64)
        return cls(weights, np.array([length for _, length in pieces], dtype=np.int64))

    @cached_property
    def _chosen(self) -> list[bool]:
        """Per teacher, whether it has another weight than 1 for some document that is not empty."""
        return [bool(each) for each in (self.weights[self.lengths > 0] != 1).any(axis=0)]

    @cached_property
    def kinds(self) -> list[Hashable]:
        """Per piece, the teachers that are asked for it; an empty piece is of the first one's kind that is not."""
        is_asked = self.weights > 0
        first = is_asked[int((self.lengths > 0).argmax())]
        return [tuple(kind) for kind in np.where(self.lengths[:, None] > 0, is_asked, first).tolist()]

    def of_teacher(self, teacher: int) -> np.ndarray | None:
        """float64 [pieces], its weights; None if all are 1."""
        return self.weights[:, teacher] if self._chosen[teacher] else None

    def asked(self, teacher: int, members: Sequence[Sequence[int]]) -> np.ndarray | None:
        """bool [R]: the rows that a teacher is asked for; None: all of them.

        Args:
            members: the pieces of every row.
        """
        if not self._chosen[teacher]:
            return None
        is_asked = (self.weights[:, teacher] > 0) & (self.lengths > 0)
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
