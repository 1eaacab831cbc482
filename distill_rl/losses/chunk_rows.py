"""What the cross-tokenizer losses share: realised tokens' log-probabilities, and the comparison of a few outcomes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distill_rl.losses.divergence import Distribution, Divergence
from distill_rl.losses.labels import LabelGradient, LabelTerm, given
from distill_rl.losses.shards import VocabularyShard
from distill_rl.losses.sweep import LogSums, Scratch, Sweep, combine, floor_of


class Terms(NamedTuple):
    """What a method makes of the student's logits."""

    kd: Tensor
    """[count], T² included"""
    ce: Tensor
    """[M], in the order of the sweep"""
    num_chunks: int
    teacher_mass: Tensor | None = None
    """[n], of the 1:1 chunks, or their sum"""
    student_mass: Tensor | None = None


class RealisedRows:
    """(cross-entropy at T = 1, log-probability of the label at T) per row.

    The base of the row functions that compare whole distributions: they collect, complete and differentiate more.
    """

    def __init__(
        self, labels: Tensor, shard: VocabularyShard, temperature: float, like: Tensor, columns: int | None = None
    ):
        """labels: [M] global ids. `columns`: how many further sums of exponentials `sums.table` holds per row."""
        self.shard, self.temperature, self.scale = shard, temperature, 1 / temperature
        self.label = LabelTerm(labels, shard, like, temperature)
        self.sums = LogSums(labels.shape[0], self.label.powers, like, columns=columns)
        self.lse = like.new_empty(labels.shape[0])
        self.values = [like.new_empty(labels.shape[0]) for _ in range(2)]

    @property
    def sweeps(self) -> list[Sweep]:
        return [(self._collect, self.complete)]

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values, self.values = tuple(self.values), []
        return values, ()

    def collect(self, rows: slice, u: Tensor, scratch: Scratch) -> Tensor:
        """Returns exp(u − its maximum)."""
        self.label.collect(rows, u)
        return self.sums.add(rows, u, scratch.buffer("work", u.shape[0]))

    def _collect(self, rows: slice, u: Tensor, scratch: Scratch) -> None:
        self.collect(rows, u, scratch)

    def complete(self, rows: slice) -> None:
        combine(self.shard, rows, [self.sums], [self.label.logit])
        self.lse[rows] = self.sums.log(rows)
        self.values[0][rows] = self.label.cross_entropy(rows, self.sums.log(rows, -1))
        self.values[1][rows] = self.label.realised(rows, self.lse[rows])

    def label_gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], scratch: Scratch) -> LabelGradient:
        return LabelGradient(self.label, rows, u, given(grads, 0), scratch, given(grads, 1))

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], scratch: Scratch) -> Tensor:
        label = self.label_gradient(rows, u, grads, scratch)
        return label.add_to(u.sub_(self.lse[rows, None]).exp_().mul_(label.shared[:, None]))


class Compared(torch.autograd.Function):
    """D of a few outcomes per row, from log-probabilities of student and teacher [n, m] → [n].

    Every term is balanced (see `Divergence.balance`), so it is never negative, whatever the outcomes sum to.
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
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (slope,) = ctx.saved_tensors
        return slope * grad[:, None], None, None, None


class Bernoulli(torch.autograd.Function):
    """D between two coins that fall with the probabilities exp(x) and exp(y): x of the student, y of the teacher, [n] → [n].

    Where the student is certain to rounding, exp(x) = 1, its other outcome is taken to be as likely as that rounding:
    the slope is large then and finite, and the softmax that it meets further down is as small.
    """

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, divergence: Divergence) -> Tensor:
        least = -torch.finfo(x.dtype).eps / 4
        x, y = (side.to(x.dtype).clamp(floor_of(x.dtype), least) for side in (x, y))
        other_x, other_y = log1mexp(x), log1mexp(y)
        value, slope = torch.zeros_like(x), torch.zeros_like(x)
        for log_q, log_p, inner in ((x, y, 1.0), (other_x, other_y, -(x - other_x).exp())):
            p, q = Distribution(log_p), Distribution(log_q)
            value += divergence.value(p, q) + divergence.balance * (q.prob - p.prob)
            slope += divergence.slope(p, q) * inner
        ctx.save_for_backward(slope)
        return value.clamp_min(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (slope,) = ctx.saved_tensors
        return slope * grad, None, None


def log1mexp(x: Tensor) -> Tensor:
    """log(1 − exp(x)) for x < 0 without loss on either side of −log 2 (Mächler, 2012)."""
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-x.exp()))
