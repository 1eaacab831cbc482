"""KD against a teacher whose whole distribution is known.

Notation of docs/losses.md: p is the teacher, q the student, u = z/T the student's logits over the temperature, w the
teacher's; D(p, q) = Σ_v f(p_v, q_v) with slope_v = ∂f/∂(log q_v) (`divergence.py`).

    value      T²·D
    gradient   ∂(T²·D)/∂z_v = T · (slope_v − q_v · H),   H = Σ_w slope_w

The factor T² keeps the gradient's size independent of T (arXiv 1503.02531); one T cancels with ∂u/∂z = 1/T.

The two plain KLs need a single pass, because log(p/q) is linear in the logits. With x the logits of the leading side
(the teacher's for forward KL, the student's for reverse KL), y the other side's, and e_v = exp(x_v − m):

    D = Σ_v softmax(x)_v · (x_v − lse_x − y_v + lse_y) = Σ_v e_v·(x_v − y_v) / Σ_v e_v − lse_x + lse_y

and H is known: −1 for forward KL, D + 1 for reverse KL. All other divergences need both normalisers before they can
compare, hence a second pass and a third collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from distill_rl.losses.core.labels import LabelGradient, LabelTerm, given, weight_of
from distill_rl.losses.core.row_function import Pass, RowFunction
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.core.streaming import Buffers, Centre, LogSums, all_reduce_sums, row_sum
from distill_rl.losses.divergence import Distribution, Divergence


class TeacherChunks(Protocol):
    """A source of the teacher's logits, a chunk of rows at a time."""

    def load(self, rows: slice, buffers: Buffers, centre: Centre, *, first: bool) -> Tensor:
        """This rank's columns of these rows, centred and scaled as `Buffers.load` does, [n, width]. Read-only.

        Args:
            buffers: provides the buffer, `teacher`, that is filled and returned.
            first: during the first pass, which measures the centre.
        """

    def plain(self, rows: slice, buffers: Buffers) -> tuple[Tensor, Tensor | None]:
        """This rank's columns of these rows, neither centred nor scaled, for kernels. Read-only.

        Returns:
            Logits [n, Vl] and None, or logits [N, Vl] and the int64 numbers [n] of these rows. Columns are contiguous.
        """

    def select(self, kept: Tensor) -> TeacherChunks:
        """A source of the rows with the numbers `kept` only, counted anew from 0."""

    def to_save(self) -> tuple[Tensor, ...]:
        """See `RowFunction.to_save`."""

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """See `RowFunction.restore`."""


class LogitChunks:
    """Teacher logits that exist: [N, Vl]."""

    def __init__(self, logits: Tensor, kept: Tensor | None = None):
        self.logits, self.kept = logits, kept

    def load(self, rows: slice, buffers: Buffers, centre: Centre, *, first: bool) -> Tensor:
        logits = self.logits[rows if self.kept is None else self.kept[rows]]
        return buffers.load("teacher", logits, centre, rows, first=first)

    def plain(self, rows: slice, buffers: Buffers) -> tuple[Tensor, Tensor | None]:
        logits = self.logits if self.logits.stride(-1) == 1 else self.logits.contiguous()
        return (logits[rows], None) if self.kept is None else (logits, self.kept[rows])

    def select(self, kept: Tensor) -> LogitChunks:
        return LogitChunks(self.logits, kept)

    def to_save(self) -> tuple[Tensor, ...]:
        logits, self.logits = self.logits, self.logits.new_empty(0)
        return (logits,)

    def restore(self, tensors: Sequence[Tensor]) -> None:
        (self.logits,) = tensors


