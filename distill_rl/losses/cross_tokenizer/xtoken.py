"""The method `xtoken`: the student's distribution projected into the teacher's vocabulary (P-KL of NeMo-RL #2245, arXiv
2605.21699).

With W [V_s, V_t] the row-stochastic projection, q a student row, and S the teacher's top k columns of a chunk:

    Q_t = Σ_s q_s W_st for t in S            Q_rest = Σ_s q_s (1 − Σ_{t∈S} W_st)      (never 1 − Σ Q_t)
    D   = Σ_{t∈S} f(P_t, Q_t) + f(P_rest, Q_rest)

`mean` averages Q over the student's rows of the chunk, and P is the normalised geometric mean of the teacher's rows.
`chain` takes the first row of either side times the probability of the chunk's other tokens; what is missing to one
joins the rest.

Gradient: with g_t = ∂loss/∂Q_t and back = W·g [V_s],

    ∂loss/∂u_v = q_v (back_v − Σ_w q_w back_w),   Σ_w q_w back_w = Σ_t g_t Q_t

Only the columns in any chunk's S are multiplied (`ColumnProduct`); all others share the rest's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distill_rl.losses.core.rows import Buffers, floor_of, given
from distill_rl.losses.cross_tokenizer.chunks import segment_sum
from distill_rl.losses.cross_tokenizer.projection import ColumnProduct
from distill_rl.losses.cross_tokenizer.task import (
    ChunkTask,
    Compared,
    LabelledRows,
    LabelLogprobRows,
    TeacherDistributions,
    Terms,
    complement,
)

_LEAST = {torch.float32: 1e-32, torch.float64: 1e-290}
"""Projected probabilities are clamped to at least this much; below it they have no gradient."""


class ProjectedRows(LabelLogprobRows):
    """Per row the cross-entropy, the label's log-probability and the projected probabilities.

    The last are [M, k + 1]: Q at the columns of the row's chunk, then Q_rest. Only the first `num_first` rows belong to
    a chunk.
    """

    def __init__(self, labelled: LabelledRows, product: ColumnProduct, slots: Tensor, learn: bool):
        """
        Args:
            product: with all teacher columns that any chunk compares.
            slots: int64 [num_first, k], where the row's columns are among those of the product.
            learn: whether W gets a gradient, too.
        """
        super().__init__(labelled, with_label_logprob=labelled.task.settings.chain)
        self.product, self.slots, self.learn = product, slots, learn
        self.projected = self.sums.table = self.lse.new_zeros(len(self.lse), slots.shape[1] + 1)

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values, constants = super().outputs()
        return (*values, self.projected.detach()), constants

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        exponentials = self.add(rows, u, buffers)
        slots = self.slots[rows]
        if not len(slots):
            return
        columns, rest = self.product.project(exponentials)
        self.projected[rows, :-1] = columns.gather(1, slots)
        self.projected[rows, -1] = rest + columns.scatter(1, slots, 0).sum(1)

    def complete(self, rows: slice) -> None:
        super().complete(rows)
        self.projected /= self.sums.totals[1.0][:, None]  # the whole table: this is called once, with all rows

    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        slots, grad = self.slots[rows], given(grads, 2)
        if grad is None or not len(slots):
            return super().gradient(rows, u, grads, buffers)
        label = self.label_gradient(rows, u, grads, buffers)
        q = u.sub_(self.lse[rows, None]).exp_()
        rest = grad[:, -1].contiguous()
        columns = rest[:, None].expand(-1, self.product.width).scatter(1, slots, grad[:, :-1])
        if self.learn:
            self.product.learn(q, columns, rest)
        mean = (grad * self.projected[rows]).sum(1)
        back = self.product.project_back(columns, rest)
        q.mul_(back.div_(self.temperature).add_((label.shared - mean / self.temperature)[:, None]))
        return label.add_to(q)

    def parameter_gradients(self) -> tuple[Tensor, ...]:
        return (self.product.gradient(),)


def xtoken(task: ChunkTask) -> Terms:
    student, chain = task.pairing.student, task.settings.chain
    ids, top, rest = _top_columns(task, TeacherDistributions(task))
    product = ColumnProduct(task.projection, task.shard, ids.unique(), task.dtype)
    slots = product.slots[ids]
    labelled = task.labelled_rows(student.first if chain else student.rows)
    weights = task.projection.values
    learn = weights.requires_grad and torch.is_grad_enabled()
    function = ProjectedRows(labelled, product, slots if chain else slots[student.chunk], learn)
    ce, label_logprobs, projected = labelled.run(function, *([weights] if learn else []))
    q = projected[: labelled.num_first]
    if chain:
        continuation = student.after_first(labelled.of_student_side(label_logprobs))
        q = q * continuation.exp()[:, None]
        q = torch.cat([q[:, :-1], (q[:, -1] - torch.expm1(continuation))[:, None]], 1)
    else:
        q = segment_sum(q / student.length[student.chunk, None], student.length)
    kd, paired = task.settings.temperature**2 * _compare(task, top, rest, q), task.pairing.one_to_one
    masses = top[paired].exp().sum(1), q[paired, :-1].detach().sum(1)
    return Terms(kd, labelled.scatter(ce), task.pairing.count, *masses)


@torch.no_grad()
def _top_columns(task: ChunkTask, teacher: TeacherDistributions) -> tuple[Tensor, Tensor, Tensor]:
    """The teacher's top k columns of every chunk among those that some student token is projected into."""
    # Their ids, int64 [count, k], their log-probabilities [count, k], and the log of the remaining mass [count].
    # The student has no mass in the others, so they count to the rest. With `chain` log-probabilities include the
    # chunk's other tokens, and what is missing to one is in the rest.
    unreachable = (~task.projection.reachable).nonzero()[:, 0]
    k = min(task.settings.top_k, task.projection.num_teacher - len(unreachable))
    count, floor = task.pairing.count, floor_of(task.dtype)
    ids = torch.empty(count, k, dtype=torch.int64, device=task.like.device)
    top, rest = task.like.new_empty(count, k), task.like.new_empty(count)
    for group in task.groups:
        log_p = teacher.of(group)
        ids[group] = log_p.index_fill(1, unreachable, -torch.inf).topk(k, 1).indices
        top[group] = log_p.gather(1, ids[group])
        rest[group] = log_p.scatter_(1, ids[group], floor).logsumexp(1)
    top = (top + teacher.continuation[:, None]).clamp_min(floor)
    return ids, top, torch.logaddexp(rest + teacher.continuation, complement(teacher.continuation)).clamp_min(floor)


def _compare(task: ChunkTask, top: Tensor, rest: Tensor, q: Tensor) -> Tensor:
    """D of every chunk, [count], without the factor T²."""
    tail, divergence = task.settings.tail, task.settings.divergence
    log_q = q.clamp_min(_LEAST[task.dtype]).log()
    if tail != "bucket":
        log_p, log_q = top, log_q[:, :-1]
        if tail == "renormalize":
            log_p, log_q = log_p.log_softmax(1), log_q.log_softmax(1)
        return Compared.apply(log_q, log_p, divergence, tail == "renormalize")
    floor = floor_of(task.dtype)
    apart = q[:, -1] <= 0  # the top k are all columns: there is no rest
    if divergence.needs_support:
        apart = apart | (rest <= floor)
    rest_p, rest_q = (torch.where(apart, floor, side) for side in (rest, log_q[:, -1]))
    log_p, log_q = torch.cat([top, rest_p[:, None]], 1), torch.cat([log_q[:, :-1], rest_q[:, None]], 1)
    return Compared.apply(log_q, log_p, divergence, True)
