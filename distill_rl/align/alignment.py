"""Chunks from token boundaries: two sorted arrays of byte positions, cut where both have one; and what an aligner gets and returns.

A chunk ends wherever a token of each side ends at the same byte. So the chunks of a text are the intervals between
neighbouring *shared* ends, and a token's chunk index is the number of shared ends before it:

    student ends   3  9 12    13 14 15
    teacher ends   3  9 12          15
    shared         3  9 12          15      → chunks 0, 1, 2 and, with three student tokens, 3

Everything here is linear in bytes plus tokens, without sorting and without a Python loop over tokens. `compiled.py` does
it for whole texts and rows; the functions on arrays are for their parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from distill_rl.align.chats import CharSpan

_ALL_FAITHFUL = np.zeros(0, bool)


def no_token_pairs() -> np.ndarray:
    """An empty int64 [0, 2] array of token counts (student, teacher)."""
    return np.zeros((0, 2), np.int64)


@dataclass(frozen=True)
class TokenChunks:
    """Chunk indices of two sides' tokens."""

    student: np.ndarray
    """int32 [n]: −1 for a token in no chunk"""
    teacher: np.ndarray
    """int32 [m]"""
    count: int
    lossy_ends: np.ndarray = field(default_factory=no_token_pairs)
    """int64 [k, 2], ascending: number of tokens (student, teacher) up to the end of each stretch between two shared
    boundaries that is no chunk because a side spells something else there"""


@dataclass(frozen=True)
class TokenPositions:
    """Positions of one side's tokens in its text, in bytes."""

    starts: np.ndarray
    """int64 [n]: each token starts where the token before it ends"""
    ends: np.ndarray
    """int64 [n]: equal to the start for a token that covers no text"""
    faithful: np.ndarray | None
    """bool [n]: whether the token spells what it covers; None: all tokens do"""
    exact: bool
    """Whether the tokens together spell the text, byte for byte"""
    reported: np.ndarray | None = None
    """int64 [n, 2]: the bytes that each token covers according to the tokenizer, which may begin after its start; None:
    from its start to its end"""


def writable(array: np.ndarray) -> np.ndarray:
    """The array, or a copy of one that may not be written, for which functions would be compiled again."""
    return array if array.flags.writeable else array.copy()


