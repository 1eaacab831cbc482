"""Chunks from ids alone: what each token spells is known, the text is not, so each side proves the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from distill_rl.align.side import Side
from distill_rl.align.spans import Chunks, chunks_by_ends, gather
from distill_rl.align.tokenizer.vocabulary import SPACE, Vocabulary

Window = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(student ids, teacher ids) → chunk numbers of both, −1 for none"""
Pair = tuple[Side, Side]


@dataclass(frozen=True)
class Found:
    chunks: Chunks
    sides: Pair
    """as they were read, with the spaces taken off that are not in the text"""
    same: bool
    """whether both sides spell the same bytes"""
    method: str = "bytes"


class IdAligner:
    """Aligns two sides' ids.

    Args:
        compiled: compare the sides' bytes in compiled code; False spells both of them first. The answers are the same.
        window: aligns what bytes leave open, or None.
    """

    def __init__(self, compiled: bool, window: Window | None) -> None:
        self._compiled, self._window = compiled, window

    def _equal(self, student: Side, teacher: Side) -> bool:
        """Whether two sides of as many bytes spell the same ones."""
        if not self._compiled:
            return student.spell().tobytes() == teacher.spell().tobytes()
        from distill_rl.align.compare import same_bytes

        return same_bytes(student, teacher)

    def agreeing(self, student: Side, teacher: Side) -> Found | None:
        """Chunks of two sides that spell the same bytes; None of others.

        Spaces that may not be in the text are taken off in all ways, the likeliest first.
        """
        for sides in _readings(student, teacher):
            ends = sides[0].ends, sides[1].ends
            if _total(ends[0]) != _total(ends[1]):
                continue
            chunks, _, _ = chunks_by_ends(*ends)
            if self._equal(*sides):
                full = [side.full(numbers) for side, numbers in zip(sides, (chunks.student, chunks.teacher))]
                return Found(Chunks(full[0], full[1], chunks.count), sides, True)
        return None

    def align(self, student: Side, teacher: Side, *, whole: bool = False) -> Found:
        """Chunks by bytes, and by the window where the bytes differ; `whole` gives all tokens to the window."""
        found = self.agreeing(student, teacher)
        if whole and self._window is not None:
            numbers = self._window(student.ids, teacher.ids)
            full = [side.full(part) for side, part in zip((student, teacher), numbers)]
            return Found(_numbered(full), (student, teacher), found is not None, "dp")
        return found or self._mismatched(student, teacher)

    def _mismatched(self, student: Side, teacher: Side) -> Found:
        """Chunks of the equal bytes at both ends; what lies between goes to the window."""
        readings = [(sides, [side.spell() for side in sides]) for sides in _readings(student, teacher)]
        sides, spelled = max(readings, key=lambda reading: _common(*reading[1]))
        common = _common(*spelled)
        ends = [side.ends for side in sides]
        head, *last = chunks_by_ends(*(side[side <= common] for side in ends))
        starts = [int(closing[-1]) + 1 if len(closing) else 0 for closing in last]
        numbers = [np.full(len(side), -1, np.int32) for side in ends]
        for whole, part, start in zip(numbers, (head.student, head.teacher), starts):
            whole[:start] = part[:start]
        method = "bytes"
        one_ends_early = common == min(map(len, spelled))
        if self._window is not None and not one_ends_early:
            method = "dp"
            stops = _tail(spelled, ends, starts)
            window = self._window(*(side.ids[start:stop] for side, start, stop in zip(sides, starts, stops)))
            count = _append(numbers, window, starts, head.count)
            tail, _, _ = chunks_by_ends(
                *(side[stop:] - (side[stop - 1] if stop else 0) for side, stop in zip(ends, stops))
            )
            _append(numbers, (tail.student, tail.teacher), stops, count)
        return Found(_numbered([side.full(part) for side, part in zip(sides, numbers)]), sides, False, method)


def _readings(student: Side, teacher: Side) -> Iterator[Pair]:
    yield from product(student.readings(), teacher.readings())


def _append(numbers: list[np.ndarray], parts: Sequence[np.ndarray], starts: Sequence[int], count: int) -> int:
    """Writes parts numbered from 0 behind `count` chunks; how many there are then."""
    for whole, part, start in zip(numbers, parts, starts):
        whole[start : start + len(part)] = np.where(part >= 0, part + count, -1)
    return count + _numbered(parts).count