class DenseRows(RowFunction):
    """Per row T²·D and, with labels, the cross-entropy; as constants the compared masses, which are 1 on both sides."""

    def __init__(
        self,
        teacher: TeacherChunks,
        shard: VocabularyShard,
        divergence: Divergence,
        temperature: float,
        label: LabelTerm | None,
        num_rows: int,
        like: Tensor,
    ):
        self.teacher, self.shard, self.divergence, self.label = teacher, shard, divergence, label
        self.temperature, self.lender = temperature, teacher
        self.centre, self.teacher_centre = (Centre(num_rows, like, shard, 1 / temperature) for _ in range(2))
        self.student_sums = LogSums(
            num_rows,
            (1.0,) if label is None else label.powers,
            self.centre,
            whole=True,
            weighted=divergence.leads == "student",
            against=self.teacher_centre,
        )
        self.teacher_sums = LogSums(
            num_rows,
            (1.0,),
            self.teacher_centre,
            whole=True,
            weighted=divergence.leads == "teacher",
            against=self.centre,
        )
        self.student_lse, self.teacher_lse, self.slope_sum = (like.new_empty(num_rows) for _ in range(3))
        self.values = [like.new_empty(num_rows) for _ in range(1 + (label is not None))]

    @property
    def passes(self) -> list[Pass]:
        if self.divergence.leads:
            return [(self.collect, self._complete_kl)]
        return [(self.collect, self.complete), (self._collect_terms, self._complete_terms)]

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values, self.values = tuple(self.values), []
        one = torch.ones_like(values[0])
        return values, (one, one.clone())

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        """First pass over a chunk: loads the teacher's chunk and stores this rank's part of both sides' normalisers.

        With labels, also the student's logits at them. For a plain KL, also Σ exp(x)·(x − y), with x the logits of the
        side whose probabilities weight it, and y the other side's. u is not changed.
        """
        w = self.teacher.load(rows, buffers, self.teacher_centre, first=True)
        if self.label is not None:
            self.label.collect(rows, u)
        work = buffers.buffer("work", u.shape[0])
        for sums, x, y in ((self.student_sums, u, w), (self.teacher_sums, w, u)):
            exponentials = sums.add(rows, x, work)
            if sums.weighted is not None:
                sums.weigh(rows, exponentials, x - y)

    def complete(self, rows: slice) -> None:
        """Sums these rows' totals over the ranks; stores both sides' logsumexp and, with labels, the cross-entropy."""
        picked = [self.label.picked(rows)] if self.label else []
        all_reduce_sums(self.shard, rows, [self.student_sums, self.teacher_sums], picked)
        self.student_lse[rows] = self.student_sums.log(rows)
        self.teacher_lse[rows] = self.teacher_sums.log(rows)
        if self.label is not None:
            self.values[1][rows] = self.label.cross_entropy(rows, self.student_sums.log(rows, -1))

    def _complete_kl(self, rows: slice) -> None:
        """For the two plain KLs: sums over the ranks, then sets T²·D and the slope sum H of these rows in closed form.

        The weighted means of the first pass are enough (module docstring). Sets the cross-entropy as `complete` does.
        """
        self.complete(rows)
        difference = self.student_lse[rows] - self.teacher_lse[rows]
        if self.divergence.leads == "teacher":
            self._set_value(rows, self.teacher_sums.mean(rows) + difference)
            self.slope_sum[rows] = -1
        else:
            value = self.student_sums.mean(rows) - difference
            self._set_value(rows, value)
            self.slope_sum[rows] = value + 1

    def _collect_terms(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        """Second pass over a chunk: stores this rank's part of D = Σ f(p, q) and of the slope sum H."""
        p, q = self._distributions(rows, u, buffers, out=buffers.buffer("work", u.shape[0]))
        self.values[0][rows] = row_sum(self.divergence.value(p, q))
        self.slope_sum[rows] = row_sum(self.divergence.slope(p, q))

    def _complete_terms(self, rows: slice) -> None:
        """Sums D and the slope sum H of these rows over the ranks and stores T²·D. Where D is NaN, so is H."""
        self.shard.sum_(self.values[0][rows], self.slope_sum[rows])
        # A NaN must reach the gradient, too: the sign in TVD's slope would hide it.
        self.slope_sum[rows].masked_fill_(self.values[0][rows].isnan(), torch.nan)
        self._set_value(rows, self.values[0][rows])

    def _set_value(self, rows: slice, divergence: Tensor) -> None:
        """Stores T²·D of these rows, with D clamped at 0: below it there is only rounding. NaN stays."""
        self.values[0][rows] = self.temperature**2 * divergence.clamp_min(0)

    def _distributions(
        self, rows: slice, u: Tensor, buffers: Buffers, out: Tensor
    ) -> tuple[Distribution, Distribution]:
        """The distributions p (teacher) and q (student) of a chunk, [n, width]. `out` receives log q and may be u."""
        w = self.teacher.load(rows, buffers, self.teacher_centre, first=False)
        log_q = torch.sub(u, self.student_lse[rows, None], out=out)
        return Distribution(w - self.teacher_lse[rows, None]), Distribution(log_q)

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        """The gradient of a chunk's logits, [n, width]; u is overwritten.

        T·g·(slope_v − q_v·H) with g = ∂loss/∂(T²·D), plus the cross-entropy's g'·(q_v − 1[v = label]).

        Args:
            grads: g and g' [n]; None for one that nothing uses.
        """
        label = LabelGradient(self.label, rows, u, given(grads, 1), buffers)
        kd = weight_of(grads, 0, u) * self.temperature
        p, q = self._distributions(rows, u, buffers, out=u)
        gradient = self.divergence.slope(p, q).mul_(kd[:, None])
        gradient.addcmul_(q.prob, (label.shared - kd * self.slope_sum[rows])[:, None])
        return label.add_to(gradient)
