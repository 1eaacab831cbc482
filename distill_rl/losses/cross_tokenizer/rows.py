"""What the cross-tokenizer methods share: label log-probabilities per row, and D of a few outcomes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distill_rl.losses.core.autograd import first_derivative
from distill_rl.losses.core.labels import LabelGradient, LabelTerm, given
from distill_rl.losses.core.row_function import RowFunction
from distill_rl.losses.core.streaming import Buffers, Centre, LogSums, all_reduce_sums, floor_of
from distill_rl.losses.cross_tokenizer.task import LabelledRows
from distill_rl.losses.divergence import Distribution, Divergence

_CERTAIN = -1e-30
"""A log-probability this close to 0 counts as certain."""


class Terms(NamedTuple):
    """A method's result."""

    kd: Tensor
    """[count], T² included"""
    ce: Tensor
    """[N_s] cross-entropy."""
    num_chunks: int
    teacher_mass: Tensor | None = None
    """The teacher's probability in the compared columns, [n] of the 1:1 chunks, or its sum."""
    student_mass: Tensor | None = None


class LabelLogprobRows(RowFunction):
    """Per row the cross-entropy at T = 1 and, if `with_label_logprob`, the label's log-probability at T (else 0).

    Base of the row functions that compare whole distributions, which collect, complete and differentiate more.
    """

    def __init__(self, labelled: LabelledRows, *, with_label_logprob: bool = False, columns: int | None = None):
        """
        Args:
            with_label_logprob: whether the label's log-probability at T is computed.
            columns: number of further totals per row in `sums.table`, which subclasses fill; None: no table.
        """
        task, labels, like = labelled.task, labelled.labels, labelled.task.like
        shard, temperature = task.shard, task.temperature
        self.shard, self.temperature = shard, temperature
        self.centre = Centre(labels.shape[0], like, shard, 1 / temperature)
        self.label = LabelTerm(labels, shard, like, temperature)
        self.sums = LogSums(labels.shape[0], self.label.powers, self.centre, whole=True, columns=columns)
        self.others = LogSums(labels.shape[0], (1.0,), self.centre, whole=False) if with_label_logprob else None
        self.lse = like.new_empty(labels.shape[0])
        self.values = [like.new_zeros(labels.shape[0]) for _ in range(2)]

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        self.add(rows, u, buffers)

    def add(self, rows: slice, u: Tensor, buffers: Buffers) -> Tensor:
        """Stores a chunk's sums and the labels' logits. Returns exp(u) in the buffer `work`.

        u is left as it was.
        """
        self.label.collect(rows, u)
        if self.others is not None:
            columns = self.label.columns[rows, None]
            label = u.gather(1, columns)
            self.others.add(rows, u.scatter_(1, columns, floor_of(u.dtype)), buffers.buffer("work", u.shape[0]))
            u.scatter_(1, columns, label)
        return self.sums.add(rows, u, buffers.buffer("work", u.shape[0]))

    def complete(self, rows: slice) -> None:
        """Sums over the ranks; sets these rows' cross-entropy and, if asked for, the label's log-probability."""
        all_reduce_sums(
            self.shard, rows, [self.sums, *([self.others] if self.others else [])], [self.label.picked(rows)]
        )
        self.lse[rows] = self.sums.log(rows)
        self.values[0][rows] = self.label.cross_entropy(rows, self.sums.log(rows, -1))
        if self.others is not None:
            self.values[1][rows] = self.label.logprob(rows, self.others.log(rows))

    def label_gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> LabelGradient:
        """The label's part of the gradient: of the cross-entropy (value 0) and, if computed, the log-probability (1).

        It reads u, so call it before u is overwritten.
        """
        return LabelGradient(self.label, rows, u, given(grads, 0), buffers, given(grads, 1) if self.others else None)

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        """The gradient of cross-entropy and log-probability by the chunk's logits, [n, width], written over `u`."""
        label = self.label_gradient(rows, u, grads, buffers)
        return label.add_to(u.sub_(self.lse[rows, None]).exp_().mul_(label.shared[:, None]))


class Compared(torch.autograd.Function):
    """D of a few outcomes per row, from log-probabilities of student and teacher: [n, m] → [n].

    With balanced terms (`Divergence.balance`) it is non-negative even if the outcomes do not sum to one.
    """

    @staticmethod
    def forward(ctx, log_q: Tensor, log_p: Tensor, divergence: Divergence, balanced: bool) -> Tensor:
        """D per row, [n].

        Args:
            log_q, log_p: [n, m] log-probabilities of student and teacher; only log_q gets a gradient.
            balanced: add κ·(q − p) to every term, and clamp D at 0.
        """
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
    """D between two coins with the probabilities exp(x) (student) and exp(y) (teacher): [n] → [n].

    ∂D/∂x = slope(heads) − slope(tails) · exp(x)/(1 − exp(x)) grows as 1/(1 − exp(x)) near x = 0, and ∂x/∂logits shrinks
    as much, so x must be precise near 0. Values closer to 0 than `_CERTAIN` are clamped.
    """

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, divergence: Divergence) -> Tensor:
        """D per row, [n], at least 0.

        Args:
            x, y: [n] log-probabilities of student and teacher; only x gets a gradient.
        """
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


def log1mexp(x: Tensor) -> Tensor:
    """log(1 − exp(x)) for x < 0 without loss on either side of −log 2 (Mächler, 2012)."""
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-x.exp()))
