"""What is computed per row of logits: the label's log-probability, and KD against the three kinds of targets.

Notation of docs/losses.md: p is the teacher, q the student, u = z/T the student's logits over the temperature, w the
teacher's; D(p, q) = Σ_v f(p_v, q_v) with slope_v = ∂f/∂(log q_v) (`divergence.py`).

    value      T²·D
    gradient   ∂(T²·D)/∂z_v = T · ∂D/∂u_v

The factor T² keeps the gradient's size independent of T (arXiv 1503.02531); one T cancels with ∂u/∂z = 1/T. The
cross-entropy comes out of the same pass (`LabelTerm` forward, `LabelGradient` backward).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from distill_rl.losses.core.checks import Tail
from distill_rl.losses.core.streaming import (
    Buffers,
    Centre,
    LogSums,
    Pass,
    Picked,
    RowFrame,
    RowFunction,
    all_reduce_sums,
    floor_of,
    row_sum,
)
from distill_rl.losses.divergence import Distribution, Divergence
from distill_rl.losses.targets import SampledTokens, TopKLogprobs

if TYPE_CHECKING:
    from distill_rl.losses.core.logits import DenseTeacher  # whose kernels import this file

FULL_MASS = 1 - 1e-6
"""If the k columns hold more than this and `rest_logprob` is absent, the rest is taken to be 0: it cannot be told from rounding."""


class LabelTerm:
    """The label's logit per row, collected in a pass over logits divided by T, and what follows from it.

    The cross-entropy is at T = 1. A label that no rank holds (an ignored row) counts as a logit of 0, which is finite;
    the caller masks the row.
    """

    def __init__(self, labels: Tensor, frame: RowFrame):
        self.ids, self.columns, self.size = labels, frame.shard.columns(labels), frame.shard.size  # [N], global ids
        self.temperature = frame.temperature
        # The powers of the totals that both softmaxes need (`LogSums`). The last one is that of T = 1.
        self.powers: tuple[float, ...] = (1.0,) if frame.temperature == 1 else (1.0, frame.temperature)
        # Per row: the label's logit; the logsumexp at T = 1; and, set by `logprob`, the probability at T of all others.
        self.logit, self.lse, self.others = (frame.empty() for _ in range(3))

    def picked(self, rows: slice) -> Picked:
        return self.logit, self.columns[rows]

    def collect(self, rows: slice, u: Tensor) -> None:
        """Stores the labels' logits of these rows from u [n, width]; 0 where another rank holds the label."""
        columns = self.columns[rows, None]
        self.logit[rows] = torch.where(columns < self.size, u.gather(1, columns), 0)[:, 0]

    def cross_entropy(self, rows: slice, lse: Tensor) -> Tensor:
        """[n], from the logsumexp [n] over the whole vocabulary of the logits that are not divided by T."""
        self.lse[rows] = lse
        return lse - self.logit[rows] * self.temperature

    def logprob(self, rows: slice, others: Tensor) -> Tensor:
        """The label's log-probability at T, [n], from the logsumexp [n] of u over all other columns.

        Computed from the other columns, so that it keeps its digits where q(label) is close to 1; so does 1 − q(label).
        """
        self.others[rows] = (others - self.logit[rows]).sigmoid()
        return logsigmoid(self.logit[rows] - others)

    def subtract(self, rows: slice, gradient: Tensor, weight: Tensor) -> Tensor:
        """Subtracts `weight` [n] from the label's column of `gradient` [n, width], in place, and returns it.

        A label that another rank holds changes a dummy column only.
        """
        return gradient.scatter_add_(1, self.columns[rows, None], -weight[:, None])


