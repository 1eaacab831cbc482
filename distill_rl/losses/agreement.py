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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distill_rl.losses.core import checks
from distill_rl.losses.core.autograd import untraced
from distill_rl.losses.core.dense import TeacherChunks
from distill_rl.losses.core.logits.head import HiddenChunks, TeacherLogits
from distill_rl.losses.core.logits.student import Student, StudentHidden, student_of
from distill_rl.losses.core.row_function import Pass, RowFunction
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.core.sparse import TopKRows
from distill_rl.losses.core.streaming import (
    Buffers,
    Centre,
    LogSums,
    RowPlan,
    all_reduce_sums,
    chunks,
    default_chunk,
    row_sum,
)
from distill_rl.losses.core.task import Batch, local_teacher, make_task
from distill_rl.losses.divergence import resolve
from distill_rl.losses.options import KDOptions
from distill_rl.losses.targets import SampledTokens, Teacher, TopKLogprobs

_NUM_VALUES = 6
"""Of a row: top 1, upper and lower bound of the acceptance, the student's entropy, bounds of the teacher's."""


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
    options = KDOptions(
        divergence="tvd", beta=0.0, temperature=temperature, tail="bucket", ignore_index=ignore_index, kd_ratio=1.0,
        chunk_size=chunk_size, validate=validate, backend="eager", reduction="sum", inplace_backward=False,
    )  # fmt: skip
    student, shard, leading = student_of(student_logits, tp_group, "student_logits")
    task = make_task(options, Batch(labels, None, None, num_labels), leading, shard, student.like.device)
    targets = local_teacher(teacher, task)
    assert targets is not None
    assert not isinstance(targets, SampledTokens)
    known = num_labels is not None or isinstance(student_logits, StudentHidden)
    kept = None
    if known or checks.looked_at(validate, student.like):  # otherwise it would wait for a GPU
        task, kept = task.without_ignored()
    if kept is not None:
        targets = targets.select(kept)
    valid = task.reduction.valid
    rows: _TopKAgreement | _DenseAgreement
    if isinstance(targets, TopKLogprobs):
        rows = _TopKAgreement(targets, shard, temperature, student.like)
        valid = valid & (targets.ids[:, 0] >= 0)
    else:
        rows = _DenseAgreement(targets, shard, temperature, task.num_rows, student.like)
    dense = not isinstance(targets, TopKLogprobs)
    computed = isinstance(targets, HiddenChunks)
    size = chunk_size or student.default_chunk(shard.widest, dense=dense, computed=computed)
    plan = RowPlan.of(task.num_rows, size, order=kept)
    weights = [student.like.new_ones(task.num_rows), *[None] * (len(rows.values) - 1)]
    _, values = student.loss(rows, plan, weights)
    # The masses, which are not summed here, come last.
    top1, acceptance, *others = (torch.where(valid, each, 0).sum() for each in values[: len(weights)])
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
    dense = TeacherLogits(teacher)
    pieces = chunks(len(rows), default_chunk(dense.columns, rows.device, computed=dense.computed))
    found = [dense.of(rows[piece], torch.float32).argmax(1) for piece in pieces]
    return torch.cat(found) if found else rows.new_empty(0)


class _TopToken:
    """The most likely token of each row; of equal logits the lowest id, however the vocabulary is sharded."""

    def __init__(self, num_rows: int, centre: Centre, shard: VocabularyShard):
        self._centre, self._shard = centre, shard
        self._best = torch.empty(num_rows, dtype=torch.int64, device=centre.local.device)

    def collect(self, rows: slice, u: Tensor) -> None:
        """Finds the first largest of this rank's centred logits u [n, width]; dummy columns come after all others."""
        self._best[rows] = u.argmax(1) + self._shard.offset

    def negated(self, rows: slice) -> Tensor:
        """[n], minus this rank's token if its logit is the largest of all ranks', otherwise less than minus any id.

        The maximum over the ranks is minus the token. Only after the ranks agree on a common centre, which is the
        largest logit.
        """
        holds = self._centre.local[rows] == self._centre.value[rows]
        return torch.where(holds, -self._best[rows], -self._shard.total)


