"""How often student and teacher would write the same token, and how sure they are: what a draft model for speculative
decoding is judged by.

    top1          1 where both sides' most likely tokens are equal; of equal logits the lowest id counts
    acceptance    Σ_v min(p_v, q_v) = 1 − TVD(p, q): the probability that speculative sampling from the teacher p accepts
                  a token that the student q drafted (arXiv 2211.17192)

Against top-k targets the sum over the k columns S is a lower bound of the exact value. With min(p_R, q_R) for all others
as one outcome it is an upper bound, because Σ_R min(p_v, q_v) ≤ min(p_R, q_R). Both approach it as p_R falls. The
teacher's entropy is at least that of S and R as one outcome, and at most p_R·log(V − k) more, which even shares of p_R have.

The logits are streamed as in the losses: no more than a chunk ever exists in the dtype of the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distill_rl.losses.core import checks
from distill_rl.losses.core.logits import DenseTeacher, Student, student_of, untraced
from distill_rl.losses.core.rows import (
    Buffers,
    Centre,
    LogSums,
    Pass,
    RowFrame,
    RowFunction,
    RowPlan,
    TopKRows,
    all_reduce_sums,
    chunks,
    default_chunk,
    row_sum,
)
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.divergence import resolve
from distill_rl.losses.kd import Targets, counted_rows, local_teacher
from distill_rl.losses.targets import SampledTokens, Teacher, TopKLogprobs


@dataclass(frozen=True, slots=True)
class Agreement:
    """Sums over the rows that count, without a gradient. Scalars."""

    top1: Tensor
    """Rows on which both sides have the same most likely token."""
    acceptance: Tensor
    """Σ min(p, q) over the vocabulary, or an upper bound of it for top-k targets, summed over the rows."""
    num_tokens: Tensor
    """int64, the rows."""
    acceptance_low: Tensor
    """A lower bound of it for top-k targets; otherwise `acceptance`."""
    student_entropy: Tensor
    """Nats, at `temperature`."""
    teacher_entropy_low: Tensor
    teacher_entropy_high: Tensor
    """Bounds for top-k targets; otherwise both are the entropy."""


@untraced
@torch.no_grad()
def token_agreement(
    student_logits: Student,
    teacher: Teacher,
    *,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    num_labels: int | None = None,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    validate: bool | None = None,
) -> Agreement:
    """Compares the most likely tokens of both sides, and how much of their probability they share.

    Always computed by torch. Collectives, with a sharded vocabulary: four, as often
    for every chunk if the student's logits are computed here.

    Args:
        temperature: of both sides' softmax for the acceptance; that of the targets for TopKLogprobs.

    The other arguments are those of `kd_loss`. Labels say which rows count; a top-k row whose first id is −1 does not.
    SampledTokens are refused: draws tell neither the most likely token nor any probability.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    if isinstance(teacher, SampledTokens):
        raise ValueError("teacher: must be DenseLogits, TopKLogprobs or TeacherHidden; got SampledTokens")
    checks.common(temperature, chunk_size)
    student, shard, leading = student_of(student_logits, tp_group, "student_logits")
    counted = counted_rows(
        student, leading, labels, ignore_index=ignore_index, num_labels=num_labels, validate=validate
    )
    targets: Targets | None = local_teacher(teacher, counted, shard, temperature, validate)
    counted, targets, kept, _ = counted.streamed(student, targets, validate)
    assert isinstance(targets, TopKLogprobs | DenseTeacher)
    frame, valid = RowFrame(counted.num_rows, shard, temperature, student.like), counted.valid
    rows: RowFunction
    if isinstance(targets, TopKLogprobs):
        rows = _TopKAgreement(frame, targets)
        size = student.default_chunk(shard.widest, dense=False)
        valid = valid & (targets.ids[:, 0] >= 0)
    else:
        rows = _DenseAgreement(frame, targets)
        size = student.default_chunk(shard.widest, dense=True, computed=targets.computed)
    plan = RowPlan([*chunks(counted.num_rows, chunk_size or size)], order=kept)
    _, values = student.loss(rows, plan, [student.like.new_ones(counted.num_rows)])
    top1, acceptance, *others = (torch.where(valid, each, 0).sum() for each in values)
    return Agreement(top1, acceptance, valid.sum(), *others)


def top_tokens(teacher: Teacher, rows: Tensor) -> Tensor:
    """The teacher's most likely token in each of these rows, int64 [n]; of equal logits the lowest id.

    Args:
        teacher: top-k targets; draws, of which it is the one drawn most often; or logits or hidden states over its
            whole vocabulary. N rows.
        rows: int64 [n], row numbers.
    """
    if isinstance(teacher, TopKLogprobs):
        return teacher.ids[rows, 0].long()
    if isinstance(teacher, SampledTokens):
        return teacher.most_drawn()[rows].long()
    dense = DenseTeacher.of_all_columns(teacher)
    pieces = chunks(len(rows), default_chunk(dense.columns, rows.device, computed=dense.computed))
    found = [dense.of(rows[piece], torch.float32).argmax(1) for piece in pieces]
    return torch.cat(found) if found else rows.new_empty(0)


