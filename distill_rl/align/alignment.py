"""What an aligner takes and gives: tokens of one side, and two sides' chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from distill_rl.align.spans import no_places

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
    lossy_ends: np.ndarray = field(default_factory=no_places)
    """int64 [k, 2], ascending: tokens (student, teacher) up to the ends of such stretches, none of them inside a chunk;
    none of a row that is exact"""

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

        Such places are the ends of chunks, of lossy stretches and of paired special tokens. Where a row is not exact and
        they leave more than half of a limit unused, each side is cut at its own limit: text of which nothing is known
        of the other side is still text to learn. A chunk that does not end on both sides by then is none.

        Raises:
            ValueError: a negative limit.
        """
        limits = num_student_tokens, len(self.teacher_ids) if num_teacher_tokens is None else num_teacher_tokens
        if min(limits) < 0:
            raise ValueError(f"a limit of tokens is at least 0, got {min(limits)}; leave it out for no limit")
        if len(self.student_ids) <= limits[0] and len(self.teacher_ids) <= limits[1]:
            return self
        ends = np.stack([_ends(side, self.num_chunks) for side in (self.student_chunk, self.teacher_chunk)], axis=1)
        student, teacher = self._last_place(limits, ends)
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

    def _last_place(self, limits: tuple[int, int], chunk_ends: np.ndarray) -> tuple[int, int]:
        stops = np.array(self.stop_pairs, np.int64).reshape(-1, 2) + 1
        place = 0, 0
        for places in (chunk_ends, self.lossy_ends, stops):
            within = places[_within(places, limits)]
            if len(within):
                place = max(place, (int(within[-1, 0]), int(within[-1, 1])))
        sizes = len(self.student_ids), len(self.teacher_ids)
        # A side that fits says nothing of how much is lost.
        near = any(size > limit <= 2 * reached for size, limit, reached in zip(sizes, limits, place))
        return place if self.exact or near else (min(limits[0], sizes[0]), min(limits[1], sizes[1]))

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
            lossy_ends=self.lossy_ends[:, ::-1],
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


def _within(places: np.ndarray, limits: tuple[int, int]) -> np.ndarray:
    """bool [k]: which of the places [k, 2] both sides reach."""
    return (places[:, 0] <= limits[0]) & (places[:, 1] <= limits[1])


def _first_chunks(chunk: np.ndarray, count: int) -> np.ndarray:
    """int32 [n]: numbers below `count`, −1 for others."""
    return chunk if chunk.max(initial=-1) < count else np.where(chunk < count, chunk, np.int32(-1))


def outside_of_chunks(places: np.ndarray, student_chunk: np.ndarray, teacher_chunk: np.ndarray) -> np.ndarray:
    """Those of the places int64 [k, 2] that lie inside of no chunk: what has begun on a side has ended on both."""
    count = int(student_chunk.max(initial=-1)) + 1
    passed = []
    for chunk, place in zip((student_chunk, teacher_chunk), places.T):
        held = np.flatnonzero(chunk >= 0)[::-1]
        starts = np.zeros(count, np.int64)
        starts[chunk[held]] = held  # of several assignments the last one stays
        passed += [starts.searchsorted(place), _ends(chunk, count).searchsorted(place, "right")]
    return places[np.ptp(passed, axis=0) == 0]


def _ends(chunk: np.ndarray, count: int) -> np.ndarray:
    """int64 [count]: one past the last token of each chunk."""
    held = np.flatnonzero(chunk >= 0)
    ends = np.zeros(count, np.int64)
    ends[chunk[held]] = held + 1  # of several assignments the last one stays
    return ends