class LabelGradient:
    """The label's part of a chunk's gradient.

        cross-entropy at T = 1           ce · (softmax(z) − 1[label])
        label's log-probability at T     logprob_grad · (1[label] − softmax(z/T)) / T

    Terms with the softmax at T, which KD computes anyway, are added by the caller: their weight is `shared` [n]. A
    cross-entropy at T ≠ 1 needs a softmax of its own, computed here before the chunk is overwritten.

    `logprob_grad` may be as large as 1/(1 − q). Therefore 1 − q(label) is taken from `LabelTerm.others` instead of from
    the softmax, where rounding has lost it when q is close to 1. Rows with a `logprob_grad` have no KD.
    """

    def __init__(
        self,
        term: LabelTerm | None,
        rows: slice,
        u: Tensor,
        ce: Tensor | None,
        buffers: Buffers,
        logprob_grad: Tensor | None = None,
    ):
        self.term, self.rows, self._logprob_grad = term, rows, logprob_grad
        self.shared = u.new_zeros(u.shape[0])
        # Of a cross-entropy at T ≠ 1: its weight [n], and weight · softmax(z) [n, width].
        self._apart: tuple[Tensor, Tensor] | None = None
        if term is None:
            return
        if logprob_grad is not None:
            self.shared = logprob_grad.to(u.dtype) * (-1 / term.temperature)
        if ce is not None and term.temperature == 1:
            self.shared = self.shared + ce.to(u.dtype)
        elif ce is not None:
            weight = ce.to(u.dtype)
            logits = torch.mul(u, term.temperature, out=buffers.buffer("label", u.shape[0]))
            self._apart = weight, logits.sub_(term.lse[rows, None]).exp_().mul_(weight[:, None])

    def add_to(self, gradient: Tensor) -> Tensor:
        """Adds the label terms to `gradient` [n, width], in place, which has shared · softmax(z/T) already."""
        if self.term is None:
            return gradient
        self.term.subtract(self.rows, gradient, self.shared)
        if self._logprob_grad is not None:
            columns = self.term.columns[self.rows, None]
            exact = self.shared * -self.term.others[self.rows]
            exact = torch.where(self._logprob_grad != 0, exact, gradient.gather(1, columns)[:, 0])
            gradient.scatter_(1, columns, exact[:, None])
        if self._apart is not None:
            weight, softmax = self._apart
            self.term.subtract(self.rows, gradient.add_(softmax), weight)
        return gradient


def given(grads: Sequence[Tensor | None], number: int) -> Tensor | None:
    """The gradient of the value with this number; None if there is none, or there are fewer values."""
    return grads[number] if number < len(grads) else None


def weight_of(grads: Sequence[Tensor | None], number: int, u: Tensor) -> Tensor:
    """As `given`, [n] in the dtype of the chunk u; zeros for None."""
    grad = given(grads, number)
    return u.new_zeros(u.shape[0]) if grad is None else grad.to(u.dtype)


class LabelRows(RowFunction):
    """log q(target) per row and, on request, the entropy of q, for q at temperature T.

    ∂ log q(t)/∂u_v = 1[v = t] − q_v        ∂ entropy/∂u_v = −q_v·(log q_v + entropy)
    """

    def __init__(self, frame: RowFrame, targets: Tensor, *, entropy: bool):
        self.shard, self.temperature, self.with_entropy = frame.shard, frame.temperature, entropy
        self.centre = frame.centre()
        self.label = LabelTerm(targets, frame._replace(temperature=1.0))  # of the logits that the pass reads
        self.sums = LogSums(self.centre, whole=True, weighted=entropy)
        self.lse = frame.empty()
        self.entropy = frame.empty() if entropy else frame.like.new_empty(0)
        self.values = [frame.empty() for _ in range(1 + entropy)]

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        self.label.collect(rows, u)
        exponentials = self.sums.add(rows, u, buffers.buffer("work", u.shape[0]))
        if self.with_entropy:
            self.sums.weigh(rows, exponentials, u)

    def complete(self, rows: slice) -> None:
        all_reduce_sums(self.shard, rows, [self.sums], [self.label.picked(rows)])
        self.lse[rows] = self.sums.log(rows)
        self.values[0][rows] = self.label.logit[rows] - self.lse[rows]
        if self.with_entropy:
            self.entropy[rows] = (self.lse[rows] - self.sums.mean(rows)).clamp_min(0)
            self.values[1][rows] = self.entropy[rows]

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        label, entropy = (weight_of(grads, number, u) / self.temperature for number in (0, 1))
        log_q = u.sub_(self.lse[rows, None])
        if self.with_entropy:
            q = torch.exp(log_q, out=buffers.buffer("work", u.shape[0]))
            gradient = log_q.add_(self.entropy[rows, None]).mul_(q).mul_(-entropy[:, None])
            gradient.addcmul_(q, -label[:, None])
        else:
            gradient = log_q.exp_().mul_(-label[:, None])
        return self.label.subtract(rows, gradient, -label)


