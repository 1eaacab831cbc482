"""Chunks: which predictions of a student and of a teacher with another tokenizer stand for the same text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from distill_rl.losses.core import checks
from distill_rl.losses.core.logits import as_tree


@dataclass(frozen=True)
class Chunks:
    """Which chunk each row of logits belongs to, on both sides.

    A row belongs to the chunk of the token that it *predicts*. Every chunk has at least one row on either side, and its
    rows follow one another.
    """

    student: Tensor
    """int64 [N_s]; −1 for none"""
    teacher: Tensor
    """int64 [N_t]"""
    count: int
    """chunks are numbered 0 … count − 1"""

    @classmethod
    def from_alignment(
        cls, *alignments: Any, student_length: int | None = None, teacher_length: int | None = None, stops: bool = True
    ) -> Chunks:
        """Chunks of aligned texts, one text per row of a batch, for logits [R, S, V] that start at its first token.

        A token is predicted by the row of the token before it, so chunk numbers move one row up. A chunk that contains
        the first token of either side is dropped, because no row predicts that token. Chunks are numbered across the
        texts.

        Args:
            alignments: results of `TokenAligner` (`distill_rl.align.Alignment`).
            student_length, teacher_length: S of either side; None: the longest text.
            stops: whether paired special tokens (`stop_pairs`) become chunks of one token each. Without them a student
                never learns to stop.

        Raises:
            ValueError: a text is longer than its rows.
        """
        student: list[Tensor] = []
        teacher: list[Tensor] = []
        count = 0
        for alignment in alignments:
            chunks = alignment.trainable(stops=stops)
            for rows, numbers in ((student, chunks.student_chunk), (teacher, chunks.teacher_chunk)):
                predicted = torch.tensor(numbers[1:], dtype=torch.int64)
                rows.append(torch.where(predicted < 0, -1, predicted + count))
            count += chunks.num_chunks
        return cls(_in_rows("student", student, student_length), _in_rows("teacher", teacher, teacher_length), count)


@as_tree
@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """Two sums, which the caller weighs and divides, and what they are sums of."""

    kd: Tensor
    """T²·D summed over the chunks, or [count] with `reduction="none"`; 0 for chunks that the method skips. Differentiable."""
    ce: Tensor
    """Cross-entropy at T = 1 summed over the labelled rows, or [N_s]. Differentiable."""
    num_chunks: Tensor
    """int64 scalar: the number of chunks compared."""
    teacher_mass: Tensor
    """The teacher's probability in the compared columns, summed over the 1:1 chunks; 0 for uld and alm."""
    student_mass: Tensor
    """The student's probability there."""


def _in_rows(name: str, found: list[Tensor], length: int | None) -> Tensor:
    """The chunk numbers of each text's rows, as int64 [R·S] for logits [R, S, V]: −1 after the end of each text."""
    longest = max((len(each) + 1 for each in found), default=0)
    width = longest if length is None else length
    if longest > width:
        raise ValueError(f"{name}_length: must hold the longest text, {longest} tokens; got {width}")
    rows = torch.full((len(found), width), -1)
    for number, each in enumerate(found):
        rows[number, : len(each)] = each
    return rows.reshape(-1)


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums over consecutive segments of rows, [n, …] → [m, …]. Unlike `index_add`, the order is fixed on every device.

    Args:
        lengths: int64 [m], rows per segment, which add up to n (unchecked).
    """
    return torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True)


@dataclass(frozen=True)
class ChunkSide:
    """One side's rows of all chunks, chunk by chunk and in order within each chunk."""

    rows: Tensor  # int64 [n], row numbers
    chunk: Tensor  # int64 [n]
    length: Tensor  # int64 [count], rows of each chunk

    @classmethod
    def of(cls, numbers: Tensor, count: int) -> ChunkSide:
        """Sorts one side's rows by their chunk's number, int [N], −1 for none; rows of one chunk stay in their order."""
        rows = (numbers >= 0).nonzero()[:, 0]
        chunk, order = numbers[rows].long().sort(stable=True)
        length = torch.zeros(count, dtype=torch.int64, device=numbers.device)
        return cls(rows[order], chunk, length.index_add_(0, chunk, torch.ones_like(chunk)))

    @cached_property
    def start(self) -> Tensor:
        """int64 [count], where in `rows` each chunk begins."""
        return self.length.cumsum(0) - self.length

    @cached_property
    def first(self) -> Tensor:
        """int64 [count], the row number of each chunk's first row."""
        return self.rows[self.start]

    def sum(self, values: Tensor) -> Tensor:
        """The sum of each chunk's values: [n] in the order of `rows` → [count]."""
        return segment_sum(values, self.length)

    def after_first(self, values: Tensor) -> Tensor:
        """The sum over all rows of a chunk but its first: [n] in the order of `rows` → [count]."""
        later = torch.ones_like(self.chunk, dtype=torch.bool).index_fill_(0, self.start, False)
        return self.sum(torch.where(later, values, 0))


@dataclass(frozen=True)
class ChunkPairing:
    """Both sides of all chunks."""

    student: ChunkSide
    teacher: ChunkSide
    count: int

    @cached_property
    def one_to_one(self) -> Tensor:
        """int64, numbers of the chunks of one row on either side."""
        return ((self.student.length == 1) & (self.teacher.length == 1)).nonzero()[:, 0]


def pair(chunks: Chunks, num_student: int, num_teacher: int, validate: bool | None) -> ChunkPairing:
    """The chunks as a `ChunkPairing`, checked against the numbers of rows of both sides.

    Args:
        num_student, num_teacher: N_s and N_t, the rows of logits.
        validate: whether chunk numbers are looked at; None: only on a CPU.

    Raises:
        ValueError: shapes or types; and where values are looked at: numbers out of range, chunks without a row on one
            side, chunks whose rows do not follow one another.
    """
    for name, numbers, rows in (("student", chunks.student, num_student), ("teacher", chunks.teacher, num_teacher)):
        if numbers.shape != (rows,) or numbers.is_floating_point() or numbers.dtype == torch.bool:
            found = f"{numbers.dtype} {list(numbers.shape)}"
            raise ValueError(f"chunks.{name}: must be integers, one per row of logits, {rows}; got {found}")
        if checks.looked_at(validate, numbers):
            _check_numbers(name, numbers, chunks.count)
    student, teacher = (ChunkSide.of(numbers, chunks.count) for numbers in (chunks.student, chunks.teacher))
    return ChunkPairing(student, teacher, chunks.count)


def _check_numbers(name: str, numbers: Tensor, count: int) -> None:
    """Requires chunk numbers [N] in [-1, count): every chunk has a row, and its rows follow one another."""
    if numbers.numel() and not -1 <= int(numbers.min()) <= int(numbers.max()) < count:
        extreme = int(numbers.min()) if int(numbers.min()) < -1 else int(numbers.max())
        raise ValueError(f"chunks.{name}: must lie in [-1, {count}), count being {count}; got {extreme}")
    side = ChunkSide.of(numbers, count)
    if count and int(side.length.min()) == 0:
        missing = int((side.length == 0).nonzero()[0, 0])
        raise ValueError(f"chunks.{name}: every chunk must have a row on both sides; chunk {missing} has none")
    broken = (side.chunk[1:] == side.chunk[:-1]) & (side.rows[1:] != side.rows[:-1] + 1)
    if bool(broken.any()):
        number = int(side.chunk[1:][broken][0])
        raise ValueError(f"chunks.{name}: a chunk's rows must follow one another; those of chunk {number} do not")
