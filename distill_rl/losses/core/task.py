"""What `kd_loss` and `fused_linear_kd_loss` share: checked inputs, the computation per row, the reduction to a loss.

inputs ──make_task──► Task ──Task.rows──► RowFunction: T²·D and CE per row ──Task.output──► KDOutput
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distill_rl.losses.core import checks
from distill_rl.losses.core.dense import DenseRows, LogitChunks, TeacherChunks
from distill_rl.losses.core.labels import LabelRows, LabelTerm
from distill_rl.losses.core.logits.head import Head, HiddenChunks
from distill_rl.losses.core.reduce import Reduction
from distill_rl.losses.core.row_function import RowFunction
from distill_rl.losses.core.sampled import SampledRows
from distill_rl.losses.core.shards import VocabularyShard, local_like
from distill_rl.losses.core.sparse import TopKRows
from distill_rl.losses.core.trees import as_tree
from distill_rl.losses.divergence import ForwardKL
from distill_rl.losses.options import KDOptions
from distill_rl.losses.targets import DenseLogits, SampledTokens, Teacher, TeacherHidden, TopKLogprobs

Targets = TopKLogprobs | SampledTokens | TeacherChunks
"""Targets in the form that row functions take."""


@as_tree
@dataclass(frozen=True, slots=True)
class KDOutput:
    """The loss and its parts. Only `loss` is differentiable.

    All fields are reduced in the same way: scalars, or with `reduction="none"` [N] (except `num_tokens`).
    """

    loss: Tensor
    """kd_ratio · KD + (1 − kd_ratio) · CE."""
    kd_loss: Tensor
    """KD, T² included, weighted by the token weights. 0 without a teacher."""
    ce_loss: Tensor | None
    """Cross-entropy at T = 1, weighted by the token weights. None without labels."""
    num_tokens: Tensor
    """int64 scalar: the rows that count."""
    teacher_mass: Tensor
    """The teacher's probability in the compared columns; 1 for a dense teacher and for draws. Token weights do not enter."""
    student_mass: Tensor
    """The student's probability in the same columns."""


@dataclass(frozen=True)
class Batch:
    """The tensors of a call besides logits and targets, as the caller gave them."""

    labels: Tensor | None
    token_weights: Tensor | None
    num_items_in_batch: int | float | Tensor | None
    num_labels: int | None = None


@dataclass(frozen=True)
class Task:
    """One call, checked."""

    options: KDOptions
    shard: VocabularyShard
    num_rows: int
    labels: Tensor | None
    """int64 [N], −1 for ignored rows."""
    reduction: Reduction
    num_labels: int | None
    """Rows that are not ignored, if the caller knows."""

    def without_ignored(self) -> tuple[Task, Tensor | None]:
        """The task without its ignored rows, and the int64 row numbers that remain; (itself, None) if all count.

        Counts the rows, which waits for a GPU, unless the caller has stated their number.
        """
        if self.labels is None or self.num_labels == self.num_rows:
            return self, None
        valid = self.reduction.valid
        kept = (valid.nonzero() if self.num_labels is None else valid.nonzero_static(size=self.num_labels))[:, 0]
        if len(kept) == self.num_rows:
            return self, None
        reduction = self.reduction.select(kept)
        labels = self.labels[kept]
        return replace(self, num_rows=len(kept), reduction=reduction, labels=labels, num_labels=len(kept)), kept

    def rows(self, teacher: Targets | None, like: Tensor) -> RowFunction:
        """The row function of this task: T²·D with or without cross-entropy, or the labels' log-probabilities at T = 1.

        Args:
            teacher: None for cross-entropy alone, of which the log-probabilities are the negative; needs labels.
            like: any tensor with the device and dtype of the arithmetic.
        """
        if teacher is None:
            assert self.labels is not None
            return LabelRows(self.labels, self.shard, like, temperature=1.0, entropy=False)
        options = self.options
        label = None if self.labels is None else LabelTerm(self.labels, self.shard, like, options.temperature)
        divergence = options.resolved()
        if isinstance(teacher, TopKLogprobs):
            return TopKRows(teacher, self.shard, divergence, options.temperature, options.tail, label, like)
        if isinstance(teacher, SampledTokens):
            return SampledRows(teacher, self.shard, options.temperature, label, like)
        return DenseRows(teacher, self.shard, divergence, options.temperature, label, self.num_rows, like)

    def row_weights(self, dtype: torch.dtype, has_teacher: bool) -> tuple[Tensor | None, ...]:
        """∂loss/∂value [N] of each differentiable value of the row function. Only for "sum" and "mean".

        Returns:
            (KD, CE) with a teacher, None for one whose share of the loss is 0; otherwise (log-probability,), which is
            negative, because the cross-entropy is minus the log-probability.
        """
        weights, ratio = self.reduction.row_weights(dtype), self.options.kd_ratio
        ce = weights * (1 - ratio) if ratio < 1 else None
        if not has_teacher:
            assert ce is not None
            return (-ce,)
        return (weights * ratio if ratio > 0 else None, ce)

    def output(self, values: Sequence[Tensor], has_teacher: bool, loss: Tensor | None = None) -> KDOutput:
        """Reduces the row function's values to the result of a loss call. Everything but `loss` is detached.

        Without a teacher, KD and both masses are 0.

        Args:
            values: as the row function returns them, [N] each, differentiable ones first.
            loss: the reduced loss, if it has been computed already; None: computed here from the values.
        """
        if has_teacher:
            kd, *ce, teacher_mass, student_mass = values
        else:  # LabelRows returns log-probabilities
            kd = teacher_mass = student_mass = torch.zeros_like(values[0])
            ce = [-values[0]]
        reduce, ratio = self.reduction, self.options.kd_ratio
        kd_loss = reduce(kd if ratio > 0 else kd.detach())
        ce_loss = reduce(ce[0] if ratio < 1 else ce[0].detach()) if ce else None
        return KDOutput(
            loss=_mix(kd_loss, ce_loss, ratio) if loss is None else loss,
            kd_loss=kd_loss.detach(),
            ce_loss=None if ce_loss is None else ce_loss.detach(),
            num_tokens=reduce.num_tokens,
            teacher_mass=reduce(teacher_mass, weighted=False),
            student_mass=reduce(student_mass, weighted=False),
        )


