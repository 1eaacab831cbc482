"""One call of a cross-tokenizer loss, and the order in which its rows are streamed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from distill_rl.losses.core.checks import Backend, Tail
from distill_rl.losses.core.logits import DenseTeacher, StudentLogits
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.core.streaming import RowFrame, RowFunction, RowPlan, chunks
from distill_rl.losses.cross_tokenizer.chunks import ChunkPairing
from distill_rl.losses.cross_tokenizer.projection import VocabularyProjection
from distill_rl.losses.divergence import Divergence
from distill_rl.losses.targets import TopKLogprobs


@dataclass(frozen=True)
class ChunkSettings:
    """Keywords of `chunk_kd_loss`, which documents them, as the methods read them."""

    divergence: Divergence
    temperature: float
    tail: Tail
    top_k: int
    chain: bool  # whether `chunk_average` is "chain"
    uncommon_top_k: int
    relaxed: bool
    tau: float
    chunk_size: int | None
    backend: Backend | None


class Terms(NamedTuple):
    """A method's result."""

    kd: Tensor  # [count], T² included
    ce: Tensor  # [N_s]
    num_chunks: int
    # Either side's probability in the compared columns, [n] of the 1:1 chunks, or its sum.
    teacher_mass: Tensor | None = None
    student_mass: Tensor | None = None


@dataclass(frozen=True)
class ChunkTask:
    """One call of `chunk_kd_loss`, checked."""

    student: StudentLogits
    shard: VocabularyShard
    labels: Tensor  # int64 [N_s], −1 for ignored rows
    label_rows: Tensor  # int64 [M], the numbers of the rows that have a label
    pairing: ChunkPairing
    teacher: TopKLogprobs | DenseTeacher
    projection: VocabularyProjection
    settings: ChunkSettings
    piece: int  # rows of logits, of the student's vocabulary or the teacher's, to work on at once

    @property
    def like(self) -> Tensor:
        """An empty tensor with the device and dtype of the arithmetic."""
        return self.student.like

    @property
    def dtype(self) -> torch.dtype:
        return self.student.like.dtype

    def frame(self, num_rows: int) -> RowFrame:
        return RowFrame(num_rows, self.shard, self.settings.temperature, self.like)

    @cached_property
    def teacher_label(self) -> Tensor:
        """[n], the teacher's log-probabilities of its own tokens at T, in the order of its side of the chunks."""
        given = self.teacher.label_logprob
        assert given is not None, "checked on entry"
        return given.reshape(-1)[self.pairing.teacher.rows].to(self.dtype)

    @cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """For student and teacher, count + 1 positions in `ChunkSide.rows`: where each chunk begins, then the total.

        Computed on first use, which waits for a GPU.
        """
        sides = torch.stack([self.pairing.student.length, self.pairing.teacher.length]).cumsum(1).tolist()
        return [0, *sides[0]], [0, *sides[1]]

    @cached_property
    def groups(self) -> list[slice]:
        """Slices of consecutive chunk numbers that tile all chunks.

        Each has at most `piece` rows on either side, or is one larger chunk. With `chain`, which streams a chunk's
        first row only, each has at most `piece` chunks.
        """
        count = self.pairing.count
        if self.settings.chain:
            return list(chunks(count, self.piece))
        groups, start = [], 0
        while start < count:
            stop = min(bisect_right(side, side[start] + self.piece) for side in self.ends) - 1
            groups.append(slice(start, max(stop, start + 1)))
            start = groups[-1].stop
        return groups

    def bare(self) -> ChunkTask:
        """A copy with empty logits and teacher, for objects that live until backward."""
        nothing = self.like.new_empty(0, 0)
        student = StudentLogits(nothing, self.student.settings)
        bare = replace(self, student=student, teacher=DenseTeacher(nothing))
        bare.__dict__["groups"] = self.groups
        if not self.settings.chain:
            bare.__dict__["ends"] = self.ends  # computed once: it waits for a GPU
        return bare

    def dense_teacher(self) -> DenseTeacher:
        assert isinstance(self.teacher, DenseTeacher), "checked on entry"
        return self.teacher

    def labelled_rows(self, first: Tensor | None = None, pieces: Sequence[slice] | None = None) -> LabelledRows:
        """The labelled rows of the student in the order of streaming: the rows `first`, then the others.

        Args:
            first: int64, distinct numbers of labelled rows; None: no row comes first.
            pieces: chunks in which `first` are streamed. None: of `piece` rows.
        """
        count = self.label_rows.shape[0]
        if first is None:
            whole = count == self.student.num_rows
            return LabelledRows(self, None if whole else self.label_rows)
        waiting = torch.zeros(self.student.num_rows, dtype=torch.bool, device=first.device)
        waiting[self.label_rows] = True
        order = torch.cat([first, waiting.index_fill_(0, first, False).nonzero()[:, 0]])
        num_first = first.shape[0]
        if pieces is None:
            pieces = [*chunks(num_first, self.piece)]
        others = [
            slice(num_first + rows.start, num_first + rows.stop) for rows in chunks(count - num_first, self.piece)
        ]
        return LabelledRows(self, order, [*pieces, *others], num_first)


@dataclass(frozen=True)
class LabelledRows:
    """The M labelled rows in the order in which they are streamed."""

    task: ChunkTask
    order: Tensor | None = None  # int64 [M]; None: all rows as they stand
    pieces: Sequence[slice] | None = None  # None: as suits the row function, which compares few columns per row
    num_first: int = 0  # rows of compared chunks; they come before those that only have a cross-entropy

    @cached_property
    def labels(self) -> Tensor:
        """int64 [M]"""
        return self.task.labels if self.order is None else self.task.labels[self.order]

    @cached_property
    def _place(self) -> Tensor:
        """int64 [N_s], a row's position in the order; 0 for rows that are not in it."""
        assert self.order is not None
        numbers = torch.arange(self.order.shape[0], device=self.order.device)
        return torch.zeros_like(self.task.labels).index_copy_(0, self.order, numbers)

    def place(self, rows: Tensor) -> Tensor:
        """The positions in the order of the rows with these numbers, which must be labelled."""
        return rows if self.order is None else self._place[rows]

    def run(self, function: RowFunction, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Streams the rows through a row function; returns its values and then its constants, [M] in this order."""
        task, pieces = self.task, self.pieces
        if pieces is None:
            size = task.settings.chunk_size
            size = size or task.student.default_chunk(task.shard.widest, dense=False, function=function)
            pieces = [*chunks(len(self.labels), size)]
        return task.student.stream(function, RowPlan(pieces, self.order), *parameters)

    def of_student_side(self, values: Tensor) -> Tensor:
        """Selects from values [M] in the order those of the student's rows of all chunks, chunk by chunk, [n]."""
        return values[self.place(self.task.pairing.student.rows)]

    def scatter(self, values: Tensor) -> Tensor:
        """Values [M] in the order → [N_s] by row number, 0 for ignored rows."""
        if self.order is None:
            return values
        whole = values.new_zeros(self.task.labels.shape[0]).index_copy(0, self.order, values)
        return torch.where(self.task.labels >= 0, whole, 0)
