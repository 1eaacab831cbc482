"""KD against a teacher that is known in k columns per row.

Notation: S are the teacher's k columns of a row, R all others; p the teacher, q the student, u = z/T its logits.

    D          Σ_{v∈S} f(p_v, q_v)  +  f(p_R, q_R) with `tail="bucket"`: R is one more outcome
    gradient   ∂D/∂u_v = slope_v − q_v·H for v in S,   exp(u_v − lse_R)·(slope_R − q_R·H) for v in R,   H = Σ slopes

q_R comes from a logsumexp over R, never from 1 − Σ_S q: at q_R = 1e-9 the latter is noise. With a bucket every term is
balanced (`Divergence.balance`), so that log-probabilities that were rounded to 16 bits on their way cannot make D
negative. `truncate` leaves R out; `renormalize` conditions both sides on S.

The student's logits at S are summed over the ranks together with the normalisers (k + 1 numbers per row, two
collectives). After that every rank holds the whole comparison, so every divergence costs one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distill_rl.losses.core.labels import LabelGradient, LabelTerm, given, weight_of
from distill_rl.losses.core.row_function import RowFunction
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.core.streaming import Buffers, Centre, LogSums, all_reduce_sums, floor_of
from distill_rl.losses.divergence import Distribution, Divergence
from distill_rl.losses.options import Tail
from distill_rl.losses.targets import TopKLogprobs

FULL_MASS = 1 - 1e-6
"""If the k columns hold more than this and `rest_logprob` is absent, the rest is taken to be 0: it cannot be told from rounding."""


class TopKRows(RowFunction):
    """Per row T²·D; with labels the cross-entropy and, on request, the label's log-probability at T.

    Both sides' mass in S are its constants.

    An id of −1 is an absent entry: neither side has mass there. The label's log-probability is that of rows whose label
    is an entry of S.
    """

    def __init__(
        self,
        teacher: TopKLogprobs,
        shard: VocabularyShard,
        divergence: Divergence,
        temperature: float,
        tail: Tail,
        label: LabelTerm | None,
        like: Tensor,
        with_label_logprob: bool = False,
        centre: Centre | None = None,
    ):
        """
        Args:
            teacher: ids [N, k] in the student's vocabulary, −1 for absent entries.
            label: the labels of all rows; None: no cross-entropy and no label's log-probability.
            like: any tensor with the device and dtype of the arithmetic.
            with_label_logprob: only with `label`.
            centre: of the student's logits, if another row function loads and centres them.
        """
        self.teacher, self.shard, self.divergence, self.tail, self.label = teacher, shard, divergence, tail, label
        self.temperature = temperature
        self.balance = divergence.balance if tail == "bucket" else 0.0
        num_rows, k = teacher.ids.shape
        self.centre = centre or Centre(num_rows, like, shard, 1 / temperature)
        self.rest = LogSums(num_rows, (1.0,) if label is None else label.powers, self.centre, whole=False)
        self.top = like.new_empty(num_rows, k)
        # Kept for backward, per row: the logsumexp over all columns, over R, and that q at S is normalised by;
        # slope_R − q_R·H, the common factor of R's columns; and H.
        self.lse, self.rest_lse, self.base, self.rest_factor, self.slope_sum = (
            like.new_empty(num_rows) for _ in range(5)
        )
        self.values = [like.new_empty(num_rows) for _ in range(1 + (label is not None) * (1 + with_label_logprob))]
        self.masses = [like.new_empty(num_rows) for _ in range(2)]

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values, masses, self.values, self.masses = tuple(self.values), tuple(self.masses), [], []
        self.top = self.top.new_empty(0)
        return values, masses

    def to_save(self) -> tuple[Tensor, ...]:
        teacher, rest = self.teacher, self.teacher.rest_logprob
        nothing = teacher.logprobs.new_empty(0)
        self.teacher = TopKLogprobs(teacher.ids.new_empty(0), nothing, temperature=teacher.temperature)
        return (teacher.ids, teacher.logprobs) if rest is None else (teacher.ids, teacher.logprobs, rest)

    def restore(self, tensors: Sequence[Tensor]) -> None:
        ids, logprobs, *rest = tensors
        self.teacher = TopKLogprobs(ids, logprobs, rest[0] if rest else None, self.teacher.temperature)

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        """Gathers the logits at S into `top` (0 where another rank has the column) and sums R's. u stays as it was."""
        if self.label is not None:
            self.label.collect(rows, u)
        columns = self.shard.columns(self.teacher.ids[rows])
        top = u.gather(1, columns)
        self.top[rows] = torch.where(columns < self.shard.size, top, 0)
        self.rest.add(rows, u.scatter_(1, columns, floor_of(u.dtype)), buffers.buffer("work", u.shape[0]))
        u.scatter_(1, columns, top)

    def complete(self, rows: slice) -> None:
        """Sums over the ranks; sets T²·D, the masses and, with labels, the cross-entropy and log-probability.

        Only for these rows. Keeps the normalisers for backward.
        """
        picked = [(self.top, self.shard.columns(self.teacher.ids[rows]))]
        all_reduce_sums(self.shard, rows, [self.rest], picked + ([self.label.picked(rows)] if self.label else []))
        top = torch.where(self.teacher.ids[rows] < 0, floor_of(self.top.dtype), self.top[rows])
        # Where R is empty or masked, its sums are those of columns at the floor.
        rest_lse = torch.where(self.rest.max[rows] > floor_of(top.dtype), self.rest.log(rows), floor_of(top.dtype))
        lse = _logsumexp(top, rest_lse)
        self.lse[rows], self.rest_lse[rows] = lse, rest_lse
        self._compare(rows, top, lse, rest_lse)
        if self.label is not None:
            at_one = lse if self.temperature == 1 else _logsumexp(top * self.temperature, self.rest.log(rows, -1))
            self.values[1][rows] = self.label.cross_entropy(rows, at_one)
            if len(self.values) > 2:
                label = self.teacher.ids[rows] == self.label.ids[rows, None]
                others = _logsumexp(torch.where(label, floor_of(top.dtype), top), rest_lse)
                self.values[2][rows] = self.label.logprob(rows, others)

    def _compare(self, rows: slice, top: Tensor, lse: Tensor, rest_lse: Tensor) -> None:
        """Sets T²·D, both sides' mass in S, and what backward needs, for these rows.

        Args:
            top: [n, k], the student's u at S, at the floor for absent entries.
            lse, rest_lse: [n], the logsumexp of u over all columns and over R.
        """
        log_p, log_q = self._teacher_logprobs(rows, top.dtype), top - lse[:, None]
        self.masses[0][rows], self.masses[1][rows] = log_p.exp().sum(1), log_q.exp().sum(1)
        self.base[rows] = lse
        if self.tail == "renormalize":
            self.base[rows] = top.logsumexp(1)
            log_p, log_q = log_p - log_p.logsumexp(1, keepdim=True), top - self.base[rows, None]
        p, q = Distribution(log_p), Distribution(log_q)
        value, slope = self._terms(p, q)
        value, slope = value.sum(1), slope.sum(1)
        rest_q = Distribution(rest_lse - lse)
        rest_slope = torch.zeros_like(slope)
        if self.tail == "bucket":
            rest_p = Distribution(self._rest_logprob(rows, log_p))
            rest_value, rest_slope = self._terms(rest_p, rest_q)
            kept = rest_lse > floor_of(top.dtype)
            if self.divergence.needs_support:
                kept &= rest_p.log > floor_of(top.dtype)
            rest_slope = torch.where(kept, rest_slope, 0)
            value, slope = value + torch.where(kept, rest_value, 0), slope + rest_slope
        if self.tail != "truncate":
            value = value.clamp_min(0)  # below zero there is only rounding
        self.values[0][rows] = self.temperature**2 * value
        slope = slope.masked_fill(value.isnan(), torch.nan)  # TVD's sign would hide it
        self.slope_sum[rows] = slope
        self.rest_factor[rows] = 0 if self.tail == "renormalize" else rest_slope - rest_q.prob * slope

    def _terms(self, p: Distribution, q: Distribution) -> tuple[Tensor, Tensor]:
        """(value, slope): per compared token the divergence's term and its derivative with respect to log q.

        With a bucket (`balance` is not 0) each value includes κ·(q − p), and each slope κ·q.
        """
        value, slope = self.divergence.value(p, q), self.divergence.slope(p, q)
        if self.balance:
            value, slope = value + self.balance * (q.prob - p.prob), slope + self.balance * q.prob
        return value, slope

    def _teacher_logprobs(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """The teacher's log-probabilities of these rows, [n, k] in `dtype`, with the floor instead of −inf."""
        return self.teacher.logprobs[rows].to(dtype).clamp_min(floor_of(dtype))

    def _rest_logprob(self, rows: slice, log_p: Tensor) -> Tensor:
        """log p_R [n], at least the floor: the teacher's `rest_logprob`, or without one what `log_p` [n, k] leaves."""
        if self.teacher.rest_logprob is None:
            return rest_of(log_p)
        return self.teacher.rest_logprob[rows].to(log_p.dtype).clamp_min(floor_of(log_p.dtype))

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        """The gradient (module docstring) plus that of the label terms, [n, width]; u is overwritten."""
        label = LabelGradient(self.label, rows, u, given(grads, 1), buffers, given(grads, 2))
        kd = weight_of(grads, 0, u) * self.temperature
        columns = self.shard.columns(self.teacher.ids[rows])
        top = u.gather(1, columns)
        rest_q = (self.rest_lse[rows] - self.lse[rows]).exp()
        gradient = u.sub_(self.rest_lse[rows, None]).exp_()
        gradient.mul_((kd * self.rest_factor[rows] + label.shared * rest_q)[:, None])
        gradient.scatter_(1, columns, self.gradient_at_top(rows, top, kd, label.shared))
        return label.add_to(gradient)

    def gradient_at_top(self, rows: slice, top: Tensor, kd: Tensor, ce: Tensor) -> Tensor:
        """∂(Σ kd · D + ce · cross-entropy)/∂u at the columns of S, without the label's own column, [n, k].

        Args:
            top: the student's u at S, [n, k].
            kd, ce: weights per row, [n]. `ce` is what all columns share; see `LabelGradient.shared`.
        """
        log_p = self._teacher_logprobs(rows, top.dtype)
        if self.tail == "renormalize":
            log_p = log_p - log_p.logsumexp(1, keepdim=True)
        q = Distribution(top - self.base[rows, None])
        _, slope = self._terms(Distribution(log_p), q)
        gradient = (slope - q.prob * self.slope_sum[rows, None]) * kd[:, None]
        return gradient.addcmul_((top - self.lse[rows, None]).exp(), ce[:, None])


def rest_of(logprobs: Tensor) -> Tensor:
    """log(1 − Σ exp(logprobs)) per row, [n, k] → [n]; the floor where the sum is at least `FULL_MASS`."""
    mass = logprobs.exp().sum(1)
    return torch.where(mass >= FULL_MASS, floor_of(mass.dtype), torch.log1p(-mass.clamp_max(FULL_MASS)))


def _logsumexp(top: Tensor, rest: Tensor) -> Tensor:
    """The logsumexp of each row of `top` [n, k] and its entry of `rest` [n]: [n]."""
    return torch.cat([top, rest[:, None]], 1).logsumexp(1)