class _DenseAgreement(RowFunction):
    """Per row the fields of `Agreement`, against a teacher whose whole distribution is known. Has no gradient."""

    def __init__(self, teacher: TeacherChunks, shard: VocabularyShard, temperature: float, num_rows: int, like: Tensor):
        self.teacher, self.shard = teacher, shard
        self.centre, self.teacher_centre = (Centre(num_rows, like, shard, 1 / temperature) for _ in range(2))
        self.sums = [
            LogSums(num_rows, (1.0,), each, whole=True, weighted=True) for each in (self.centre, self.teacher_centre)
        ]
        self.top = [_TopToken(num_rows, each, shard) for each in (self.centre, self.teacher_centre)]
        self.values = [like.new_empty(num_rows) for _ in range(_NUM_VALUES)]

    @property
    def passes(self) -> list[Pass]:
        return [(self.collect, self.complete), (self._collect_overlap, self._complete_overlap)]

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        """Stores both sides' sums of exponentials and most likely tokens of this rank's columns."""
        w = self.teacher.load(rows, buffers, self.teacher_centre, first=True)
        for logits, sums, top in zip((u, w), self.sums, self.top):
            top.collect(rows, logits)
            sums.weigh(rows, sums.add(rows, logits, buffers.buffer("work", u.shape[0])), logits)

    def complete(self, rows: slice) -> None:
        """Sums over the ranks, and compares the most likely tokens."""
        all_reduce_sums(self.shard, rows, self.sums, [])
        student, teacher = (top.negated(rows) for top in self.top)
        self.shard.max_(student, teacher)
        self.values[0][rows] = (student == teacher).to(self.values[0].dtype)
        of_student, of_teacher = (_entropy(sums, rows) for sums in self.sums)
        self.values[3][rows], self.values[4][rows], self.values[5][rows] = of_student, of_teacher, of_teacher

    def _collect_overlap(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        """Second pass over a chunk: stores this rank's part of Σ min(p, q)."""
        w = self.teacher.load(rows, buffers, self.teacher_centre, first=False)
        log_q = torch.sub(u, self.sums[0].log(rows)[:, None], out=buffers.buffer("work", u.shape[0]))
        log_p = torch.sub(w, self.sums[1].log(rows)[:, None], out=buffers.buffer("overlap", u.shape[0]))
        self.values[1][rows] = row_sum(torch.minimum(log_p, log_q, out=log_p).exp_())

    def _complete_overlap(self, rows: slice) -> None:
        self.shard.sum_(self.values[1][rows])
        self.values[2][rows] = self.values[1][rows]
        _bound(self.values, rows)

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        raise NotImplementedError("a measurement, not a loss")


class _TopKAgreement(TopKRows):
    """Per row the fields of `Agreement`, against a teacher that is known in k columns. Has no gradient."""

    def __init__(self, teacher: TopKLogprobs, shard: VocabularyShard, temperature: float, like: Tensor):
        super().__init__(teacher, shard, resolve("tvd", 0.0), temperature, "bucket", None, like)
        self.top_token = _TopToken(teacher.ids.shape[0], self.centre, shard)
        self.values, self.masses = [like.new_empty(teacher.ids.shape[0]) for _ in range(_NUM_VALUES)], []
        self.whole = LogSums(teacher.ids.shape[0], (1.0,), self.centre, whole=True, weighted=True)

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        self.top_token.collect(rows, u)
        self.whole.weigh(rows, self.whole.add(rows, u, buffers.buffer("work", u.shape[0])), u)
        super().collect(rows, u, buffers)

    def _compare(self, rows: slice, top: Tensor, lse: Tensor, rest_lse: Tensor) -> None:
        """Compares the most likely tokens, and sums min(p, q) over the k columns and the rest, for these rows."""
        token = self.top_token.negated(rows)
        self.shard.max_(token)
        self.values[0][rows] = (-token == self.teacher.ids[rows, 0]).to(top.dtype)
        log_p = self._teacher_logprobs(rows, top.dtype)
        shared = torch.minimum(log_p, top - lse[:, None]).exp().sum(1)
        rest = torch.minimum(self._rest_logprob(rows, log_p), rest_lse - lse).exp()
        self.values[1][rows], self.values[2][rows] = shared + rest, shared
        all_reduce_sums(self.shard, rows, [self.whole], [])
        self.values[3][rows] = _entropy(self.whole, rows)
        log_rest = self._rest_logprob(rows, log_p)
        rest = log_rest.exp()
        known = -(log_p.exp() * log_p).sum(1) - rest * log_rest
        others = self.shard.total - (self.teacher.ids[rows] >= 0).sum(1)
        self.values[4][rows], self.values[5][rows] = known, known + rest * others.clamp_min(1).to(rest.dtype).log()
        _bound(self.values, rows)


def _entropy(sums: LogSums, rows: slice) -> Tensor:
    """Nats of the distribution over all columns, [n]: log Σ exp(x) − Σ exp(x)·x / Σ exp(x)."""
    return sums.log(rows) - sums.mean(rows)


def _bound(values: list[Tensor], rows: slice) -> None:
    """Limits the acceptance of these rows to 1, above which there is only rounding. Where it is NaN, so is `top1`."""
    top1, acceptance, low = (value[rows] for value in values[:3])
    for each in (acceptance, low):
        each.clamp_max_(1)
    top1.masked_fill_(acceptance.isnan(), torch.nan)
