"""What both entries share: the checked arguments, what is computed per row, and the way from rows to a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distill_rl.losses.core import checks
from distill_rl.losses.core.dense import DenseRows, LogitChunks, TeacherChunks
from distill_rl.losses.core.head import Head, HiddenChunks
from distill_rl.losses.core.labels import LabelRows, LabelTerm
from distill_rl.losses.core.reduce import REDUCTIONS, Reduction, ReductionName
from distill_rl.losses.core.shards import VocabularyShard, local_like
from distill_rl.losses.core.sparse import TAILS, Tail, TopKRows
from distill_rl.losses.core.streaming import RowFunction
from distill_rl.losses.core.trees import as_tree
from distill_rl.losses.divergence import resolve
from distill_rl.losses.targets import DenseLogits, Teacher, TeacherHidden, TopKLogprobs


@as_tree
@dataclass(frozen=True, slots=True)
class KDOutput:
    """A loss and what it is made of, all reduced in the same way; all detached except `loss`.

    With `reduction="none"` every field but `num_tokens` is [N], else a scalar.
    """

    loss: Tensor
    """kd_ratio · KD + (1 − kd_ratio) · CE"""
    kd_loss: Tensor
    """KD, T² included, weighted by the token weights; 0 without a teacher"""
    ce_loss: Tensor | None
    """cross-entropy at T = 1, weighted by the token weights; None without labels"""
    num_tokens: Tensor
    """int64 scalar: rows that count"""
    teacher_mass: Tensor
    """the teacher's probability in the columns compared, 1 for a dense teacher; token weights do not enter"""
    student_mass: Tensor
    """the student's probability there"""


@dataclass(frozen=True)
class Task:
    """The arguments that both entries share, checked: what is computed per row, and how rows become a loss."""

    shard: VocabularyShard
    num_rows: int
    reduction: Reduction
    labels: Tensor | None
    kd_ratio: float
    divergence: str
    beta: float
    temperature: float
    tail: Tail

    def compact(self) -> tuple[Task, Tensor | None]:
        """The task without its ignored rows, and the numbers of those that stay; None where all do."""
        if self.labels is None:
            return self, None
        kept = self.reduction.valid.nonzero()[:, 0]
        if len(kept) == self.num_rows:
            return self, None
        reduction = self.reduction.select(kept)
        return replace(self, num_rows=len(kept), reduction=reduction, labels=self.labels[kept]), kept

    def row_weights(self, dtype: torch.dtype, has_teacher: bool) -> tuple[Tensor | None, ...]:
        """Derivatives of the loss with respect to the row function's values, each [N]; None where it does not enter."""
        weights = self.reduction.row_weights(dtype)
        ce = weights * (1 - self.kd_ratio) if self.kd_ratio < 1 else None
        if not has_teacher:
            assert ce is not None
            return (-ce,)
        return (weights * self.kd_ratio if self.kd_ratio > 0 else None, ce)

    def rows(self, teacher: TopKLogprobs | TeacherChunks | None, like: Tensor) -> RowFunction:
        """`like`: any tensor of the device and the dtype of the arithmetic."""
        if teacher is None:
            assert self.labels is not None
            return LabelRows(self.labels, self.shard, like, temperature=1.0, entropy=False)
        label = None if self.labels is None else LabelTerm(self.labels, self.shard, like, self.temperature)
        divergence = resolve(self.divergence, self.beta)
        if isinstance(teacher, TopKLogprobs):
            return TopKRows(teacher, self.shard, divergence, self.temperature, self.tail, label, like)
        return DenseRows(teacher, self.shard, divergence, self.temperature, label, self.num_rows, like)

    def output(self, values: Sequence[Tensor], has_teacher: bool, loss: Tensor | None = None) -> KDOutput:
        """From the row function's values; `loss` where it has been made already."""
        if has_teacher:
            kd, *ce, teacher_mass, student_mass = values
        else:
            kd = teacher_mass = student_mass = torch.zeros_like(values[0])
            ce = [-values[0]]
        reduce = self.reduction
        kd_loss = reduce(kd if self.kd_ratio > 0 else kd.detach())
        ce_loss = reduce(ce[0] if self.kd_ratio < 1 else ce[0].detach()) if ce else None
        if loss is None:
            loss = _mix(kd_loss, ce_loss, self.kd_ratio)
        return KDOutput(
            loss=loss,
            kd_loss=kd_loss.detach(),
            ce_loss=None if ce_loss is None else ce_loss.detach(),
            num_tokens=reduce.num_tokens,
            teacher_mass=reduce(teacher_mass, weighted=False),
            student_mass=reduce(student_mass, weighted=False),
        )


def spread(values: Sequence[Tensor], kept: Tensor | None, num_rows: int) -> Sequence[Tensor]:
    """Values of the rows with these numbers as [num_rows] each, 0 elsewhere; as they are where all rows were kept."""
    if kept is None:
        return values
    return [value.new_zeros(num_rows).index_copy(0, kept, value) for value in values]