def gather_bytes(flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """uint8 [ends[-1]]: bytes of tokens, one token after another.

    Args:
        flat: uint8: the bytes of all tokens of a vocabulary.
        starts: int64 [n]: where each token's bytes begin in `flat`.
        lengths: int [n]: how many bytes to take.
        ends: int64 [n]: cumulative sum of `lengths`.
    """
    index = np.repeat(starts - ends + lengths, lengths)
    index += np.arange(len(index))
    return flat.take(index)


def shared_ends(student_ends: np.ndarray, teacher_ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool [n], bool [m]: which elements of each array are in the other one, too.

    Args:
        student_ends, teacher_ends: int64 [n], [m]: byte positions ≥ 1, strictly increasing; memory is linear in the
            highest.
    """
    if not len(student_ends) or not len(teacher_ends):
        return np.zeros(len(student_ends), bool), np.zeros(len(teacher_ends), bool)
    size = int(max(student_ends[-1], teacher_ends[-1])) + 1
    marked = np.zeros(size, bool)
    marked[student_ends] = True
    in_teacher = marked.take(teacher_ends)
    marked = np.zeros(size, bool)
    marked[teacher_ends] = True
    return marked.take(student_ends), in_teacher


def chunks_by_ends(student_ends: np.ndarray, teacher_ends: np.ndarray) -> tuple[TokenChunks, np.ndarray, np.ndarray]:
    """Chunks of two tokenizations that begin at the same byte and have no token without bytes.

    Args:
        student_ends, teacher_ends: int64, strictly increasing: where each token ends. Tokens past the last shared
            position are in no chunk.
    Returns:
        the chunks; int64 [count], int64 [count]: the last token of each chunk (student, teacher).
    """
    closes = shared_ends(student_ends, teacher_ends)
    last = [side.nonzero()[0] for side in closes]
    chunk = [_chunk_of_token(*side) for side in zip(closes, last)]
    return TokenChunks(chunk[0], chunk[1], len(last[0])), last[0], last[1]


def _chunk_of_token(closes: np.ndarray, last: np.ndarray) -> np.ndarray:
    """int32 [n]: number of chunks that have closed before each token; −1 after the last chunk."""
    if len(last) == len(closes):
        return np.arange(len(closes), dtype=np.int32)
    chunk = np.zeros(len(closes), np.int32)
    np.cumsum(closes[:-1], dtype=np.int32, out=chunk[1:])
    chunk[last[-1] + 1 if len(last) else 0 :] = -1
    return chunk


def keep_chunks(keep: np.ndarray, student: np.ndarray, teacher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chunk indices int32 [n], int32 [m] without the chunks for which `keep` is False, renumbered without gaps.

    Args:
        keep: bool [count]: by chunk.
        student, teacher: chunk index of each token, −1 for none; not modified.
    """
    renumbered = np.append(np.where(keep, keep.cumsum() - 1, -1), -1).astype(np.int32)  # −1 reads the last entry
    return renumbered[student], renumbered[teacher]


def chunk_bounds(chunk: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [count], int64 [count]: the first token of each chunk, and one past its last token.

    Both are 0 for a chunk without tokens on this side.

    Args:
        chunk: int [n]: chunk index of each token, −1 for none; must not decrease otherwise.
    """
    tokens = np.flatnonzero(chunk >= 0)
    firsts, stops = np.zeros(count, np.int64), np.zeros(count, np.int64)
    firsts[chunk[tokens[::-1]]] = tokens[::-1]  # of repeated assignments the last one stays
    stops[chunk[tokens]] = tokens + 1
    return firsts, stops


def chunks_by_spans(student: TokenPositions, teacher: TokenPositions, spans: np.ndarray) -> TokenChunks:
    """Chunks inside spans of two texts that read the same, and the lossy stretches in them.

    Steps:

    1. Lay the spans out one after another on a common axis, with one position between them so that no boundary belongs
       to two spans, and move both sides' tokens there. Tokens that extend beyond their span are left out.
    2. A position is shared if a token of each side starts or ends there. Between two neighbouring shared positions of
       the same span lies one candidate.
    3. A candidate is a chunk if all of its tokens are faithful. Otherwise it is a lossy stretch.

    Args:
        spans: int64 [k, 4], ascending: student start and stop, teacher start and stop in bytes; stop − start is the
            same on both sides.
    """
    from distill_rl.align.compiled import chunk_spans  # imports Numba

    sides = [
        (side.starts, side.ends, _ALL_FAITHFUL if side.faithful is None else side.faithful)
        for side in (student, teacher)
    ]
    rows = [np.empty(len(starts), np.int32) for starts, _, _ in sides]
    lossy_ends = np.empty((min(map(len, rows)), 2), np.int64)
    count, stretches = chunk_spans(*sides[0], *sides[1], spans, *rows, lossy_ends)
    return TokenChunks(rows[0], rows[1], count, lossy_ends[:stretches])


# The aligner's input, one side's tokens, and its output, the chunks of two sides.

COUNTS = ("1:1", "1:n", "n:1", "m:n")


@dataclass(frozen=True)
class Tokenized:
    """One side's tokens of one document."""

    ids: np.ndarray
    """int32 [n]"""
    text: str
    """The text exactly as it was tokenised; for a chat, the rendered template"""
    spans: tuple[CharSpan, ...] | None = None
    """Character spans of `text` to align, the i-th with the other side's i-th; None: the whole text"""
    offsets: np.ndarray | None = None
    """int64 [n, 2]: the characters that each token covers; None: computed when they are needed"""
    complete: bool = True
    """Whether the spans hold all texts of a chat's messages that its template writes"""


@dataclass(frozen=True, eq=False)
class Alignment:
    """Two tokenizations of one text, divided into chunks that both of them contain."""

    student_ids: np.ndarray
    """int32 [n]"""
    teacher_ids: np.ndarray
    """int32 [m]"""
    student_chunk: np.ndarray
    """int32 [n]: index of the token's chunk, from 0; −1 for a token in no chunk"""
    teacher_chunk: np.ndarray
    """int32 [m]"""
    num_chunks: int
    method: str
    """The method that was used: bytes | offsets | dp"""
    exact: bool
    """Whether both sides' tokens spell the same bytes, namely those of the text that was kept"""
    dropped: tuple[int, int] = (0, 0)
    """Number of tokens cut off at the end (student, teacher)"""
    stop_pairs: list[tuple[int, int]] = field(default_factory=list)
    """(student position, teacher position) of bos, eos and end-of-turn tokens with the same place and role"""
    lossy: int = 0
    """Number of stretches between shared boundaries that are no chunk because a side spells something else there"""
    lossy_ends: np.ndarray = field(default_factory=no_token_pairs)
    """int64 [k, 2], ascending: number of tokens (student, teacher) up to the end of each such stretch. No end lies
    inside a chunk. Empty for an exact row."""

    def chunk_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """int [num_chunks], int [num_chunks]: number of tokens of each chunk (student, teacher)."""
        chunks, least = (self.student_chunk, self.teacher_chunk), self.num_chunks + 1
        student, teacher = (np.bincount(chunk + 1, minlength=least)[1:] for chunk in chunks)
        return student, teacher

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Number of chunks by kind, student tokens to teacher tokens, under the keys "1:1", "1:n", "n:1" and "m:n"."""
        single_student, single_teacher = (size == 1 for size in self.chunk_sizes())
        one_to_one = int(np.count_nonzero(single_student & single_teacher))
        one_to_many = int(np.count_nonzero(single_student)) - one_to_one
        many_to_one = int(np.count_nonzero(single_teacher)) - one_to_one
        many_to_many = self.num_chunks - one_to_one - one_to_many - many_to_one
        return dict(zip(COUNTS, (one_to_one, one_to_many, many_to_one, many_to_many)))

    def cut(self, num_student_tokens: int, num_teacher_tokens: int | None = None) -> Alignment:
        """The beginning of both sides, up to their last common boundary (`boundaries`) within the limits.

        The alignment itself if it fits. If a row is not exact, and on every side that is too long the last such boundary
        leaves more than half of the limit unused, each side is cut at its own limit instead: the student can still
        learn from text that the teacher's tokens do not match. A chunk that the cut divides becomes no chunk. What is
        cut off is counted in `dropped`; `exact`, `method` and `lossy` stay those of the whole row.

        Args:
            num_student_tokens, num_teacher_tokens: most tokens of each side; None: no limit for the teacher.

        Raises:
            ValueError: a negative limit.
        """
        sizes = len(self.student_ids), len(self.teacher_ids)
        limits = num_student_tokens, sizes[1] if num_teacher_tokens is None else num_teacher_tokens
        if min(limits) < 0:
            raise ValueError(f"a limit of tokens must be at least 0, got {min(limits)}; leave it out for no limit")
        if sizes[0] <= limits[0] and sizes[1] <= limits[1]:
            return self
        within = self.boundaries[_within(self.boundaries, limits)]
        stop = (int(within[-1, 0]), int(within[-1, 1])) if len(within) else (0, 0)
        # Only a side that exceeds its limit counts: one that fits would lose tokens however close the boundary is.
        near = any(size > limit <= 2 * kept for size, limit, kept in zip(sizes, limits, stop))
        if not (self.exact or near):
            stop = min(limits[0], sizes[0]), min(limits[1], sizes[1])
        dropped = (self.dropped[0] + sizes[0] - stop[0], self.dropped[1] + sizes[1] - stop[1])
        return replace(self.part((0, 0), stop), dropped=dropped)

    @cached_property
    def boundaries(self) -> np.ndarray:
        """int64 [k, 2], ascending: the places where both sides can be cut without dividing what belongs together.

        A place is the number of tokens (student, teacher) before it. These are the ends of chunks, of lossy stretches
        and of paired special tokens.
        """
        stop_ends = np.array(self.stop_pairs, np.int64).reshape(-1, 2) + 1
        places = np.concatenate([self._chunk_bounds[1], self.lossy_ends, stop_ends])
        return places[np.lexsort((places[:, 1], places[:, 0]))]

    @cached_property
    def _chunk_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [num_chunks, 2] each: numbers of tokens (student, teacher) before every chunk, and up to its end."""
        sides = [chunk_bounds(side, self.num_chunks) for side in (self.student_chunk, self.teacher_chunk)]
        return np.stack([starts for starts, _ in sides], axis=1), np.stack([stops for _, stops in sides], axis=1)

    def part(self, start: tuple[int, int], stop: tuple[int, int]) -> Alignment:
        """The tokens from one place to another; places are as in `boundaries`, but may be any.

        A chunk that a place divides becomes no chunk, the others are numbered from 0. All else stays that of the whole
        row: `exact`, `method`, `lossy` and `dropped`.
        """
        starts, stops = self._chunk_bounds
        first = max(int(starts[:, side].searchsorted(start[side])) for side in (0, 1))
        end = max(first, min(int(stops[:, side].searchsorted(stop[side], "right")) for side in (0, 1)))
        ends = self.lossy_ends - np.array(start, np.int64)
        return replace(
            self,
            student_ids=self.student_ids[start[0] : stop[0]],
            teacher_ids=self.teacher_ids[start[1] : stop[1]],
            student_chunk=_renumbered(self.student_chunk[start[0] : stop[0]], first, end),
            teacher_chunk=_renumbered(self.teacher_chunk[start[1] : stop[1]], first, end),
            num_chunks=end - first,
            lossy_ends=ends[_within(ends, (stop[0] - start[0], stop[1] - start[1])) & (ends >= 0).all(axis=1)],
            stop_pairs=[
                (student - start[0], teacher - start[1])
                for student, teacher in self.stop_pairs
                if start[0] <= student < stop[0] and start[1] <= teacher < stop[1]
            ],
        )

    def outside_of_chunks(self, places: np.ndarray) -> np.ndarray:
        """Those of the places, int64 [k, 2] as in `boundaries`, that divide no chunk of either side.

        A place divides no chunk if all four of these counts are equal: chunks that have begun and chunks that have ended
        before it, on either side.
        """
        starts, stops = self._chunk_bounds
        passed = [starts[:, side].searchsorted(places[:, side]) for side in (0, 1)]
        passed += [stops[:, side].searchsorted(places[:, side], "right") for side in (0, 1)]
        return places[np.ptp(passed, axis=0) == 0]

    def preceded_by(self, student_ids: np.ndarray, teacher_ids: np.ndarray) -> Alignment:
        """The alignment with further tokens before those of each side; they are in no chunk.

        Args:
            student_ids, teacher_ids: int32 [a], [b]
        """
        if not len(student_ids) and not len(teacher_ids):
            return self
        shift = len(student_ids), len(teacher_ids)
        return replace(
            self,
            student_ids=np.concatenate([student_ids, self.student_ids]),
            teacher_ids=np.concatenate([teacher_ids, self.teacher_ids]),
            student_chunk=np.pad(self.student_chunk, (shift[0], 0), constant_values=-1),
            teacher_chunk=np.pad(self.teacher_chunk, (shift[1], 0), constant_values=-1),
            lossy_ends=self.lossy_ends + np.array(shift, np.int64),
            stop_pairs=[(student + shift[0], teacher + shift[1]) for student, teacher in self.stop_pairs],
        )

    def trainable(self, trained: np.ndarray | None = None, *, stops: bool = True) -> Alignment:
        """The alignment with the chunks that a student can be trained on, renumbered from 0, and without stop pairs.

        1. Paired special tokens (`stop_pairs`) become chunks of one token each; without them a student would never
           learn to stop.
        2. A chunk is kept if all its student tokens are trained on, and if it does not hold the first token of either
           side, which no position predicts. So every chunk has a prediction on both sides.

        Chunk indices still belong to tokens, not to the positions that predict them.

        Args:
            trained: bool [n]: which of the student's tokens are trained on; None: all.
            stops: False leaves the paired special tokens in no chunk.
        """
        student, teacher, count = self.student_chunk.copy(), self.teacher_chunk.copy(), self.num_chunks
        for student_position, teacher_position in self.stop_pairs if stops else ():
            student[student_position] = teacher[teacher_position] = count
            count += 1
        keep = np.ones(count + 1, bool)  # the last entry is for −1, of tokens in no chunk
        if trained is not None:
            keep[student[~trained]] = False
        keep[student[:1]] = keep[teacher[:1]] = False
        student, teacher = keep_chunks(keep[:-1], student, teacher)
        count = int(np.count_nonzero(keep[:-1]))
        return replace(self, student_chunk=student, teacher_chunk=teacher, num_chunks=count, stop_pairs=[])

    def swapped(self) -> Alignment:
        """A copy with student and teacher exchanged: ids, chunks, dropped counts, stop pairs and lossy ends."""
        return replace(
            self,
            student_ids=self.teacher_ids,
            teacher_ids=self.student_ids,
            student_chunk=self.teacher_chunk,
            teacher_chunk=self.student_chunk,
            dropped=self.dropped[::-1],
            stop_pairs=[(teacher, student) for student, teacher in self.stop_pairs],
            lossy_ends=self.lossy_ends[:, ::-1],
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields except the ids and `lossy_ends`, together with `counts`, as plain values for JSON."""
        return {
            "student_chunk": self.student_chunk.tolist(),
            "teacher_chunk": self.teacher_chunk.tolist(),
            "num_chunks": self.num_chunks,
            "counts": dict(self.counts),
            "method": self.method,
            "exact": self.exact,
            "dropped": list(self.dropped),
            "stop_pairs": [list(pair) for pair in self.stop_pairs],
            "lossy": self.lossy,
        }


def _within(ends: np.ndarray, limits: tuple[int, int]) -> np.ndarray:
    return (ends[:, 0] <= limits[0]) & (ends[:, 1] <= limits[1])


def _renumbered(chunk: np.ndarray, first: int, end: int) -> np.ndarray:
    """int32 [n]: chunk indices from `first` up to, not including, `end`, less `first`; −1 in place of others."""
    if not first and chunk.max(initial=-1) < end:
        return chunk
    return np.where((chunk >= first) & (chunk < end), chunk - np.int32(first), np.int32(-1))
