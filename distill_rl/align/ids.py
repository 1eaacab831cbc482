"""Chunks and stop pairs from ids. The text is unknown, but the bytes of every token are, so the two sides check each other.

If both sides spell the same bytes, those bytes are the text, and chunks end where both sides end a token. If they do
not, the equal bytes at the beginning and at the end are aligned in the same way, and the tokens in between, the window,
go to the dynamic programme:

    student   | equal bytes |  window  | equal bytes |
    teacher   | equal bytes |    window    | equal bytes |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from distill_rl.align.alignment import TokenChunks, TokenPositions, chunks_by_ends, gather_bytes, keep_chunks, writable
from distill_rl.align.vocabulary import SPACE, Vocabulary

Indices = slice | np.ndarray
IdPair = tuple[np.ndarray, np.ndarray]
"""Ids of the student's and of the teacher's tokens, or their chunk indices, −1 for none"""


class IdRow(NamedTuple):
    """All ids of one side."""

    vocabulary: Vocabulary
    ids: np.ndarray
    """int32 [n]"""
    keep: np.ndarray = np.zeros(0, bool)
    """bool [n], False at padding; empty: there is none"""
    name: str = "ids"
    """What to call the ids in an error"""


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
    """intp: positions of tokens that spell nothing, without padding and unknown tokens"""
    without_space: tuple[int, ...] = ()
    """Indices into `ids` of tokens whose leading space was taken off as a dummy"""

    @classmethod
    def of(cls, row: IdRow) -> TokenSide:
        """The side made of a row's ids, without padding.

        Raises:
            ValueError: an id outside of the vocabulary that is not padding.
        """
        vocabulary, ids = row.vocabulary, row.ids
        real = _as_slice(row.keep.nonzero()[0]) if len(row.keep) else slice(0, len(ids))
        wide = ids[real].view(np.uint32).astype(np.intp)  # so that a negative id is out of range for `take`
        try:
            lengths = vocabulary.lengths.take(wide)
        except IndexError as error:
            wrong = ids[real][wide >= vocabulary.size][0]
            rule = f"a token id must lie in 0 … {vocabulary.size - 1}, the tokenizer's range"
            raise ValueError(f"{row.name}: {rule}, got {wrong}; give a mask with 0 at padding") from error
        if lengths.all():
            return cls(vocabulary, len(ids), real, wide, lengths, wide[:0])
        spelling = _as_slice(lengths.nonzero()[0])
        textless = (lengths == 0).nonzero()[0]
        if vocabulary.unknown is not None:
            textless = textless[wide[textless] != vocabulary.unknown]
        textless = textless + real.start if isinstance(real, slice) else real[textless]
        tokens = _select(real, spelling)
        return cls(vocabulary, len(ids), tokens, wide[spelling], lengths[spelling], textless)

    def readings(self) -> Iterator[TokenSide]:
        """Yields variants of this side without spaces that may be dummies: before the text, and behind special tokens.

        The first variant lacks all of them, which is the likeliest case; the last one is the side unchanged. No variant
        comes twice, so a side without such spaces yields only itself.
        """
        # Indices into `ids` of tokens that begin with a space: the first token, and those behind a special token.
        vocabulary, first, later = self.vocabulary, list[int](), list[int]()
        if len(self.ids) and vocabulary.dummy and vocabulary.opens_with_space(self.ids[0]):
            first = [0]
        if vocabulary.dummy_after_special and not isinstance(self.tokens, slice):
            behind = np.unique(self.tokens.searchsorted(self.textless))
            behind = behind[(behind > 0) & (behind < len(self.ids))].tolist()
            later = [place for place in behind if vocabulary.opens_with_space(self.ids[place])]
        for places in dict.fromkeys(map(tuple, (first + later, later, first, ()))):
            yield self._without_spaces(places)

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
        chosen = _as_slice(remaining)
        tokens, ids, lengths = _select(self.tokens, chosen), self.ids[chosen], lengths[chosen]
        return replace(self, tokens=tokens, ids=ids, lengths=lengths, without_space=tuple(kept))

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
        """int32 [size]: the chunk indices of `ids`, spread over all tokens; −1 for the others. Not a copy if these are all."""
        if len(chunk) == self.size:
            return chunk
        row = np.full(self.size, -1, np.int32)
        row[self.tokens] = chunk
        return row

    def places(self) -> np.ndarray:
        """int64 [size + 1]: number of bytes that the side spells before each of all tokens and, last, in all."""
        lengths = np.zeros(self.size + 1, np.int64)
        lengths[1:][self.tokens] = self.lengths
        return lengths.cumsum()


def _as_slice(positions: np.ndarray) -> slice | np.ndarray:
    """Ascending positions as a slice if they are contiguous or there are none, otherwise the array itself."""
    # Slicing an array makes a view, indexing makes a copy.
    if not len(positions):
        return slice(0, 0)
    first, stop = int(positions[0]), int(positions[-1]) + 1
    return slice(first, stop) if stop - first == len(positions) else positions


def _select(positions: Indices, chosen: Indices) -> Indices:
    """positions[chosen], where `chosen` holds indices into `positions`; the result is a slice if both are slices."""
    if not isinstance(positions, slice):
        return positions[chosen]
    if isinstance(chosen, slice):
        return slice(positions.start + chosen.start, positions.start + chosen.stop)
    return chosen + positions.start


# Pairs the tokens that open a text or end a turn across the two sides, by role and position.

StopPairs = list[tuple[int, int]]


def pair_stops(rows: Sequence[IdRow], sides: Sequence[TokenSide]) -> StopPairs:
    """Pairs (student position, teacher position) from ids alone: bos with bos, and stop tokens after the same byte.

    bos is paired only before the first byte. Of several stop tokens after one byte, the first is paired; none before
    the first byte, unless a side spells nothing.

    Args:
        rows, sides: of the student and of the teacher.
    """
    from distill_rl.align.compiled import stop_pairs_of_ids  # imports Numba

    left, right = ((row.vocabulary.table, writable(row.ids), row.keep, side.places()) for row, side in zip(rows, sides))
    return as_pairs(stop_pairs_of_ids(*left, *right))


def pair_stops_of_spans(
    vocabularies: Sequence[Vocabulary], ids: IdPair, positions: Sequence[TokenPositions], spans: np.ndarray
) -> StopPairs:
    """Pairs (student position, teacher position): bos with bos, and the first stop tokens behind the i-th spans.

    Args:
        vocabularies, ids, positions: of the student and of the teacher.
        spans: int64 [k, 4]: student start and stop, teacher start and stop in bytes of each side's text.
    """
    from distill_rl.align.compiled import stop_pairs_of_spans  # imports Numba

    left, right = (
        (vocabulary.table, writable(row), side.starts, side.ends)
        for vocabulary, row, side in zip(vocabularies, ids, positions)
    )
    return as_pairs(stop_pairs_of_spans(*left, *right, spans))


def as_pairs(pairs: np.ndarray) -> StopPairs:
    """int64 [k, 2] as a list of tuples, in the order of the student's positions."""
    return sorted(map(tuple, pairs.tolist())) if len(pairs) else []


