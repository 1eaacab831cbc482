"""Knowledge distillation on student logits, whole or sharded over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distill_rl.losses import checks
from distill_rl.losses.dense import DenseRows, LogitChunks, TeacherChunks
from distill_rl.losses.divergence import resolve
from distill_rl.losses.labels import LabelRows, LabelTerm
from distill_rl.losses.reduce import REDUCTIONS, Reduction, ReductionName
from distill_rl.losses.shards import VocabularyShard, local_like, split
from distill_rl.losses.sparse import TAILS, Tail, TopKRows
from distill_rl.losses.sweep import RowFunction, StreamedRows, accumulator, default_chunk
from distill_rl.losses.targets import DenseLogits, Teacher, TopKLogprobs


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

    def output(self, values: tuple[Tensor, ...], has_teacher: bool) -> KDOutput:
        """The reduced loss from the row function's values."""
        if has_teacher:
            kd, *ce, teacher_mass, student_mass = values
        else:
            kd = teacher_mass = student_mass = torch.zeros_like(values[0])
            ce = [-values[0]]
        reduce = self.reduction
        kd_loss = reduce(kd if self.kd_ratio > 0 else kd.detach())
        ce_loss = reduce(ce[0] if self.kd_ratio < 1 else ce[0].detach()) if ce else None
        loss = kd_loss if self.kd_ratio == 1 else ce_loss if self.kd_ratio == 0 else None
        if loss is None:
            loss = self.kd_ratio * kd_loss + (1 - self.kd_ratio) * ce_loss
        return KDOutput(
            loss=loss,
            kd_loss=kd_loss.detach(),
            ce_loss=None if ce_loss is None else ce_loss.detach(),
            num_tokens=reduce.num_tokens,
            teacher_mass=reduce(teacher_mass, weighted=False),
            student_mass=reduce(student_mass, weighted=False),
        )


def kd_loss(
    student_logits: Tensor,
    teacher: Teacher | None,
    *,
    labels: Tensor | None = None,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    tail: Tail = "bucket",
    kd_ratio: float = 1.0,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    reduction: ReductionName = "mean",
    num_items_in_batch: int | float | Tensor | None = None,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    inplace_backward: bool = False,
    validate: bool | None = None,
) -> KDOutput:
    """kd_ratio · T²·D(teacher, student) + (1 − kd_ratio) · CE, with the exact gradient on every rank's columns.

    Extra memory is the gradient, in the logits' dtype, and a few chunks; two collectives forward (three for the
    divergences other than the KLs on dense logits), none backward.

    Args:
        student_logits: [N, V] or [B, S, V] in any float dtype, before temperature. Sharded over the vocabulary either as
            a DTensor Shard(-1) (group and offset are its own, shards may be uneven or empty) or as a plain shard with
            `tp_group` (equal shards in rank order). Masked columns are −inf in student and teacher.
        teacher: its targets for the same rows; None for cross-entropy alone (`kd_ratio` 0).
        labels: int [N] or [B, S], already shifted; rows of `ignore_index` contribute nothing. Without labels every row
            counts.
        divergence: forward_kl, reverse_kl, jsd, skewed_forward_kl, skewed_reverse_kl or tvd.
        beta: of jsd; the skew α of the skewed KLs.
        temperature: of both sides' softmax; D is scaled by its square (arXiv 1503.02531). CE is always at 1.
        tail: of TopKLogprobs. `bucket`: the columns outside the k are one more outcome; `truncate`: the plain sum over
            the k columns, which may be negative; `renormalize`: both sides conditioned on the k columns.
        kd_ratio: share of KD; below 1 labels are needed.
        token_weights: [N] or [B, S], on KD and CE alike.
        reduction: sum, mean or none (one number per row).
        num_items_in_batch: what a mean divides by instead of the valid rows: the count over the whole global batch.
        chunk_size: rows worked on at once; the default suits the device's caches. It changes no bit of the gradient on a
            CPU.
        inplace_backward: write the gradient over the logits. Only where nobody reads them after the backward pass.
        validate: look at ids and labels; None means on CPU tensors only, for it makes a GPU wait.

    Raises:
        ValueError: naming the argument, the rule and the value.
        RuntimeError: a second backward with `inplace_backward`.
    """
    checks.floating("student_logits", student_logits, (2, 3))
    local, shard = split(student_logits, tp_group, dim=-1, name="student_logits")
    checks.chunk_size(chunk_size)
    if inplace_backward and local.is_leaf and local.requires_grad:
        raise ValueError(
            "inplace_backward: the logits must be computed from something; got a leaf that needs its values"
        )
    task = make_task(
        local.shape[:-1], shard, labels=labels, divergence=divergence, beta=beta, temperature=temperature, tail=tail,
        kd_ratio=kd_ratio, token_weights=token_weights, ignore_index=ignore_index, reduction=reduction,
        num_items_in_batch=num_items_in_batch, device=local.device, validate=validate,
    )  # fmt: skip
    flat = local.reshape(task.num_rows, shard.size)
    like = flat.new_empty(0, dtype=accumulator(flat.dtype))
    rows = task.rows(local_teacher(teacher, task, validate), like)
    chunk = chunk_size or default_chunk(shard.size, flat.device)
    return task.output(StreamedRows.apply(flat, rows, chunk, inplace_backward), teacher is not None)


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
    checks.positive("temperature", temperature)
    checks.one_of("tail", tail, TAILS)
    checks.one_of("reduction", reduction, REDUCTIONS)
    checks.in_unit_interval("kd_ratio", kd_ratio)
    resolve(divergence, beta)
    if kd_ratio < 1 and labels is None:
        raise ValueError(f"labels: needed for the cross-entropy when kd_ratio is below 1; got None and {kd_ratio}")
    flat, weights = checks.rows("labels", labels, leading), checks.rows("token_weights", token_weights, leading)
    num_rows = leading.numel()
    if flat is None:
        valid = torch.ones(num_rows, dtype=torch.bool, device=device)
    else:
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
    raise ValueError(f"teacher: must be DenseLogits, TopKLogprobs or TeacherHidden; got {type(teacher).__name__}")
