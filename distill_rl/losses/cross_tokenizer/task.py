"""One call of a cross-tokenizer loss, and what its methods share: the order in which rows are streamed, both sides'
log-probabilities per row or chunk, and D of a few outcomes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from distill_rl.losses.core.checks import Backend, Tail
from distill_rl.losses.core.logits import DenseTeacher, StudentLogits, first_derivative
from distill_rl.losses.core.rows import (
    Buffers,
    LabelGradient,
    LabelTerm,
    LogSums,
    RowFrame,
    RowFunction,
    RowPlan,
    all_reduce_sums,
    chunks,
    floor_of,
)
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.cross_tokenizer.chunks import ChunkPairing, segment_sum
from distill_rl.losses.cross_tokenizer.projection import VocabularyProjection
from distill_rl.losses.divergence import Distribution, Divergence
from distill_rl.losses.targets import TopKLogprobs

_CERTAIN = -1e-30
"""A log-probability this close to 0 counts as certain."""


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
        of_rows = self.teacher.label_logprob
        assert of_rows is not None, "checked on entry"
        return of_rows.reshape(-1)[self.pairing.teacher.rows].to(self.dtype)

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
            return LabelledRows(self, None if count == self.student.num_rows else self.label_rows)
        waiting = torch.zeros(self.student.num_rows, dtype=torch.bool, device=first.device)
        waiting[self.label_rows] = True
        order = torch.cat([first, waiting.index_fill_(0, first, False).nonzero()[:, 0]])
        num_first = first.shape[0]
        if pieces is None:
            pieces = [*chunks(num_first, self.piece)]
        rest = chunks(count - num_first, self.piece)
        others = [slice(num_first + rows.start, num_first + rows.stop) for rows in rest]
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


class LabelLogprobRows(RowFunction):
    """Per row the cross-entropy at T = 1 and, if `with_label_logprob`, the label's log-probability at T (else 0).

    Base of the row functions that compare whole distributions, which collect, complete and differentiate more.
    """

    def __init__(self, labelled: LabelledRows, *, with_label_logprob: bool = False):
        frame = labelled.task.frame(len(labelled.labels))
        self.shard, self.temperature, self.centre = frame.shard, frame.temperature, frame.centre()
        self.label = LabelTerm(labelled.labels, frame)
        self.sums = LogSums(self.centre, whole=True, powers=self.label.powers)
        self.others = LogSums(self.centre, whole=False) if with_label_logprob else None
        self.lse = frame.empty()
        self.values = [torch.zeros_like(self.lse) for _ in range(2)]

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        self.add(rows, u, buffers)

    def add(self, rows: slice, u: Tensor, buffers: Buffers) -> Tensor:
        """Stores a chunk's sums and the labels' logits. Returns exp(u) in the buffer `work`."""
        self.label.collect(rows, u)
        if self.others is not None:
            self.others.add_others(rows, u, self.label.columns[rows, None], buffers.buffer("work", u.shape[0]))
        return self.sums.add(rows, u, buffers.buffer("work", u.shape[0]))

    def complete(self, rows: slice) -> None:
        sums = [self.sums] if self.others is None else [self.sums, self.others]
        all_reduce_sums(self.shard, rows, sums, [self.label.picked(rows)])
        self.lse[rows] = self.sums.log(rows)
        self.values[0][rows] = self.label.cross_entropy(rows, self.sums.log(rows, self.label.powers[-1]))
        if self.others is not None:
            self.values[1][rows] = self.label.logprob(rows, self.others.log(rows))

    def label_gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> LabelGradient:
        """The label's part of the gradient. It reads u, so call it before u is overwritten."""
        return LabelGradient(self.label, rows, u, grads[:2] if self.others else grads[:1], buffers)

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        label = self.label_gradient(rows, u, grads, buffers)
        return label.add_to(u.sub_(self.lse[rows, None]).exp_().mul_(label.shared[:, None]))


