"""KD against a teacher that is known over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from distill_rl.losses.core.labels import LabelGradient, LabelTerm, given, weight_of
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.core.streaming import Buffers, Centre, LogSums, Pass, RowFunction, all_reduce_sums, row_sum
from distill_rl.losses.divergence import Distribution, Divergence


class TeacherChunks(Protocol):
    """Where the teacher's logits come from, a chunk of rows at a time."""

    def load(self, rows: slice, buffers: Buffers, centre: Centre, *, first: bool) -> Tensor:
        """This rank's columns of these rows, centred and scaled, [n, width], in a buffer of `buffers`, not to be changed."""

    def select(self, kept: Tensor) -> TeacherChunks:
        """Of the rows with these numbers only."""

    def to_save(self) -> tuple[Tensor, ...]:
        """As `RowFunction.to_save`."""

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """As `RowFunction.restore`."""


class LogitChunks:
    """Teacher logits that exist: [N, Vl]."""

    def __init__(self, logits: Tensor, kept: Tensor | None = None):
        self.logits, self.kept = logits, kept

    def load(self, rows: slice, buffers: Buffers, centre: Centre, *, first: bool) -> Tensor:
        logits = self.logits[rows if self.kept is None else self.kept[rows]]
        return buffers.load("teacher", logits, centre, rows, first=first)

    def select(self, kept: Tensor) -> LogitChunks:
        return LogitChunks(self.logits, kept)

    def to_save(self) -> tuple[Tensor, ...]:
        logits, self.logits = self.logits, self.logits.new_empty(0)
        return (logits,)

    def restore(self, tensors: Sequence[Tensor]) -> None:
        (self.logits,) = tensors


class DenseRows(RowFunction):
    """(T²·D, cross-entropy) per row; also the mass that either side has in the compared columns, 1.

    The two KLs need one sweep: with m the leading side's maximum, D = Σ exp(x − m)·(x − y)/Z_x − lse_x + lse_y for
    x the leading side's logits and y the other's. The other divergences need both normalisers before their second.
    """

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
        self.temperature = temperature
        self.centre, self.teacher_centre = (Centre(num_rows, like, shard, 1 / temperature) for _ in range(2))
        powers = (1.0,) if label is None else label.powers
        self.student_sums = LogSums(
            num_rows,
            powers,
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
        self.student_lse, self.teacher_lse, self.slope = (like.new_empty(num_rows) for _ in range(3))
        self.values = [like.new_empty(num_rows) for _ in range(1 + (label is not None))]

    @property
    def passes(self) -> list[Pass]:
        if self.divergence.leads:
            return [(self._collect, self._complete_led)]
        return [(self._collect, self._complete), (self._collect_terms, self._complete_terms)]

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values, self.values = tuple(self.values), []
        one = torch.ones_like(values[0])
        return values, (one, one.clone())

    def to_save(self) -> tuple[Tensor, ...]:
        return self.teacher.to_save()

    def restore(self, tensors: Sequence[Tensor]) -> None:
        self.teacher.restore(tensors)

    def _collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        w = self.teacher.load(rows, buffers, self.teacher_centre, first=True)
        if self.label is not None:
            self.label.collect(rows, u)
        work = buffers.buffer("work", u.shape[0])
        sides = [(self.student_sums, u, w), (self.teacher_sums, w, u)]
        for sums, x, y in sides:
            exponentials = sums.add(rows, x, work)
            if sums.weighted is not None:
                sums.weigh(rows, exponentials, x - y)

    def _complete(self, rows: slice) -> None:
        all_reduce_sums(
            self.shard, rows, [self.student_sums, self.teacher_sums], [self.label.picked(rows)] if self.label else []
        )
        self.student_lse[rows] = self.student_sums.log(rows)
        self.teacher_lse[rows] = self.teacher_sums.log(rows)
        if self.label is not None:
            self.values[1][rows] = self.label.cross_entropy(rows, self.student_sums.log(rows, -1))

    def _complete_led(self, rows: slice) -> None:
        self._complete(rows)
        difference = self.student_lse[rows] - self.teacher_lse[rows]
        if self.divergence.leads == "teacher":
            self._set_value(rows, self.teacher_sums.mean(rows) + difference)
            self.slope[rows] = -1
        else:
            value = self.student_sums.mean(rows) - difference
            self._set_value(rows, value)
            self.slope[rows] = value + 1

    def _collect_terms(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        p, q = self._distributions(rows, u, buffers, out=buffers.buffer("work", u.shape[0]))
        self.values[0][rows] = row_sum(self.divergence.value(p, q))
        self.slope[rows] = row_sum(self.divergence.slope(p, q))

    def _complete_terms(self, rows: slice) -> None:
        self.shard.sum_(self.values[0][rows], self.slope[rows])
        self.slope[rows].masked_fill_(self.values[0][rows].isnan(), torch.nan)  # the sign in TVD's slope hides a NaN
        self._set_value(rows, self.values[0][rows])

    def _set_value(self, rows: slice, divergence: Tensor) -> None:
        """Never negative: what is left below zero is rounding."""
        self.values[0][rows] = self.temperature**2 * divergence.clamp_min(0)

    def _distributions(
        self, rows: slice, u: Tensor, buffers: Buffers, out: Tensor
    ) -> tuple[Distribution, Distribution]:
        """Teacher and student; `out` receives the student's log-probabilities and may be u."""
        w = self.teacher.load(rows, buffers, self.teacher_centre, first=False)
        log_q = torch.sub(u, self.student_lse[rows, None], out=out)
        return Distribution(w - self.teacher_lse[rows, None]), Distribution(log_q)

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        label = LabelGradient(self.label, rows, u, given(grads, 1), buffers)
        kd = weight_of(grads, 0, u) * self.temperature
        p, q = self._distributions(rows, u, buffers, out=u)
        gradient = self.divergence.slope(p, q).mul_(kd[:, None])
        gradient.addcmul_(q.prob, (label.shared - kd * self.slope[rows])[:, None])
        return label.add_to(gradient)