# Chunks from ids alone. The text is unknown, but the bytes of every token are, so the two sides check each other.

Window = Callable[[np.ndarray, np.ndarray], IdPair]
"""(student ids, teacher ids) → chunk indices of both"""


@dataclass(frozen=True)
class IdAlignment:
    """The result of `IdAligner`: the chunks, and how they were found."""

    chunks: TokenChunks
    stops: StopPairs
    same_bytes: bool
    """Whether both sides spell the same bytes"""
    method: str = "bytes"


class IdAligner:
    """Aligns two sides' ids.

    Args:
        compiled: compare the sides' bytes in compiled code; with False both sides are spelled first. The results are
            the same.
        window: aligns the tokens between the equal bytes, or None.
    """

    def __init__(self, compiled: bool, window: Window | None) -> None:
        self._compiled, self._window = compiled, window

    def align_same_bytes(self, student: IdRow, teacher: IdRow) -> IdAlignment | None:
        """Chunks of two sides that spell the same bytes; None if they do not.

        Spaces that may be dummies are taken off in every combination, the likeliest first.

        Raises:
            ValueError: an id outside of its vocabulary that is not padding.
        """
        rows = student, teacher
        if self._compiled:
            from distill_rl.align.compiled import align_same_bytes  # imports Numba

            left, right = ((row.vocabulary.table, writable(row.ids), row.keep) for row in rows)
            chunk = np.empty(len(student.ids), np.int32), np.empty(len(teacher.ids), np.int32)
            count, stops = align_same_bytes(*left, *right, *chunk)
            return IdAlignment(TokenChunks(*chunk, count), as_pairs(stops), True) if count >= 0 else None
        for sides in product(*(TokenSide.of(row).readings() for row in rows)):
            left_side, right_side = sides
            if left_side.spell().tobytes() == right_side.spell().tobytes():
                chunks, _, _ = chunks_by_ends(left_side.ends, right_side.ends)
                full = TokenChunks(left_side.full(chunks.student), right_side.full(chunks.teacher), chunks.count)
                return IdAlignment(full, pair_stops(rows, sides), True)
        return None

    def align(self, student: IdRow, teacher: IdRow, *, everything_by_dp: bool = False) -> IdAlignment:
        """Chunks of two sides: by bytes and, where these differ, by the window's solver.

        If the bytes differ and there is no solver, only the equal bytes at the beginning are aligned. The chunk arrays
        cover all tokens of each side, padding and tokens without text included (−1).

        Args:
            everything_by_dp: give all tokens to the solver, even if the bytes are equal; ignored without a solver.

        Raises:
            ValueError: an id outside of its vocabulary that is not padding.
        """
        same = self.align_same_bytes(student, teacher)
        if same is not None and (not everything_by_dp or self._window is None):
            return same
        rows = student, teacher
        sides = TokenSide.of(student), TokenSide.of(teacher)
        if everything_by_dp and self._window is not None:
            window = self._window(sides[0].ids, sides[1].ids)
            chunks = _as_chunks([side.full(part) for side, part in zip(sides, window)])
            return IdAlignment(chunks, pair_stops(rows, sides), same is not None, "dp")
        return self._align_different_bytes(rows, sides)

    def _align_different_bytes(self, rows: Sequence[IdRow], whole: Sequence[TokenSide]) -> IdAlignment:
        """Chunks of the equal bytes at both ends and, by the window's solver, of the tokens in between."""
        # Without a solver, or if one side's bytes are only the beginning of the other's, just the equal beginning is
        # aligned. Of the readings with and without dummy spaces, the one with the longest equal beginning is used.
        pairs = product(*(side.readings() for side in whole))
        readings = [(sides, [side.spell() for side in sides]) for sides in pairs]
        sides, spelled = max(readings, key=lambda reading: _common_prefix(*reading[1]))
        common = _common_prefix(*spelled)
        ends = [side.ends for side in sides]

        # The beginning: chunks up to the last shared boundary within the common bytes.
        head, *last = chunks_by_ends(*(side[side <= common] for side in ends))
        starts = [int(tokens[-1]) + 1 if len(tokens) else 0 for tokens in last]
        chunk = [np.full(len(side), -1, np.int32) for side in ends]
        for row, part, start in zip(chunk, (head.student, head.teacher), starts):
            row[:start] = part[:start]

        method = "bytes"
        one_side_ends_early = common == min(map(len, spelled))
        if self._window is not None and not one_side_ends_early:
            method = "dp"
            stops = _window_stops(spelled, ends, starts)
            window = self._window(*(side.ids[start:stop] for side, start, stop in zip(sides, starts, stops)))
            count = _write_chunks(chunk, window, starts, head.count)
            behind = (side[stop:] - (side[stop - 1] if stop else 0) for side, stop in zip(ends, stops))
            tail, _, _ = chunks_by_ends(*behind)
            _write_chunks(chunk, (tail.student, tail.teacher), stops, count)
        full = [side.full(row) for side, row in zip(sides, chunk)]
        return IdAlignment(_as_chunks(full), pair_stops(rows, sides), False, method)