class _OneSide:
    """One side's normaliser and entropy per row, and its most likely token; of equal logits the lowest id."""

    def __init__(self, centre: Centre, shard: VocabularyShard):
        self.centre, self.shard = centre, shard
        self.sums = LogSums(centre, whole=True, weighted=True)
        self._best = torch.empty_like(centre.local, dtype=torch.int64)

    def collect(self, rows: slice, u: Tensor, work: Tensor) -> None:
        self._best[rows] = u.argmax(1) + self.shard.offset  # dummy columns come after all others
        self.sums.weigh(rows, self.sums.add(rows, u, work), u)

    def negated_token(self, rows: slice) -> Tensor:
        """[n], minus this rank's token if its logit is the largest of all ranks', otherwise less than minus any id.

        The maximum over the ranks is minus the token. Only after the ranks agree on a common centre, which is the
        largest logit.
        """
        holds = self.centre.local[rows] == self.centre.value[rows]
        return torch.where(holds, -self._best[rows], -self.shard.total)

    def entropy(self, rows: slice) -> Tensor:
        """Nats of the distribution over all columns, [n]: log Σ exp(x) − Σ exp(x)·x / Σ exp(x)."""
        return self.sums.log(rows) - self.sums.mean(rows)


class _AgreementRows(RowFunction):
    """Per row the fields of `Agreement`. It has no gradient."""

    def make_values(self, frame: RowFrame) -> None:
        self.values, self.constants = [frame.empty() for _ in range(6)], ()
        self.top1, self.acceptance, self.acceptance_low, self.student_entropy, *self.teacher_entropy = self.values

    def bound(self, rows: slice) -> None:
        # Above 1 there is only rounding. Where the acceptance is NaN, so is `top1`.
        self.acceptance[rows].clamp_max_(1)
        self.acceptance_low[rows].clamp_max_(1)
        self.top1[rows].masked_fill_(self.acceptance[rows].isnan(), torch.nan)


class _DenseAgreement(_AgreementRows):
    """Against a teacher whose whole distribution is known."""

    def __init__(self, frame: RowFrame, teacher: DenseTeacher):
        self.make_values(frame)
        self.teacher, self.shard, self.lender = teacher, frame.shard, teacher
        self.centre, self.teacher_centre = frame.centre(), frame.centre()
        self.of_student = _OneSide(self.centre, frame.shard)
        self.of_teacher = _OneSide(self.teacher_centre, frame.shard)

    @property
    def passes(self) -> list[Pass]:
        return [(self.collect, self.complete), (self._collect_overlap, self._complete_overlap)]

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        w, work = self.teacher.load(rows, buffers, self.teacher_centre, first=True), buffers.buffer("work", u.shape[0])
        self.of_student.collect(rows, u, work)
        self.of_teacher.collect(rows, w, work)

    def complete(self, rows: slice) -> None:
        all_reduce_sums(self.shard, rows, [self.of_student.sums, self.of_teacher.sums], [])
        student, teacher = self.of_student.negated_token(rows), self.of_teacher.negated_token(rows)
        self.shard.max_(student, teacher)
        self.top1[rows] = (student == teacher).to(self.top1.dtype)
        self.student_entropy[rows] = self.of_student.entropy(rows)
        for bound in self.teacher_entropy:
            bound[rows] = self.of_teacher.entropy(rows)

    def _collect_overlap(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        # Second pass: this rank's part of Σ min(p, q).
        w = self.teacher.load(rows, buffers, self.teacher_centre, first=False)
        log_q = torch.sub(u, self.of_student.sums.log(rows)[:, None], out=buffers.buffer("work", u.shape[0]))
        log_p = torch.sub(w, self.of_teacher.sums.log(rows)[:, None], out=buffers.buffer("overlap", u.shape[0]))
        self.acceptance[rows] = row_sum(torch.minimum(log_p, log_q, out=log_p).exp_())

    def _complete_overlap(self, rows: slice) -> None:
        self.shard.sum_(self.acceptance[rows])
        self.acceptance_low[rows] = self.acceptance[rows]
        self.bound(rows)


class _TopKAgreement(_AgreementRows, TopKRows):
    """Against a teacher that is known in k columns."""

    def __init__(self, frame: RowFrame, teacher: TopKLogprobs):
        TopKRows.__init__(self, frame, teacher, resolve("tvd", 0.0), "bucket", None, centre=frame.centre())
        self.make_values(frame)
        self.of_student = _OneSide(self.centre, frame.shard)

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        self.of_student.collect(rows, u, buffers.buffer("work", u.shape[0]))
        super().collect(rows, u, buffers)

    def compare(self, rows: slice, top: Tensor, lse: Tensor, rest_lse: Tensor) -> None:
        ids, token = self.ids[rows], self.of_student.negated_token(rows)
        self.shard.max_(token)
        self.top1[rows] = (-token == ids[:, 0]).to(top.dtype)
        # Σ min(p, q) over the k columns, and with the rest as one outcome.
        log_p = self.teacher_logprobs(rows, top.dtype)
        log_rest = self.teacher_rest(rows, log_p)
        shared = torch.minimum(log_p, top - lse[:, None]).exp().sum(1)
        self.acceptance[rows] = shared + torch.minimum(log_rest, rest_lse - lse).exp()
        self.acceptance_low[rows] = shared
        all_reduce_sums(self.shard, rows, [self.of_student.sums], [])
        self.student_entropy[rows] = self.of_student.entropy(rows)
        # The teacher's entropy, with the rest as one outcome, and with even shares of it.
        rest, others = log_rest.exp(), self.shard.total - (ids >= 0).sum(1)
        known = -(log_p.exp() * log_p).sum(1) - rest * log_rest
        low, high = self.teacher_entropy
        low[rows], high[rows] = known, known + rest * others.clamp_min(1).to(rest.dtype).log()
        self.bound(rows)
