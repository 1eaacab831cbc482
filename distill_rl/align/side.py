"""One side's ids: which tokens spell something, how many bytes, and what the others mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distill_rl.align.spans import gather, stretch
from distill_rl.align.tokenizer.vocabulary import Vocabulary

Places = slice | np.ndarray


@dataclass(frozen=True)
class Side:
    """The tokens of one side that spell something."""

    vocabulary: Vocabulary
    size: int
    """tokens, those that spell nothing and padding included"""
    tokens: Places
    """where they stand"""
    ids: np.ndarray
    """intp, of those tokens"""
    lengths: np.ndarray
    """int32, of those tokens, without dropped bytes"""
    silent: np.ndarray
    """intp: where tokens stand that spell nothing, but for padding and the unknown token. One whose id is also that of a
    stop token is unknown before the last token that spells something, and a stop token behind it."""
    dropped: tuple[int, ...] = ()
    """places in `ids` whose leading space is not in the text"""

    @classmethod
    def of(cls, vocabulary: Vocabulary, ids: np.ndarray, mask: np.ndarray | None = None, *, name: str = "ids") -> Side:
        """Of int32 ids [n], those left out whose mask is 0.

        Args:
            name: what to call the ids in an error.

        Raises:
            ValueError: an id outside of the vocabulary.
        """
        real = stretch(mask.nonzero()[0]) if mask is not None else slice(0, len(ids))
        wide = ids[real].view(np.uint32).astype(np.intp)  # a negative id is out of range, not counted from the end
        try:
            lengths = vocabulary.lengths.take(wide)
        except IndexError as error:
            wrong = ids[real][wide >= vocabulary.size][0]
            rule = f"a token's id lies in 0 … {vocabulary.size - 1}, the tokenizer's"
            raise ValueError(f"{name}: {rule}, got {wrong}; give a mask with 0 at padding") from error
        if lengths.all():
            return cls(vocabulary, len(ids), real, wide, lengths, wide[:0])
        spelling = stretch(lengths.nonzero()[0])
        silent = (lengths == 0).nonzero()[0]
        if vocabulary.unknown is not None:
            known = wide[silent] != vocabulary.unknown
            if vocabulary.unknown in vocabulary.stops:
                known |= silent > lengths.nonzero()[0].max(initial=-1)
            silent = silent[known]
        silent = silent + real.start if isinstance(real, slice) else real[silent]
        return cls(vocabulary, len(ids), _at(real, spelling), wide[spelling], lengths[spelling], silent)

    def readings(self) -> Iterator[Side]:
        """This side without spaces that its tokenizer may have put before the text and behind specials.

        First without all of them, which is the likeliest, last as it is.
        """
        first, later = self._droppable()
        seen: list[tuple[int, ...]] = []
        for places in (first + later, later, first, ()):
            if places not in seen:
                seen.append(places)
                yield self._without(places)

    def _droppable(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        vocabulary = self.vocabulary
        first: tuple[int, ...] = ()
        later: tuple[int, ...] = ()
        if len(self.ids) and vocabulary.dummy and vocabulary.opens_with_space(self.ids[0]):
            first = (0,)
        if vocabulary.dummy_after_special and not isinstance(self.tokens, slice):
            behind = np.unique(self.tokens.searchsorted(self.silent))
            behind = behind[(behind > 0) & (behind < len(self.ids))].tolist()
            later = tuple(place for place in behind if vocabulary.opens_with_space(self.ids[place]))
        return first, later

    def _without(self, places: tuple[int, ...]) -> Side:
        if not places:
            return self
        lengths = self.lengths.copy()
        lengths[list(places)] -= 1
        if lengths.all():
            return replace(self, lengths=lengths, dropped=places)
        # A piece that was only that space spells nothing: it leaves this side's tokens, silent as it is.
        left = lengths.nonzero()[0]
        kept = left.searchsorted([place for place in places if lengths[place]]).tolist()
        chosen = stretch(left)
        return replace(
            self, tokens=_at(self.tokens, chosen), ids=self.ids[chosen], lengths=lengths[chosen], dropped=tuple(kept)
        )

    def spell(self) -> np.ndarray:
        """uint8: the bytes of all, without the dropped ones."""
        starts = self.vocabulary.starts.take(self.ids)
        starts[list(self.dropped)] += 1
        return gather(self.vocabulary, starts, self.lengths, self.ends)

    @cached_property
    def ends(self) -> np.ndarray:
        """int64: the byte position at which each token ends."""
        return self.lengths.cumsum(dtype=np.int64)

    def full(self, numbers: np.ndarray) -> np.ndarray:
        """int32 [size]: chunk numbers of `ids`, −1 at other tokens."""
        if len(numbers) == self.size:
            return numbers
        whole = np.full(self.size, -1, np.int32)
        whole[self.tokens] = numbers
        return whole

    def positions(self, tokens: np.ndarray) -> np.ndarray:
        """int64: how many bytes stand before each of these silent tokens."""
        if isinstance(self.tokens, slice):
            before = np.clip(tokens - self.tokens.start, 0, len(self.ids))
        else:
            before = self.tokens.searchsorted(tokens)
        return np.where(before > 0, self.ends.take(before - 1, mode="clip"), 0) if len(self.ids) else before


def _at(places: Places, chosen: Places) -> Places:
    """places[chosen], a slice of a slice being a slice."""
    if not isinstance(places, slice):
        return places[chosen]
    if isinstance(chosen, slice):
        return slice(places.start + chosen.start, places.start + chosen.stop)
    return chosen + places.start