class TeacherRows(RowFunction):
    """Per row T²·D and, with labels, the cross-entropy; as constants both sides' mass in the compared columns."""

    def __init__(self, frame: RowFrame, labels: Tensor | None, centre: Centre | None = None):
        """
        Args:
            centre: of the student's logits, if another row function loads and centres them.
        """
        self.shard, self.temperature = frame.shard, frame.temperature
        self.label = None if labels is None else LabelTerm(labels, frame)
        self.powers = (1.0,) if self.label is None else self.label.powers
        self.centre = centre or frame.centre()
        self.values = [frame.empty() for _ in range(1 + (labels is not None))]
        self.constants = [frame.like.new_ones(frame.num_rows) for _ in range(2)]

    def all_reduce(self, rows: slice, sums: Sequence[LogSums], picked: Sequence[Picked] = ()) -> None:
        label = [] if self.label is None else [self.label.picked(rows)]
        all_reduce_sums(self.shard, rows, sums, [*picked, *label])


class DenseRows(TeacherRows):
    """Against a teacher whose whole distribution is known.

        ∂D/∂u_v = slope_v − q_v · H,   H = Σ_w slope_w

    The two plain KLs need a single pass, because log(p/q) is linear in the logits. With x the logits of the leading side
    (the teacher's for forward KL, the student's for reverse KL), y the other side's, and e_v = exp(x_v − m):

        D = Σ_v softmax(x)_v · (x_v − lse_x − y_v + lse_y) = Σ_v e_v·(x_v − y_v) / Σ_v e_v − lse_x + lse_y

    and H is known: −1 for forward KL, D + 1 for reverse KL. All other divergences need both normalisers before they can
    compare, hence a second pass and a third collective.
    """

    def __init__(self, frame: RowFrame, teacher: DenseTeacher, divergence: Divergence, labels: Tensor | None):
        super().__init__(frame, labels)
        self.divergence, self.teacher, self.lender = divergence, teacher, teacher
        self.teacher_centre = frame.centre()
        leads, centre, other = divergence.leads, self.centre, self.teacher_centre
        self.student_sums = LogSums(centre, whole=True, powers=self.powers, weighted=leads == "student", against=other)
        self.teacher_sums = LogSums(other, whole=True, weighted=leads == "teacher", against=centre)
        self.student_lse, self.teacher_lse, self.slope_sum = (frame.empty() for _ in range(3))

    @property
    def passes(self) -> list[Pass]:
        if self.divergence.leads:
            return [(self.collect, self._complete_kl)]
        return [(self.collect, self.complete), (self._collect_terms, self._complete_terms)]

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        w = self.teacher.load(rows, buffers, self.teacher_centre, first=True)
        if self.label is not None:
            self.label.collect(rows, u)
        work = buffers.buffer("work", u.shape[0])
        for sums, x, y in ((self.student_sums, u, w), (self.teacher_sums, w, u)):
            exponentials = sums.add(rows, x, work)
            if sums.weighted is not None:
                sums.weigh(rows, exponentials, x - y)

    def complete(self, rows: slice) -> None:
        self.all_reduce(rows, [self.student_sums, self.teacher_sums])
        self.student_lse[rows] = self.student_sums.log(rows)
        self.teacher_lse[rows] = self.teacher_sums.log(rows)
        if self.label is not None:
            self.values[1][rows] = self.label.cross_entropy(rows, self.student_sums.log(rows, self.powers[-1]))

    def _complete_kl(self, rows: slice) -> None:
        # One pass is enough: D from the weighted mean of the leading side, H in closed form.
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
        # Second pass: this rank's parts of D = Σ f(p, q) and of H.
        p, q = self._distributions(rows, u, buffers, out=buffers.buffer("work", u.shape[0]))
        self.values[0][rows] = row_sum(self.divergence.value(p, q))
        self.slope_sum[rows] = row_sum(self.divergence.slope(p, q))

    def _complete_terms(self, rows: slice) -> None:
        self.shard.sum_(self.values[0][rows], self.slope_sum[rows])
        # A NaN must reach the gradient, too: the sign in TVD's slope would hide it.
        self.slope_sum[rows].masked_fill_(self.values[0][rows].isnan(), torch.nan)
        self._set_value(rows, self.values[0][rows])

    def _set_value(self, rows: slice, divergence: Tensor) -> None:
        # Below 0 there is only rounding. NaN stays.
        self.values[0][rows] = self.temperature**2 * divergence.clamp_min(0)

    def _distributions(
        self, rows: slice, u: Tensor, buffers: Buffers, out: Tensor
    ) -> tuple[Distribution, Distribution]:
        """p and q of a chunk, [n, width]. `out` receives log q and may be u."""
        w = self.teacher.load(rows, buffers, self.teacher_centre, first=False)
        log_q = torch.sub(u, self.student_lse[rows, None], out=out)
        return Distribution(w - self.teacher_lse[rows, None]), Distribution(log_q)

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        label = LabelGradient(self.label, rows, u, given(grads, 1), buffers)
        kd = weight_of(grads, 0, u) * self.temperature
        p, q = self._distributions(rows, u, buffers, out=u)
        gradient = self.divergence.slope(p, q).mul_(kd[:, None])
        gradient.addcmul_(q.prob, (label.shared - kd * self.slope_sum[rows])[:, None])
        return label.add_to(gradient)