def _numbered(sides: Sequence[np.ndarray]) -> Chunks:
    return Chunks(sides[0], sides[1], max((int(side.max()) + 1 for side in sides if len(side)), default=0))


def _tail(spelled: Sequence[np.ndarray], ends: Sequence[np.ndarray], heads: Sequence[int]) -> tuple[int, int]:
    """How many tokens of each side lie before the equal bytes at the end, cut at a boundary that both have."""
    sizes = [len(part) for part in spelled]
    free = (size - (int(end[head - 1]) if head else 0) for size, end, head in zip(sizes, ends, heads))
    common = min(_common(spelled[0][::-1], spelled[1][::-1]), *free)
    # Boundaries counted from the end of the text, so that both sides have the same numbers.
    left, right = (size - end for size, end in zip(sizes, ends))
    shared = np.intersect1d(left[left <= common], right[right <= common])
    if not len(shared) or shared[-1] == 0:
        return len(ends[0]), len(ends[1])
    return int(np.flatnonzero(left == shared[-1])[0]) + 1, int(np.flatnonzero(right == shared[-1])[0]) + 1


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """How many bytes are equal at the start."""
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
    """Chunks without those whose two sides spell different bytes, numbered anew.

    At the start of a chunk one space may be missing on the side of a tokenizer that spells none between words, or be
    there that another one puts before a text.
    """
    count = _numbered(chunks).count
    sides = [_Spelled.of(*side, count) for side in zip(vocabularies, ids, chunks)]
    left, right = sides
    left_may = vocabularies[0].drops_spaces or vocabularies[1].dummy
    right_may = vocabularies[1].drops_spaces or vocabularies[0].dummy
    surplus = left.sizes - right.sizes
    # The space that one side has beyond the other is left out; then equal chunks have equal bytes, one after another.
    extra = (surplus == 1) & right_may & left.opens_with_space, (surplus == -1) & left_may & right.opens_with_space
    keep = (surplus == 0) | extra[0] | extra[1]
    texts = [side.of_chunks(keep, without) for side, without in zip(sides, extra)]
    sizes = np.where(keep, np.minimum(left.sizes, right.sizes), 0)
    chunk_of_byte = np.repeat(np.arange(count), sizes)
    keep[chunk_of_byte[texts[0] != texts[1]]] = False
    renumbered = np.append(np.where(keep, keep.cumsum() - 1, -1), -1).astype(np.int32)  # the last is what −1 reads
    return renumbered[chunks[0]], renumbered[chunks[1]]


@dataclass(frozen=True)
class _Spelled:
    """What one side's chunks spell, one directly after another."""

    text: np.ndarray
    """uint8"""
    begins: np.ndarray
    """int64 [count]: where each chunk begins in `text`"""
    sizes: np.ndarray
    """int64 [count]: bytes of each chunk"""

    @classmethod
    def of(cls, vocabulary: Vocabulary, ids: np.ndarray, chunks: np.ndarray, count: int) -> _Spelled:
        """Of chunk numbers that never fall from token to token, −1 aside."""
        held = np.flatnonzero(chunks >= 0)
        tokens = ids[held].astype(np.intp)
        lengths = vocabulary.lengths.take(tokens).astype(np.int64)
        text = gather(vocabulary, vocabulary.starts.take(tokens), lengths, lengths.cumsum())
        sizes = np.bincount(chunks[held], lengths, count).astype(np.int64)
        return cls(text, sizes.cumsum() - sizes, sizes)

    @property
    def opens_with_space(self) -> np.ndarray:
        """bool [count]"""
        padded = np.append(self.text, np.uint8(0))  # an empty chunk at the end begins behind the text
        return (self.sizes > 0) & (padded[self.begins] == SPACE)

    def of_chunks(self, chosen: np.ndarray, without_first: np.ndarray) -> np.ndarray:
        """uint8: the bytes of the chosen chunks, without the first byte of those in `without_first`."""
        kept = np.repeat(chosen, self.sizes)
        kept[self.begins[without_first]] = False
        return self.text[kept]