def _write_chunks(rows: list[np.ndarray], parts: Sequence[np.ndarray], starts: Sequence[int], count: int) -> int:
    """Writes chunks counted from 0 into both sides' `rows`, in place, numbered from `count` on; returns the new count."""
    for row, part, start in zip(rows, parts, starts):
        row[start : start + len(part)] = np.where(part >= 0, part + count, -1)
    return count + _as_chunks(parts).count


def _as_chunks(sides: Sequence[np.ndarray]) -> TokenChunks:
    return TokenChunks(sides[0], sides[1], max((int(side.max()) + 1 for side in sides if len(side)), default=0))


def _window_stops(spelled: Sequence[np.ndarray], ends: Sequence[np.ndarray], starts: Sequence[int]) -> tuple[int, int]:
    """Token counts (student, teacher) at the window's end: the first shared boundary in the equal bytes at the end."""
    # All tokens if the sides share no boundary there. Boundaries are counted in bytes from the end of the text, so
    # that shared ones have equal numbers. Bytes that the head has already used are not used again.
    sizes = [len(part) for part in spelled]
    unused = (size - (int(end[start - 1]) if start else 0) for size, end, start in zip(sizes, ends, starts))
    common = min(_common_prefix(spelled[0][::-1], spelled[1][::-1]), *unused)
    left, right = (size - end for size, end in zip(sizes, ends))
    shared = np.intersect1d(left[left <= common], right[right <= common])
    if not len(shared) or shared[-1] == 0:
        return len(ends[0]), len(ends[1])
    return int(np.flatnonzero(left == shared[-1])[0]) + 1, int(np.flatnonzero(right == shared[-1])[0]) + 1


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Number of equal elements at the start of two arrays."""
    size = min(len(left), len(right))
    differ = (left[:size] != right[:size]).nonzero()[0]
    return int(differ[0]) if len(differ) else size


def same_spelling(vocabularies: Sequence[Vocabulary], ids: IdPair, chunks: IdPair) -> IdPair:
    """Chunk indices int32 [n], [m] without the chunks whose two sides spell different bytes, renumbered.

    One space at the start of a chunk may be missing on the side of a tokenizer that drops the space between words, or
    be present on the side of one that puts a dummy space before a text.

    Args:
        vocabularies, ids, chunks: of the student and of the teacher; chunks are −1 for a token in none, and must not
            decrease otherwise.
    """
    count = _as_chunks(chunks).count
    left, right = (_ChunkBytes.of(*side, count) for side in zip(vocabularies, ids, chunks))
    left_may_lack = vocabularies[0].drops_spaces or vocabularies[1].dummy
    right_may_lack = vocabularies[1].drops_spaces or vocabularies[0].dummy
    surplus = left.sizes - right.sizes
    left_extra = (surplus == 1) & right_may_lack & left.opens_with_space
    right_extra = (surplus == -1) & left_may_lack & right.opens_with_space
    keep = (surplus == 0) | left_extra | right_extra
    # Without that space both sides of a remaining chunk have equally many bytes, so all chunks can be compared at once.
    texts = left.of_chunks(keep, left_extra), right.of_chunks(keep, right_extra)
    sizes = np.where(keep, np.minimum(left.sizes, right.sizes), 0)
    chunk_of_byte = np.repeat(np.arange(count), sizes)
    keep[chunk_of_byte[texts[0] != texts[1]]] = False
    return keep_chunks(keep, *chunks)


@dataclass(frozen=True)
class _ChunkBytes:
    """The bytes of one side's chunks, one chunk after another."""

    text: np.ndarray
    """uint8"""
    begins: np.ndarray
    """int64 [count]: where each chunk begins in `text`"""
    sizes: np.ndarray
    """int64 [count]: bytes of each chunk"""

    @classmethod
    def of(cls, vocabulary: Vocabulary, ids: np.ndarray, chunks: np.ndarray, count: int) -> _ChunkBytes:
        """Collects the bytes of the chunks of one side's tokens.

        Args:
            ids: int [n].
            chunks: int [n]: chunk of each token; must not decrease from token to token, apart from −1.
            count: number of chunks, including any without tokens on this side.
        """
        tokens = np.flatnonzero(chunks >= 0)
        token_ids = ids[tokens].astype(np.intp)
        lengths = vocabulary.lengths.take(token_ids).astype(np.int64)
        text = gather_bytes(vocabulary.flat, vocabulary.starts.take(token_ids), lengths, lengths.cumsum())
        sizes = np.bincount(chunks[tokens], lengths, count).astype(np.int64)
        return cls(text, sizes.cumsum() - sizes, sizes)

    @property
    def opens_with_space(self) -> np.ndarray:
        """bool [count]: whether the chunk's first byte is a space; False for a chunk without bytes."""
        padded = np.append(self.text, np.uint8(0))  # an empty last chunk begins past the end of the text
        return (self.sizes > 0) & (padded[self.begins] == SPACE)

    def of_chunks(self, chosen: np.ndarray, without_first: np.ndarray) -> np.ndarray:
        """uint8: the bytes of the chosen chunks, one after another.

        Args:
            chosen: bool [count].
            without_first: bool [count]: chunks whose first byte is left out; each must have one.
        """
        kept = np.repeat(chosen, self.sizes)
        kept[self.begins[without_first]] = False
        return self.text[kept]