class TeacherDistributions:
    """The teacher's distribution over its own vocabulary for each chunk, a group of chunks at a time.

    `mean`: the normalised geometric mean of the chunk's rows. `chain`: its first row, with the other tokens in
    `continuation`.
    """

    def __init__(self, task: ChunkTask):
        self.teacher, self._side = copy(task.dense_teacher()), task.pairing.teacher
        self._settings, self._dtype = task.settings, task.dtype
        self._starts = [] if task.settings.chain else task.ends[1]
        # [count], log-probability of a chunk's tokens after the first; 0 with `mean`.
        self.continuation = task.like.new_zeros(task.pairing.count)
        if task.settings.chain:
            self.continuation = self._side.after_first(task.teacher_label).clamp_max(0)

    def of(self, group: slice) -> Tensor:
        """The teacher's log-probabilities of each chunk of a group, [n, V_t], at least the floor, without `continuation`."""
        floor = floor_of(self._dtype)
        if self._settings.chain:
            return self._rows(self._side.first[group]).clamp_min(floor)
        rows = self._rows(self._side.rows[self._starts[group.start] : self._starts[group.stop]])
        length = self._side.length[group]
        if rows.shape[0] != length.shape[0]:
            share = length.to(rows.dtype).repeat_interleave(length, output_size=rows.shape[0])
            rows = segment_sum(rows.clamp_min(floor).div_(share[:, None]), length).log_softmax(1)
        return rows.clamp_min(floor)

    def _rows(self, rows: Tensor) -> Tensor:
        return self.teacher.of(rows, self._dtype).mul_(1 / self._settings.temperature).log_softmax(1)


class Compared(torch.autograd.Function):
    """D of a few outcomes per row, from log-probabilities of student and teacher: [n, m] → [n]. Only log_q gets a gradient.

    With balanced terms (`Divergence.balance`) it is non-negative even if the outcomes do not sum to one.
    """

    @staticmethod
    def forward(ctx, log_q: Tensor, log_p: Tensor, divergence: Divergence, balanced: bool) -> Tensor:
        p, q = Distribution(log_p), Distribution(log_q)
        value, slope = divergence.value(p, q), divergence.slope(p, q)
        if balanced:
            value, slope = value + divergence.balance * (q.prob - p.prob), slope + divergence.balance * q.prob
        ctx.save_for_backward(slope)
        total = value.sum(1)
        return total.clamp_min(0) if balanced else total

    @staticmethod
    @first_derivative
    def backward(ctx, saved: Sequence[Tensor], grad: Tensor):
        (slope,) = saved
        return slope * grad[:, None], None, None, None


class Bernoulli(torch.autograd.Function):
    """D between two coins with the probabilities exp(x) (student) and exp(y) (teacher): [n] → [n]. Only x gets a gradient.

    ∂D/∂x = slope(heads) − slope(tails) · exp(x)/(1 − exp(x)) grows as 1/(1 − exp(x)) near x = 0, and ∂x/∂logits shrinks
    as much, so x must be precise near 0. Values closer to 0 than `_CERTAIN` are clamped.
    """

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, divergence: Divergence) -> Tensor:
        x, y = (side.to(x.dtype).clamp(floor_of(x.dtype), _CERTAIN) for side in (x, y))
        other_x, other_y = log1mexp(x), log1mexp(y)
        value, slope = torch.zeros_like(x), torch.zeros_like(x)
        for log_q, log_p, inner in ((x, y, 1.0), (other_x, other_y, -(x - other_x).exp())):
            p, q = Distribution(log_p), Distribution(log_q)
            value += divergence.value(p, q)  # both sides sum to one: there is nothing to balance
            slope += divergence.slope(p, q) * inner
        ctx.save_for_backward(slope)
        return value.clamp_min(0)

    @staticmethod
    @first_derivative
    def backward(ctx, saved: Sequence[Tensor], grad: Tensor):
        (slope,) = saved
        return slope * grad, None, None


def complement(logprob: Tensor) -> Tensor:
    """log(1 − exp(logprob)) elementwise; the floor where `logprob` is not below 0."""
    some = logprob < 0
    return torch.where(some, log1mexp(torch.where(some, logprob, -1)), floor_of(logprob.dtype))


def log1mexp(x: Tensor) -> Tensor:
    """log(1 − exp(x)) for x < 0 without loss on either side of −log 2 (Mächler, 2012)."""
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-x.exp()))