def _mix(kd_loss: Tensor, ce_loss: Tensor | None, kd_ratio: float) -> Tensor:
    if kd_ratio == 1 or ce_loss is None:
        return kd_loss
    return ce_loss if kd_ratio == 0 else kd_ratio * kd_loss + (1 - kd_ratio) * ce_loss


def check_settings(
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    tail: str = "bucket",
    kd_ratio: float = 1.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
    **others: object,
) -> None:
    """What needs no batch to be checked; `others` are settings of which any value will do."""
    checks.positive("temperature", temperature)
    checks.one_of("tail", tail, TAILS)
    checks.one_of("reduction", reduction, REDUCTIONS)
    checks.in_unit_interval("kd_ratio", kd_ratio)
    checks.chunk_size(chunk_size)
    resolve(divergence, beta)


def make_task(
    leading: torch.Size,
    shard: VocabularyShard,
    *,
    labels: Tensor | None,
    divergence: str,
    beta: float,
    temperature: float,
    tail: Tail,
    kd_ratio: float,
    token_weights: Tensor | None,
    ignore_index: int,
    reduction: ReductionName,
    num_items_in_batch: int | float | Tensor | None,
    device: torch.device,
    validate: bool | None,
) -> Task:
    """Check what both entries share. `leading`: the dimensions of the rows, [N] or [B, S]."""
    check_settings(
        divergence=divergence, beta=beta, temperature=temperature, tail=tail, kd_ratio=kd_ratio, reduction=reduction
    )
    checks.count("num_items_in_batch", num_items_in_batch)
    checks.constant("token_weights", token_weights)
    if kd_ratio < 1 and labels is None:
        raise ValueError(f"labels: needed for the cross-entropy when kd_ratio is below 1; got None and {kd_ratio}")
    weights = None if token_weights is None else checks.rows("token_weights", token_weights, leading)
    num_rows, flat = leading.numel(), None
    if labels is None:
        valid = torch.ones(num_rows, dtype=torch.bool, device=device)
    else:
        flat = checks.rows("labels", labels, leading)
        valid = flat != ignore_index
        checks.labels("labels", flat, valid, shard.total, ignore_index, validate)
        flat = torch.where(valid, flat, -1)
    return Task(
        shard, num_rows, Reduction(reduction, valid, weights, num_items_in_batch), flat, kd_ratio, divergence, beta,
        temperature, tail,
    )  # fmt: skip


def local_teacher(teacher: Teacher | None, task: Task, validate: bool | None) -> TopKLogprobs | TeacherChunks | None:
    """The targets as the row functions take them, checked against the student's rows and columns."""
    if teacher is None:
        if task.kd_ratio > 0:
            raise ValueError(f"teacher: needed when kd_ratio is above 0; got None and {task.kd_ratio}")
        return None
    if isinstance(teacher, TopKLogprobs):
        checks.top_k(teacher, task.num_rows, task.shard.total, task.temperature, validate)
        return teacher
    if isinstance(teacher, DenseLogits):
        checks.floating("teacher.logits", teacher.logits, (2, 3))
        logits = local_like(teacher.logits.detach(), task.shard, dim=-1, name="teacher.logits")
        if logits.shape[:-1].numel() != task.num_rows:
            raise ValueError(f"teacher.logits: must have {task.num_rows} rows; got {list(logits.shape)}")
        return LogitChunks(logits.reshape(task.num_rows, task.shard.size))
    if isinstance(teacher, TeacherHidden):
        return _hidden_teacher(teacher, task)
    raise ValueError(f"teacher: must be DenseLogits, TopKLogprobs or TeacherHidden; got {type(teacher).__name__}")


def _hidden_teacher(teacher: TeacherHidden, task: Task) -> HiddenChunks:
    checks.floating("teacher.hidden", teacher.hidden, (2, 3))
    checks.floating("teacher.lm_head_weight", teacher.lm_head_weight, (2,))
    weight = local_like(teacher.lm_head_weight.detach(), task.shard, dim=0, name="teacher.lm_head_weight")
    hidden = teacher.hidden.detach()
    if hidden.shape[:-1].numel() != task.num_rows or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"teacher.hidden: must have {task.num_rows} rows of {weight.shape[1]}, the width of its lm_head_weight; "
            f"got {list(hidden.shape)}"
        )
    if teacher.softcap is not None:
        checks.positive("teacher.softcap", teacher.softcap)
    bias = teacher.bias
    if bias is not None:
        bias = local_like(bias.detach(), task.shard, dim=0, name="teacher.bias")
    head = Head(weight, bias, softcap=teacher.softcap, scale=teacher.logit_scale)
    return HiddenChunks(hidden.reshape(task.num_rows, weight.shape[1]), head)
