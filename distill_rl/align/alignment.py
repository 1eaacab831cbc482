"""The aligner's input, one side's tokens, and its output, the chunks of two sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from distill_rl.align.chat import CharSpan
from distill_rl.align.spans import chunk_bounds, keep_chunks, no_token_pairs

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
        return _sizes(self.student_chunk, self.num_chunks), _sizes(self.teacher_chunk, self.num_chunks)

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
        """The beginning of both sides, up to their last common boundary within the limits.

        The alignment itself if it fits. Common boundaries are the ends of chunks, of lossy stretches and of paired
        special tokens. If a row is not exact, and on every side that is too long the last such boundary leaves more
        than half of the limit unused, each side is cut at its own limit instead: the student can still learn from text
        that the teacher's tokens do not match. A chunk that the cut divides becomes no chunk. What is cut off is
        counted in `dropped`; `exact`, `method` and `lossy` stay those of the whole row.

        Args:
            num_student_tokens, num_teacher_tokens: most tokens of each side; None: no limit for the teacher.

        Raises:
            ValueError: a negative limit.
        """
        limits = num_student_tokens, len(self.teacher_ids) if num_teacher_tokens is None else num_teacher_tokens
        if min(limits) < 0:
            raise ValueError(f"a limit of tokens must be at least 0, got {min(limits)}; leave it out for no limit")
        if len(self.student_ids) <= limits[0] and len(self.teacher_ids) <= limits[1]:
            return self
        sides = self.student_chunk, self.teacher_chunk
        ends = np.stack([chunk_bounds(side, self.num_chunks)[1] for side in sides], axis=1)
        student, teacher = self._where_to_cut(limits, ends)
        kept = int(np.count_nonzero(_within(ends, (student, teacher))))
        return replace(
            self,
            student_ids=self.student_ids[:student],
            teacher_ids=self.teacher_ids[:teacher],
            student_chunk=_first_chunks(self.student_chunk[:student], kept),
            teacher_chunk=_first_chunks(self.teacher_chunk[:teacher], kept),
            num_chunks=kept,
            lossy_ends=self.lossy_ends[_within(self.lossy_ends, (student, teacher))],
            dropped=(
                self.dropped[0] + len(self.student_ids) - student,
                self.dropped[1] + len(self.teacher_ids) - teacher,
            ),
            stop_pairs=[pair for pair in self.stop_pairs if pair[0] < student and pair[1] < teacher],
        )

    def _where_to_cut(self, limits: tuple[int, int], chunk_ends: np.ndarray) -> tuple[int, int]:
        """Number of tokens (student, teacher) to keep so that both limits hold; the rule is that of `cut`.

        Args:
            limits: most tokens (student, teacher).
            chunk_ends: int64 [num_chunks, 2]: number of tokens (student, teacher) up to the end of each chunk.
        """
        stop_ends = np.array(self.stop_pairs, np.int64).reshape(-1, 2) + 1
        boundary = 0, 0
        for ends in (chunk_ends, self.lossy_ends, stop_ends):
            within = ends[_within(ends, limits)]
            if len(within):
                boundary = max(boundary, (int(within[-1, 0]), int(within[-1, 1])))
        sizes = len(self.student_ids), len(self.teacher_ids)
        # Only a side that exceeds its limit counts: one that fits would lose tokens however close the boundary is.
        near = any(size > limit <= 2 * kept for size, limit, kept in zip(sizes, limits, boundary))
        if self.exact or near:
            return boundary
        return min(limits[0], sizes[0]), min(limits[1], sizes[1])

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


def _sizes(chunk: np.ndarray, count: int) -> np.ndarray:
    """int64 [count]: number of tokens of each chunk; tokens in no chunk (−1) are not counted."""
    return np.bincount(chunk + 1, minlength=count + 1)[1:]


def _within(ends: np.ndarray, limits: tuple[int, int]) -> np.ndarray:
    """bool [k]: which of the token counts [k, 2] lie within the limits on both sides."""
    return (ends[:, 0] <= limits[0]) & (ends[:, 1] <= limits[1])


def _first_chunks(chunk: np.ndarray, count: int) -> np.ndarray:
    """int32 [n]: chunk indices below `count`; −1 in place of higher ones."""
    return chunk if chunk.max(initial=-1) < count else np.where(chunk < count, chunk, np.int32(-1))


def outside_of_chunks(places: np.ndarray, student_chunk: np.ndarray, teacher_chunk: np.ndarray) -> np.ndarray:
    """Those of the token counts `places`, int64 [k, 2] (student, teacher), that divide no chunk of either side.

    A place divides no chunk if all four of these counts are equal: chunks that have begun and chunks that have ended
    before it, on either side.

    Args:
        student_chunk, teacher_chunk: int32 [n], [m]: chunk index of each token, −1 for none.
    """
    count = int(student_chunk.max(initial=-1)) + 1
    passed = []
    for chunk, place in zip((student_chunk, teacher_chunk), places.T):
        starts, stops = chunk_bounds(chunk, count)
        passed += [starts.searchsorted(place), stops.searchsorted(place, "right")]
    return places[np.ptp(passed, axis=0) == 0]
