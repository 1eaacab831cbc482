"""What an aligner takes and gives: tokens of one side, and two sides' chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

CharSpan = tuple[int, int]
COUNTS = ("1:1", "1:n", "n:1", "m:n")


@dataclass(frozen=True)
class Tokenized:
    """One side's tokens of one document."""

    ids: np.ndarray
    """int32 [n]"""
    text: str
    """exactly what was tokenised; of a chat the rendered template"""
    spans: tuple[CharSpan, ...] | None = None
    """character spans of `text` to align, the i-th with the other side's i-th; None: all of it"""
    offsets: np.ndarray | None = None
    """int64 [n, 2]: the characters that each token covers; None: asked for when they are needed"""


@dataclass(frozen=True, eq=False)
class Alignment:
    """Two tokenizations of one text, cut into chunks that both of them have."""

    student_ids: np.ndarray
    """int32 [n]"""
    teacher_ids: np.ndarray
    """int32 [m]"""
    student_chunk: np.ndarray
    """int32 [n]: chunk number from 0; −1 for a token of none"""
    teacher_chunk: np.ndarray
    """int32 [m]"""
    num_chunks: int
    method: str
    """bytes | offsets | dp: which one ran"""
    exact: bool
    """whether both sides' tokens spell the same bytes, those of the text that was kept"""
    dropped: tuple[int, int] = (0, 0)
    """tokens cut off at the end (student, teacher)"""
    stop_pairs: list[tuple[int, int]] = field(default_factory=list)
    """(student position, teacher position) of bos, eos and end-of-turn tokens of the same place and role"""
    lossy: int = 0
    """stretches of the text with shared ends that are no chunk because a side spells something else there"""

    def chunk_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """int [num_chunks] twice: tokens of each chunk (student, teacher)."""
        return _sizes(self.student_chunk, self.num_chunks), _sizes(self.teacher_chunk, self.num_chunks)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Chunks by kind, student tokens to teacher tokens: 1:1, 1:n, n:1, m:n."""
        student, teacher = (size == 1 for size in self.chunk_sizes())
        both, one, other = (int(np.count_nonzero(kind)) for kind in (student & teacher, student, teacher))
        return dict(zip(COUNTS, (both, one - both, other - both, self.num_chunks - one - other + both)))

    def cut(self, num_student_tokens: int, num_teacher_tokens: int | None = None) -> Alignment:
        """The beginning of both sides, up to the last place that both reach within the limits.

        Such places are the ends of chunks and of paired special tokens. A side that needs no cut stays whole only if
        the other one does.

        Raises:
            ValueError: a negative limit.
        """
        limits = num_student_tokens, len(self.teacher_ids) if num_teacher_tokens is None else num_teacher_tokens
        if min(limits) < 0:
            raise ValueError(f"a limit of tokens is at least 0, got {min(limits)}; leave it out for no limit")
        if len(self.student_ids) <= limits[0] and len(self.teacher_ids) <= limits[1]:
            return self
        student, teacher = self._last_place(*limits)
        kept = int(np.count_nonzero(_firsts(self.student_chunk[:student])))
        return replace(
            self,
            student_ids=self.student_ids[:student],
            teacher_ids=self.teacher_ids[:teacher],
            student_chunk=self.student_chunk[:student],
            teacher_chunk=self.teacher_chunk[:teacher],
            num_chunks=kept,
            dropped=(
                self.dropped[0] + len(self.student_ids) - student,
                self.dropped[1] + len(self.teacher_ids) - teacher,
            ),
            stop_pairs=[pair for pair in self.stop_pairs if pair[0] < student and pair[1] < teacher],
        )

    def _last_place(self, student_limit: int, teacher_limit: int) -> tuple[int, int]:
        student, teacher = _ends(self.student_chunk, self.num_chunks), _ends(self.teacher_chunk, self.num_chunks)
        within = np.flatnonzero((student <= student_limit) & (teacher <= teacher_limit))
        places = [(0, 0)]
        if len(within):
            places.append((int(student[within[-1]]), int(teacher[within[-1]])))
        for pair in self.stop_pairs:
            if pair[0] < student_limit and pair[1] < teacher_limit:
                places.append((pair[0] + 1, pair[1] + 1))
        return max(places)

    def swapped(self) -> Alignment:
        """The same alignment with the sides' names exchanged."""
        return replace(
            self,
            student_ids=self.teacher_ids,
            teacher_ids=self.student_ids,
            student_chunk=self.teacher_chunk,
            teacher_chunk=self.student_chunk,
            dropped=self.dropped[::-1],
            stop_pairs=[(teacher, student) for student, teacher in self.stop_pairs],
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
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
    return np.bincount(chunk + 1, minlength=count + 1)[1:]


def _firsts(chunk: np.ndarray) -> np.ndarray:
    """bool [n]: the first token of each chunk."""
    best = np.maximum.accumulate(chunk) if len(chunk) else chunk
    return (chunk >= 0) & (np.r_[-1, best[:-1]][: len(chunk)] < chunk)


def _ends(chunk: np.ndarray, count: int) -> np.ndarray:
    """int64 [count]: one past the last token of each chunk."""
    held = np.flatnonzero(chunk >= 0)
    ends = np.zeros(count, np.int64)
    ends[chunk[held]] = held + 1  # of several assignments the last one stays
    return ends
