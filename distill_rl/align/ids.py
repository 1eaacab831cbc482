"""Chunks from ids alone. The text is unknown, but the bytes of every token are, so the two sides check each other.

If both sides spell the same bytes, those bytes are the text, and chunks end where both sides end a token. If they do
not, the equal bytes at the beginning and at the end are aligned in the same way, and the tokens in between, the window,
go to the dynamic programme:

    student   | equal bytes |  window  | equal bytes |
    teacher   | equal bytes |    window    | equal bytes |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from distill_rl.align.side import TokenSide
from distill_rl.align.spans import TokenChunks, chunks_by_ends, gather_bytes, keep_chunks
from distill_rl.align.vocabulary import SPACE, Vocabulary

Window = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(student ids, teacher ids) → chunk indices of both, −1 for none"""
Pair = tuple[TokenSide, TokenSide]


@dataclass(frozen=True)
class IdAlignment:
    """The result of `IdAligner`: the chunks, and how they were found."""

    chunks: TokenChunks
    sides: Pair
    """The sides without the dummy spaces that were taken off to match them"""
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

    def _equal(self, student: TokenSide, teacher: TokenSide) -> bool:
        """Whether two sides spell the same bytes; both must spell equally many."""
        if not self._compiled:
            return student.spell().tobytes() == teacher.spell().tobytes()
        from distill_rl.align.dp.compiled import same_bytes

        return same_bytes(student, teacher)

    def align_same_bytes(self, student: TokenSide, teacher: TokenSide) -> IdAlignment | None:
        """Chunks of two sides that spell the same bytes; None if they do not.

        Spaces that may be dummies are taken off in every combination, the likeliest first; the `sides` of the result
        are those that matched.
        """
        for sides in product(student.readings(), teacher.readings()):
            ends = sides[0].ends, sides[1].ends
            if _total(ends[0]) != _total(ends[1]):
                continue
            chunks, _, _ = chunks_by_ends(*ends)
            if self._equal(*sides):
                full = [side.full(chunk) for side, chunk in zip(sides, (chunks.student, chunks.teacher))]
                return IdAlignment(TokenChunks(full[0], full[1], chunks.count), sides, True)
        return None

    def align(self, student: TokenSide, teacher: TokenSide, *, everything_by_dp: bool = False) -> IdAlignment:
        """Chunks of two sides: by bytes and, where these differ, by the window's solver.

        If the bytes differ and there is no solver, only the equal bytes at the beginning are aligned. The chunk arrays
        cover all tokens of each side, padding and tokens without text included (−1).

        Args:
            everything_by_dp: give all tokens to the solver, even if the bytes are equal; ignored without a solver.
        """
        same = self.align_same_bytes(student, teacher)
        if everything_by_dp and self._window is not None:
            solved = self._window(student.ids, teacher.ids)
            full = [side.full(chunk) for side, chunk in zip((student, teacher), solved)]
            return IdAlignment(_as_chunks(full), (student, teacher), same is not None, "dp")
        return same or self._align_different_bytes(student, teacher)

    def _align_different_bytes(self, student: TokenSide, teacher: TokenSide) -> IdAlignment:
        """Chunks of the equal bytes at both ends and, by the window's solver, of the tokens in between."""
        # Without a solver, or if one side's bytes are only the beginning of the other's, just the equal beginning is
        # aligned. Of the readings with and without dummy spaces, the one with the longest equal beginning is used.
        pairs = product(student.readings(), teacher.readings())
        readings = [(sides, [side.spell() for side in sides]) for sides in pairs]
        sides, spelled = max(readings, key=lambda reading: _common_prefix(*reading[1]))
        common = _common_prefix(*spelled)
        ends = [side.ends for side in sides]

        # The beginning: chunks up to the last shared boundary within the common bytes.
        head, *last = chunks_by_ends(*(side[side <= common] for side in ends))
        starts = [int(tokens[-1]) + 1 if len(tokens) else 0 for tokens in last]
        rows = [np.full(len(side), -1, np.int32) for side in ends]
        for row, part, start in zip(rows, (head.student, head.teacher), starts):
            row[:start] = part[:start]

        method = "bytes"
        one_side_ends_early = common == min(map(len, spelled))
        if self._window is not None and not one_side_ends_early:
            method = "dp"
            stops = _window_stops(spelled, ends, starts)
            window = self._window(*(side.ids[start:stop] for side, start, stop in zip(sides, starts, stops)))
            count = _write_chunks(rows, window, starts, head.count)
            tail, _, _ = chunks_by_ends(
                *(side[stop:] - (side[stop - 1] if stop else 0) for side, stop in zip(ends, stops))
            )
            _write_chunks(rows, (tail.student, tail.teacher), stops, count)
        full = [side.full(row) for side, row in zip(sides, rows)]
        return IdAlignment(_as_chunks(full), sides, False, method)


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


def _total(ends: np.ndarray) -> int:
    return int(ends[-1]) if len(ends) else 0


def same_spelling(
    vocabularies: tuple[Vocabulary, Vocabulary],
    ids: tuple[np.ndarray, np.ndarray],
    chunks: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Chunk indices int32 [n], [m] without the chunks whose two sides spell different bytes, renumbered.

    One space at the start of a chunk may be missing on the side of a tokenizer that drops the space between words, or
    be present on the side of one that puts a dummy space before a text.

    Args:
        vocabularies, ids, chunks: of the student and of the teacher; chunks are −1 for a token in none, and must not
            decrease otherwise.
    """
    count = _as_chunks(chunks).count
    sides = [_ChunkBytes.of(*side, count) for side in zip(vocabularies, ids, chunks)]
    left, right = sides
    left_may_lack = vocabularies[0].drops_spaces or vocabularies[1].dummy
    right_may_lack = vocabularies[1].drops_spaces or vocabularies[0].dummy
    surplus = left.sizes - right.sizes
    extra_space = (
        (surplus == 1) & right_may_lack & left.opens_with_space,
        (surplus == -1) & left_may_lack & right.opens_with_space,
    )
    keep = (surplus == 0) | extra_space[0] | extra_space[1]
    # Without that space both sides of a remaining chunk have equally many bytes, so all chunks can be compared at once.
    texts = [side.of_chunks(keep, without) for side, without in zip(sides, extra_space)]
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
