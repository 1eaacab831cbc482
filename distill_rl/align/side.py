"""One side's ids: which tokens spell text, how many bytes, and where the others stand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distill_rl.align.spans import as_slice, gather_bytes, spread
from distill_rl.align.vocabulary import Vocabulary

Indices = slice | np.ndarray


@dataclass(frozen=True)
class TokenSide:
    """The tokens of one side that spell text."""

    vocabulary: Vocabulary
    size: int
    """Number of all tokens, including padding and tokens that spell nothing"""
    tokens: Indices
    """Positions of the tokens that spell text, among all tokens"""
    ids: np.ndarray
    """intp: ids of those tokens"""
    lengths: np.ndarray
    """int32: bytes of those tokens, not counting dummy spaces taken off"""
    textless: np.ndarray
    """intp: positions of tokens that spell nothing, without padding and unknown tokens. If the unknown token shares its
    id with a stop token, it counts as unknown before the last token that spells text, and as a stop token after it."""
    without_space: tuple[int, ...] = ()
    """Indices into `ids` of tokens whose leading space was taken off as a dummy"""

    @classmethod
    def of(
        cls, vocabulary: Vocabulary, ids: np.ndarray, mask: np.ndarray | None = None, *, name: str = "ids"
    ) -> TokenSide:
        """The side made of int32 ids [n], without those whose mask is 0.

        Args:
            mask: [n], nonzero where there is a token; None: no padding.
            name: what to call the ids in an error.

        Raises:
            ValueError: an id outside of the vocabulary that is not masked.
        """
        real = as_slice(mask.nonzero()[0]) if mask is not None else slice(0, len(ids))
        wide = ids[real].view(np.uint32).astype(np.intp)  # so that a negative id is out of range for `take`
        try:
            lengths = vocabulary.lengths.take(wide)
        except IndexError as error:
            wrong = ids[real][wide >= vocabulary.size][0]
            rule = f"a token id must lie in 0 … {vocabulary.size - 1}, the tokenizer's range"
            raise ValueError(f"{name}: {rule}, got {wrong}; give a mask with 0 at padding") from error
        if lengths.all():
            return cls(vocabulary, len(ids), real, wide, lengths, wide[:0])
        spelling = as_slice(lengths.nonzero()[0])
        textless = (lengths == 0).nonzero()[0]
        if vocabulary.unknown is not None:
            known = wide[textless] != vocabulary.unknown
            if vocabulary.unknown in vocabulary.stops:
                known |= textless > lengths.nonzero()[0].max(initial=-1)
            textless = textless[known]
        textless = textless + real.start if isinstance(real, slice) else real[textless]
        return cls(vocabulary, len(ids), _select(real, spelling), wide[spelling], lengths[spelling], textless)

    def readings(self) -> Iterator[TokenSide]:
        """Yields variants of this side without spaces that may be dummies: before the text, and behind special tokens.

        The first variant lacks all of them, which is the likeliest case; the last one is the side unchanged. No variant
        comes twice, so a side without such spaces yields only itself.
        """
        first, later = self._possible_dummies()
        seen: list[tuple[int, ...]] = []
        for places in (first + later, later, first, ()):
            if places not in seen:
                seen.append(places)
                yield self._without_spaces(places)

    def _possible_dummies(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Indices into `ids` of tokens that may begin with a dummy space: the first token, and later ones."""
        # The later ones are those behind a special token. Only tokens that begin with a space count.
        vocabulary = self.vocabulary
        first: tuple[int, ...] = ()
        later: tuple[int, ...] = ()
        if len(self.ids) and vocabulary.dummy and vocabulary.opens_with_space(self.ids[0]):
            first = (0,)
        if vocabulary.dummy_after_special and not isinstance(self.tokens, slice):
            behind = np.unique(self.tokens.searchsorted(self.textless))
            behind = behind[(behind > 0) & (behind < len(self.ids))].tolist()
            later = tuple(place for place in behind if vocabulary.opens_with_space(self.ids[place]))
        return first, later

    def _without_spaces(self, places: tuple[int, ...]) -> TokenSide:
        """This side with the leading space taken off the tokens at these indices into `ids`."""
        # Each of them must begin with a space. A token that was nothing but the space leaves the side, since it no
        # longer spells text. Returns the side itself if there are no indices.
        if not places:
            return self
        lengths = self.lengths.copy()
        lengths[list(places)] -= 1
        if lengths.all():
            return replace(self, lengths=lengths, without_space=places)
        # A token that was nothing but the space no longer spells text and leaves this side's tokens.
        remaining = lengths.nonzero()[0]
        kept = remaining.searchsorted([place for place in places if lengths[place]]).tolist()
        chosen = as_slice(remaining)
        return replace(
            self,
            tokens=_select(self.tokens, chosen),
            ids=self.ids[chosen],
            lengths=lengths[chosen],
            without_space=tuple(kept),
        )

    def spell(self) -> np.ndarray:
        """uint8: the bytes of all tokens that spell text, one after another, without dummy spaces taken off."""
        starts = self.vocabulary.starts.take(self.ids)
        starts[list(self.without_space)] += 1
        return gather_bytes(self.vocabulary.flat, starts, self.lengths, self.ends)

    @cached_property
    def ends(self) -> np.ndarray:
        """int64: where each token ends in the bytes that `spell` returns."""
        return self.lengths.cumsum(dtype=np.int64)

    def full(self, chunk: np.ndarray) -> np.ndarray:
        """int32 [size]: the chunk indices of `ids`, spread over all tokens; −1 for the others."""
        return spread(chunk, self.tokens, self.size)

    def bytes_before(self, tokens: np.ndarray) -> np.ndarray:
        """int64: number of bytes that the side spells before each of these textless tokens.

        Args:
            tokens: int [k]: positions among all tokens, of tokens that spell nothing.
        """
        if isinstance(self.tokens, slice):
            before = np.clip(tokens - self.tokens.start, 0, len(self.ids))
        else:
            before = self.tokens.searchsorted(tokens)
        return np.where(before > 0, self.ends.take(before - 1, mode="clip"), 0) if len(self.ids) else before


def _select(positions: Indices, chosen: Indices) -> Indices:
    """positions[chosen], where `chosen` holds indices into `positions`; the result is a slice if both are slices."""
    if not isinstance(positions, slice):
        return positions[chosen]
    if isinstance(chosen, slice):
        return slice(positions.start + chosen.start, positions.start + chosen.stop)
    return chosen + positions.start