def _mix(kd_loss: Tensor, ce_loss: Tensor | None, kd_ratio: float) -> Tensor:
    """kd_ratio · kd_loss + (1 − kd_ratio) · ce_loss; just kd_loss without a ce_loss.

    A part with weight 0 is left out, so that an infinite one does not make the loss NaN.
    """
    if kd_ratio == 1 or ce_loss is None:
        return kd_loss
    return ce_loss if kd_ratio == 0 else kd_ratio * kd_loss + (1 - kd_ratio) * ce_loss


def spread(values: Sequence[Tensor], kept: Tensor | None, num_rows: int) -> Sequence[Tensor]:
    """Values [len(kept)] of the rows `kept`, as [num_rows] each with 0 elsewhere. Unchanged if `kept` is None."""
    if kept is None:
        return values
    return [value.new_zeros(num_rows).index_copy(0, kept, value) for value in values]


def make_task(
    options: KDOptions, batch: Batch, leading: torch.Size, shard: VocabularyShard, device: torch.device
) -> Task:
    """Checks labels, weights and counts of a call against its rows, and returns them as a task.

    Args:
        leading: the dimensions of the rows, [N] or [B, S].
        shard: this rank's part of the student's vocabulary.
        device: of the logits.

    Raises:
        ValueError: an argument does not fit, or labels are missing although kd_ratio is below 1.
    """
    checks.count("num_items_in_batch", batch.num_items_in_batch)
    checks.constant("token_weights", batch.token_weights)
    if options.kd_ratio < 1 and batch.labels is None:
        raise ValueError(
            f"labels: needed for the cross-entropy when kd_ratio is below 1; got None and {options.kd_ratio}"
        )
    weights = None
    if batch.token_weights is not None:
        weights = checks.rows("token_weights", batch.token_weights, leading)
    labels = None
    if batch.labels is None:
        valid = torch.ones(leading.numel(), dtype=torch.bool, device=device)
    else:
        labels = checks.rows("labels", batch.labels, leading)
        valid = labels != options.ignore_index
        checks.labels("labels", labels, valid, shard.total, options.ignore_index, options.validate)
        labels = torch.where(valid, labels, -1)
        if batch.num_labels is not None and checks.looked_at(options.validate, labels):
            found = int(valid.sum())
            if found != batch.num_labels:
                raise ValueError(f"num_labels: must be the {found} rows that are not ignored; got {batch.num_labels}")
    reduction = Reduction(options.reduction, valid, weights, batch.num_items_in_batch)
    return Task(options, shard, leading.numel(), labels, reduction, batch.num_labels)


def local_teacher(teacher: Teacher | None, task: Task) -> Targets | None:
    """The targets in the form that row functions take, checked against the student's rows and columns.

    Top-k targets and draws as they are; logits and hidden states as chunks of this rank's columns; None for cross-entropy alone.

    Raises:
        ValueError: no teacher although kd_ratio is above 0, or targets that do not fit.
    """
    options = task.options
    if teacher is None:
        if options.kd_ratio > 0:
            raise ValueError(f"teacher: needed when kd_ratio is above 0; got None and {options.kd_ratio}")
        return None
    if isinstance(teacher, TopKLogprobs):
        checks.top_k(teacher, task.num_rows, task.shard.total, options.temperature, options.validate)
        checks.log_probabilities(teacher, task.reduction.valid, options.validate)
        return teacher
    if isinstance(teacher, SampledTokens):
        if not isinstance(options.resolved(), ForwardKL):
            raise ValueError(f"divergence: must be forward_kl with SampledTokens; got {options.divergence}")
        checks.sampled(teacher, task.num_rows, task.shard.total, options.temperature, options.validate)
        return teacher
    if isinstance(teacher, DenseLogits):
        checks.floating("teacher.logits", teacher.logits, (2, 3))
        logits = local_like(teacher.logits.detach(), task.shard, dim=-1, name="teacher.logits")
        if logits.shape[:-1].numel() != task.num_rows:
            raise ValueError(f"teacher.logits: must have {task.num_rows} rows; got {list(logits.shape)}")
        return LogitChunks(logits.reshape(task.num_rows, task.shard.size))
    if isinstance(teacher, TeacherHidden):
        return _hidden_teacher(teacher, task)
    kinds = "DenseLogits, TopKLogprobs, SampledTokens or TeacherHidden"
    raise ValueError(f"teacher: must be {kinds}; got {type(teacher).__name__}")


def _hidden_teacher(teacher: TeacherHidden, task: Task) -> HiddenChunks:
    """The teacher's logits as chunks computed from its hidden states and this rank's rows of its output layer.

    Raises:
        ValueError: wrong dtypes, shapes that do not fit the student's rows or shard or each other, or a softcap that is
            not positive.
    """
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
