"""What the cross-tokenizer methods share: both sides' log-probabilities per row or chunk, and D of a few outcomes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from functools import cached_property

import torch
from torch import Tensor

from distill_rl.losses.core.logits import first_derivative
from distill_rl.losses.core.rows import LabelGradient, LabelTerm, given
from distill_rl.losses.core.streaming import Buffers, LogSums, RowFunction, all_reduce_sums, floor_of
from distill_rl.losses.cross_tokenizer.chunks import segment_sum
from distill_rl.losses.cross_tokenizer.task import ChunkTask, LabelledRows
from distill_rl.losses.divergence import Distribution, Divergence

_CERTAIN = -1e-30
"""A log-probability this close to 0 counts as certain."""


class LabelLogprobRows(RowFunction):
    """Per row the cross-entropy at T = 1 and, if `with_label_logprob`, the label's log-probability at T (else 0).

    Base of the row functions that compare whole distributions, which collect, complete and differentiate more. `columns`
    is the number of further totals per row in `sums.table`, which they fill.
    """

    def __init__(self, labelled: LabelledRows, *, with_label_logprob: bool = False, columns: int | None = None):
        frame = labelled.task.frame(len(labelled.labels))
        self.shard, self.temperature, self.centre = frame.shard, frame.temperature, frame.centre()
        self.label = LabelTerm(labelled.labels, frame)
        self.sums = LogSums(self.centre, whole=True, powers=self.label.powers, columns=columns)
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
        return LabelGradient(self.label, rows, u, given(grads, 0), buffers, given(grads, 1) if self.others else None)

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        label = self.label_gradient(rows, u, grads, buffers)
        return label.add_to(u.sub_(self.lse[rows, None]).exp_().mul_(label.shared[:, None]))


class TeacherDistributions:
    """The teacher's distribution over its own vocabulary for each chunk, a group of chunks at a time.

    `mean`: the normalised geometric mean of the chunk's rows. `chain`: its first row, with the other tokens in
    `continuation`.
    """

    def __init__(self, task: ChunkTask):
        self.teacher = copy(task.dense_teacher())
        self._side = task.pairing.teacher
        # [count], log-probability of a chunk's tokens after the first; 0 with `mean`.
        self.continuation = task.like.new_zeros(task.pairing.count)
        if task.settings.chain:
            self.continuation = self._side.after_first(task.teacher_label).clamp_max(0)
        self._task = task.bare()

    def of(self, group: slice) -> Tensor:
        """The teacher's log-probabilities of each chunk of a group, [n, V_t], at least the floor, without `continuation`."""
        floor = floor_of(self._task.dtype)
        if self._task.settings.chain:
            return self._rows(self._side.first[group]).clamp_min(floor)
        starts = self._task.ends[1]
        rows = self._rows(self._side.rows[starts[group.start] : starts[group.stop]])
        length = self._side.length[group]
        if rows.shape[0] != length.shape[0]:
            share = length.to(rows.dtype).repeat_interleave(length, output_size=rows.shape[0])
            rows = segment_sum(rows.clamp_min(floor).div_(share[:, None]), length).log_softmax(1)
        return rows.clamp_min(floor)

    def _rows(self, rows: Tensor) -> Tensor:
        return self.teacher.of(rows, self._task.dtype).mul_(1 / self._task.settings.temperature).log_softmax(1)

    @cached_property
    def complement(self) -> Tensor:
        """[count], log(1 − exp(continuation)): the chunk's later tokens do not follow; the floor with `mean`."""
        return complement(self.continuation)


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
