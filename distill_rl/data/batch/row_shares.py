"""Which teachers are asked for the rows of a batch, and the weights of its tokens for them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distill_rl.data.batch.tokenization import Encoded
from distill_rl.types import IGNORE_INDEX, TokenRows, TokenWeights


@dataclass(frozen=True)
class RowShares:
    """The weights of the teachers for the documents (or pieces) of a batch.

    Documents share a row only if the same teachers are asked for them (`kinds`), so that a teacher is asked for whole rows.
    """

    weights: np.ndarray
    """float64 [documents, teachers]"""
    lengths: np.ndarray
    """int64 [documents]: tokens of the student"""

    @classmethod
    def of(cls, weights: Sequence[tuple[float, ...]], encoded: Sequence[Encoded]) -> RowShares | None:
        """The shares of documents with these weights; None if teachers are not chosen by row, or there are no documents."""
        if not weights:
            return None
        lengths = np.array([len(document.input_ids) for document in encoded], dtype=np.int64)
        return cls(np.array(weights, dtype=np.float64), lengths)

    @cached_property
    def _chosen(self) -> list[bool]:
        """Per teacher, whether it has another weight than 1 for some document that is not empty."""
        return [bool(each) for each in (self.weights[self.lengths > 0] != 1).any(axis=0)]

    @cached_property
    def kinds(self) -> list[Hashable]:
        """Per document, the teachers that are asked for it; an empty document is of the first one's kind that is not."""
        kinds = [tuple(asked) for asked in (self.weights > 0).tolist()]
        first = kinds[int((self.lengths > 0).argmax())]
        return [kind if length else first for kind, length in zip(kinds, self.lengths)]

    def of_teacher(self, teacher: int) -> np.ndarray | None:
        """float64 [documents], its weights; None if all are 1."""
        return self.weights[:, teacher] if self._chosen[teacher] else None

    def asked(self, teacher: int, members: Sequence[Sequence[int]]) -> np.ndarray | None:
        """bool [R]: the rows that a teacher is asked for; None: all of them.

        Args:
            members: the documents of every row.
        """
        if not self._chosen[teacher]:
            return None
        is_asked = (self.weights[:, teacher] > 0) & (self.lengths > 0)
        return np.array([bool(is_asked[list(row)].any()) for row in members], dtype=bool)

    def token_weights(self, members: Sequence[Sequence[int]], rows: TokenRows) -> tuple[TokenWeights | None, ...]:
        """Per teacher, the weights of the tokens of rows; None if all are 1.

        Args:
            members: the documents of every row.
            rows: the student's.
        """
        return tuple(
            self._of_tokens(self.weights[:, teacher], members, rows) if chosen else None
            for teacher, chosen in enumerate(self._chosen)
        )

    def _of_tokens(self, weights: np.ndarray, members: Sequence[Sequence[int]], rows: TokenRows) -> TokenWeights:
        of_tokens = np.zeros(rows.shape, dtype=np.float32)
        for row, documents in enumerate(members):
            start = 0
            for i in documents:
                of_tokens[row, start : start + self.lengths[i]] = weights[i]
                start += self.lengths[i]
        of_tokens[rows.labels == IGNORE_INDEX] = 0
        return TokenWeights(of_tokens, float(of_tokens.sum(dtype=np.float64)), int(np.count_nonzero(of_tokens)))