class TopKRows(TeacherRows):
    """Against a teacher that is known in k columns per row. S are these columns, R all others.

        D          Σ_{v∈S} f(p_v, q_v)  +  f(p_R, q_R) with `tail="bucket"`: R is one more outcome
        gradient   ∂D/∂u_v = slope_v − q_v·H for v in S,   exp(u_v − lse_R)·(slope_R − q_R·H) for v in R,   H = Σ slopes

    q_R comes from a logsumexp over R, never from 1 − Σ_S q: at q_R = 1e-9 the latter is noise. With a bucket every term is
    balanced (`Divergence.balance`), so that log-probabilities that were rounded to 16 bits on their way cannot make D
    negative. `truncate` leaves R out; `renormalize` conditions both sides on S. An id of −1 is an absent entry: neither
    side has mass there.

    The student's logits at S are summed over the ranks together with the normalisers (k + 1 numbers per row, two
    collectives). After that every rank holds the whole comparison, so every divergence costs one pass.

    With `with_label_logprob` the label's log-probability at T is a third value, of rows whose label is an entry of S.
    """

    def __init__(
        self,
        frame: RowFrame,
        teacher: TopKLogprobs,
        divergence: Divergence,
        tail: Tail,
        labels: Tensor | None,
        *,
        with_label_logprob: bool = False,
        centre: Centre | None = None,
    ):
        super().__init__(frame, labels, centre)
        rest = () if teacher.rest_logprob is None else (teacher.rest_logprob,)
        self.held = (teacher.ids, teacher.logprobs, *rest)
        self.divergence, self.tail = divergence, tail
        self.balance = divergence.balance if tail == "bucket" else 0.0
        self.rest = LogSums(self.centre, whole=False, powers=self.powers)
        self.top = frame.empty(teacher.ids.shape[1])
        # Kept for backward, per row: the logsumexp over all columns, over R, and that q at S is normalised by;
        # slope_R − q_R·H, the common factor of R's columns; and H.
        self.lse, self.rest_lse, self.base, self.rest_factor, self.slope_sum = (frame.empty() for _ in range(5))
        if with_label_logprob:
            self.values.append(frame.empty())

    @property
    def ids(self) -> Tensor:
        """[N, k], in the student's vocabulary."""
        return self.held[0]

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        self.top = self.top.new_empty(0)
        return super().outputs()

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        if self.label is not None:
            self.label.collect(rows, u)
        columns = self.shard.columns(self.ids[rows])
        top = self.rest.add_others(rows, u, columns, buffers.buffer("work", u.shape[0]))
        self.top[rows] = torch.where(columns < self.shard.size, top, 0)  # 0 where another rank has the column

    def complete(self, rows: slice) -> None:
        self.all_reduce(rows, [self.rest], [(self.top, self.shard.columns(self.ids[rows]))])
        top = torch.where(self.ids[rows] < 0, floor_of(self.top.dtype), self.top[rows])
        # Where R is empty or masked, its sums are those of columns at the floor.
        rest_lse = torch.where(self.rest.max[rows] > floor_of(top.dtype), self.rest.log(rows), floor_of(top.dtype))
        lse = _logsumexp(top, rest_lse)
        self.lse[rows], self.rest_lse[rows] = lse, rest_lse
        self.compare(rows, top, lse, rest_lse)
        if self.label is None:
            return
        at_one = lse
        if self.temperature != 1:
            at_one = _logsumexp(top * self.temperature, self.rest.log(rows, self.powers[-1]))
        self.values[1][rows] = self.label.cross_entropy(rows, at_one)
        if len(self.values) > 2:
            label = self.ids[rows] == self.label.ids[rows, None]
            others = _logsumexp(torch.where(label, floor_of(top.dtype), top), rest_lse)
            self.values[2][rows] = self.label.logprob(rows, others)

    def compare(self, rows: slice, top: Tensor, lse: Tensor, rest_lse: Tensor) -> None:
        """Sets T²·D, both sides' mass in S, and what backward needs, for these rows.

        Args:
            top: [n, k], the student's u at S, at the floor for absent entries.
            lse, rest_lse: [n], the logsumexp of u over all columns and over R.
        """
        log_p, log_q = self.teacher_logprobs(rows, top.dtype), top - lse[:, None]
        for mass, logprobs in ((self.constants[0], log_p), (self.constants[1], log_q)):
            mass[rows] = logprobs.exp().sum(1)
        self.base[rows] = lse
        if self.tail == "renormalize":
            self.base[rows] = top.logsumexp(1)
            log_p, log_q = log_p - log_p.logsumexp(1, keepdim=True), top - self.base[rows, None]
        value, slope = self._terms(Distribution(log_p), Distribution(log_q))
        value, slope = value.sum(1), slope.sum(1)
        rest_q = Distribution(rest_lse - lse)
        rest_slope = torch.zeros_like(slope)
        if self.tail == "bucket":
            rest_p = Distribution(self.teacher_rest(rows, log_p))
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
        """Per compared token the divergence's term and its slope, with a bucket balanced by κ·(q − p)."""
        value, slope = self.divergence.value(p, q), self.divergence.slope(p, q)
        if self.balance:
            value, slope = value + self.balance * (q.prob - p.prob), slope + self.balance * q.prob
        return value, slope

    def teacher_logprobs(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """The teacher's log-probabilities of these rows, [n, k] in `dtype`, with the floor instead of −inf."""
        return self.held[1][rows].to(dtype).clamp_min(floor_of(dtype))

    def teacher_rest(self, rows: slice, log_p: Tensor) -> Tensor:
        """log p_R [n], at least the floor: the teacher's `rest_logprob`, or without one what `log_p` [n, k] leaves."""
        if len(self.held) < 3:
            return rest_of(log_p)
        return self.held[2][rows].to(log_p.dtype).clamp_min(floor_of(log_p.dtype))

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        label = LabelGradient(self.label, rows, u, given(grads, 1), buffers, given(grads, 2))
        kd = weight_of(grads, 0, u) * self.temperature
        columns = self.shard.columns(self.ids[rows])
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
        log_p = self.teacher_logprobs(rows, top.dtype)
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
    """Of each row of `top` [n, k] and its entry of `rest` [n]: [n]."""
    return torch.cat([top, rest[:, None]], 1).logsumexp(1)


class SampledRows(TeacherRows):
    """Against a teacher that is known by draws from its distribution (random sampling KD, arXiv 2503.16870).

    With w the weights of a row's ids, each id's share of the draws:

        D          Σ w_v · (log p_v − log q_v)
        gradient   ∂D/∂u_v = q_v − w_v

    Both are linear in w, and the expectation of w_v is the teacher's probability p_v. So D is forward KL in expectation,
    and its gradient is that of forward KL: no column is left out, unlike with a top k. Of the teacher's log-probabilities
    only the sum Σ w log p is needed, which comes with the draws; as it is taken at the same ids as the student's, a student
    that equals the teacher has D = 0 whatever was drawn. D of single rows may be negative, and is not clamped, which would
    bias it. Divergences that are not linear in p have no unbiased estimate of this kind.

    The student's logits at the ids are summed over the ranks together with the normaliser (m + 1 numbers per row, two
    collectives). An id of −1 is an absent entry. A row without draws has the value 0 and no gradient.
    """

    def __init__(self, frame: RowFrame, teacher: SampledTokens, labels: Tensor | None):
        super().__init__(frame, labels)
        self.held, self._mean_logprob = (teacher.ids, teacher.counts), teacher.mean_logprob
        self.sums = LogSums(self.centre, whole=True, powers=self.powers)
        self.drawn = frame.empty(teacher.ids.shape[1])
        # Kept for backward, per row: the logsumexp, and Σ w, which is 1, or 0 without draws; NaN where D is.
        self.lse, self.total = (frame.empty() for _ in range(2))

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        self.drawn, self._mean_logprob = self.drawn.new_empty(0), None
        return super().outputs()

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        if self.label is not None:
            self.label.collect(rows, u)
        columns = self.shard.columns(self.held[0][rows])
        self.drawn[rows] = torch.where(columns < self.shard.size, u.gather(1, columns), 0)
        self.sums.add(rows, u, buffers.buffer("work", u.shape[0]))

    def complete(self, rows: slice) -> None:
        self.all_reduce(rows, [self.sums], [(self.drawn, self.shard.columns(self.held[0][rows]))])
        lse = self.lse[rows] = self.sums.log(rows)
        weights = self._weights(rows, lse.dtype)
        total = (weights.amax(1) > 0).to(lse.dtype)
        value = -(weights * (self.drawn[rows] - lse[:, None])).sum(1)
        if self._mean_logprob is not None:
            value = value + total * self._mean_logprob[rows].to(lse.dtype)
        self.values[0][rows] = self.temperature**2 * value
        self.total[rows] = total.masked_fill(value.isnan(), torch.nan)
        if self.label is not None:
            self.values[1][rows] = self.label.cross_entropy(rows, self.sums.log(rows, self.powers[-1]))

    def _weights(self, rows: slice, dtype: torch.dtype) -> Tensor:
        ids, counts = self.held
        return SampledTokens(ids[rows], counts[rows]).weights(dtype)

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        label = LabelGradient(self.label, rows, u, given(grads, 1), buffers)
        kd = weight_of(grads, 0, u) * self.temperature
        gradient = u.sub_(self.lse[rows, None]).exp_()
        gradient.mul_((kd * self.total[rows] + label.shared)[:, None])
        # Ids are distinct but for absent ones, which meet in a dummy column. So nothing is added up in an order that varies.
        columns = self.shard.columns(self.held[0][rows])
        at_ids = gradient.gather(1, columns).addcmul_(self._weights(rows, u.dtype), kd[:, None], value=-1)
        return label.add_to(gradient.scatter_(1, columns, at_ids))
