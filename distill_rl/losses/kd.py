"""Knowledge distillation and log-probabilities of tokens, on logits that are whole, sharded, or never made."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distill_rl.losses.core import checks
from distill_rl.losses.core.checks import Backend, Tail
from distill_rl.losses.core.logits import (
    DenseTeacher,
    Head,
    Student,
    StudentHidden,
    StudentLogits,
    as_tree,
    student_of,
    untraced,
)
from distill_rl.losses.core.rows import (
    DenseRows,
    LabelRows,
    RowFrame,
    RowFunction,
    RowPlan,
    SampledRows,
    TopKRows,
    chunks,
)
from distill_rl.losses.core.shards import VocabularyShard, local_like
from distill_rl.losses.divergence import Divergence, ForwardKL, resolve
from distill_rl.losses.targets import DenseLogits, SampledTokens, Teacher, TeacherHidden, TopKLogprobs

ReductionName = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[ReductionName, ...] = ("mean", "sum", "none")
Targets = TopKLogprobs | SampledTokens | DenseTeacher
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
    """KD, T² included (applied per row, in `core/rows.py`), weighted by the token weights. 0 without a teacher."""
    ce_loss: Tensor | None
    """Cross-entropy at T = 1, weighted by the token weights. None without labels."""
    num_tokens: Tensor
    """int64 scalar: the rows that count."""
    teacher_mass: Tensor
    """The teacher's probability in the compared columns; 1 for a dense teacher and for draws. Token weights do not enter."""
    student_mass: Tensor
    """The student's probability in the same columns."""


class KDSettings(TypedDict, total=False):
    """The keywords of `kd_loss` that belong to no batch."""

    divergence: str
    beta: float
    temperature: float
    tail: Tail
    kd_ratio: float
    ignore_index: int
    reduction: ReductionName
    tp_group: ProcessGroup | None
    chunk_size: int | None
    inplace_backward: bool
    validate: bool | None
    backend: Backend | None


class KDKeywords(KDSettings, total=False):
    """All keywords of `kd_loss`."""

    labels: Tensor | None
    token_weights: Tensor | None
    num_items_in_batch: int | float | Tensor | None
    num_labels: int | None


@untraced
def kd_loss(
    student_logits: Student,
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
    num_labels: int | None = None,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    inplace_backward: bool = False,
    validate: bool | None = None,
    backend: Backend | None = None,
) -> KDOutput:
    """kd_ratio · T²·D(teacher, student) + (1 − kd_ratio) · CE, with the exact gradient on every rank's columns.

    Extra memory is the gradient, in the logits' dtype, and a few chunks; two collectives forward (three for the
    divergences other than the KLs on dense logits), none backward. StudentHidden: see `fused_linear_kd_loss`.

    Args:
        student_logits: [N, V] or [B, S, V] in any float dtype, before temperature. Sharded over the vocabulary either
            as a DTensor Shard(-1) (group and offset are its own, shards may be uneven or empty) or as a plain shard
            with `tp_group` (equal shards in rank order). Masked columns are −inf in student and teacher. Or
            StudentHidden, whose logits are made a chunk at a time.
        teacher: the targets for the same rows; None for cross-entropy alone (`kd_ratio` 0).
        labels: int [N] or [B, S], already shifted. Rows with `ignore_index` contribute nothing; without labels every
            row counts.
        divergence: forward_kl, reverse_kl, jsd, skewed_forward_kl, skewed_reverse_kl or tvd; with SampledTokens
            forward_kl only.
        beta: of jsd; the skew α of the skewed KLs.
        temperature: of both sides' softmax; D is scaled by its square (arXiv 1503.02531). CE is always at 1.
        tail: for TopKLogprobs. `bucket`: the columns outside the k are one more outcome; `truncate`: a plain sum over
            the k columns, which may be negative; `renormalize`: both sides conditioned on the k columns.
        kd_ratio: share of KD. Below 1 labels are needed.
        token_weights: [N] or [B, S], constants, on KD and CE alike.
        reduction: sum, mean or none (one number per row).
        num_items_in_batch: denominator of a mean instead of the valid rows: the count over the whole global batch.
        num_labels: number of rows that are not ignored, if the caller knows it. On a GPU these are then left out without
            waiting for it.
        chunk_size: rows processed at a time; the default suits the device's caches. On a CPU it changes no bit of the
            gradient.
        inplace_backward: write the gradient over the logits. Only if nothing reads them after the backward pass.
        validate: check ids, labels and that top-k targets are log-probabilities, and skip ignored rows. None: on CPU
            tensors only, because it waits for a GPU.
        backend: eager (torch) or triton (kernels, `kernels/rows.py`). None: triton where it is installed, on a GPU, for
            what it has kernels for.

    Returns:
        The loss and its parts, of which only `loss` is differentiable; scalars, or [N] with `reduction="none"` (N = B·S
        for [B, S, V]).

    Raises:
        ValueError: naming the argument, the rule and the value.
        RuntimeError: a second backward with `inplace_backward`.
    """
    comparison = _checked(divergence, beta, temperature, tail, kd_ratio, reduction, chunk_size, backend)
    student, shard, leading = student_of(
        student_logits, tp_group, "student_logits", inplace=inplace_backward, backend=backend
    )
    if kd_ratio < 1 and labels is None:
        raise ValueError(f"labels: needed for the cross-entropy when kd_ratio is below 1; got None and {kd_ratio}")
    rows = counted_rows(
        student, leading, labels, ignore_index=ignore_index, num_labels=num_labels, validate=validate,
        reduction=reduction, token_weights=token_weights, num_items_in_batch=num_items_in_batch,
    )  # fmt: skip
    if teacher is None and kd_ratio > 0:
        raise ValueError(f"teacher: needed when kd_ratio is above 0; got None and {kd_ratio}")
    if isinstance(teacher, SampledTokens) and not isinstance(comparison, ForwardKL):
        raise ValueError(f"divergence: must be forward_kl with SampledTokens; got {divergence}")
    targets = None if teacher is None else local_teacher(teacher, rows, shard, temperature, validate)
    counted, targets, kept, counts = rows.streamed(student, targets, validate)

    # Per row: T²·D, CE and the compared masses, with a streamed gradient. Then the one reduction.
    frame = RowFrame(counted.num_rows, shard, temperature, student.like)
    function = _row_function(frame, targets, counted.labels, comparison, tail)
    dense, computed = isinstance(targets, DenseTeacher), isinstance(targets, DenseTeacher) and targets.computed
    size = chunk_size or student.default_chunk(shard.widest, dense=dense, computed=computed, function=function)
    plan = RowPlan([*chunks(counted.num_rows, size)], kept, counts)
    if reduction == "none":
        values: Sequence[Tensor] = student.stream(function, plan)
        if kept is not None:
            values = [value.new_zeros(rows.num_rows).index_copy(0, kept, value) for value in values]
        return _output(rows, values, kd_ratio, targets)
    loss, values = student.loss(function, plan, _row_weights(counted, student.like.dtype, kd_ratio, targets))
    return _output(counted, values, kd_ratio, targets, loss)


def fused_linear_kd_loss(
    student_hidden: Tensor,
    lm_head_weight: Tensor,
    teacher: Teacher | None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    **keywords: Unpack[KDKeywords],
) -> KDOutput:
    """`kd_loss` of softcap(logit_scale · student_hidden · lm_head_weightᵀ + bias), logits that never exist as a whole.

    The same as `kd_loss(StudentHidden(student_hidden, lm_head_weight, …), …)`. Ignored rows are dropped before the output
    layer (which waits for a GPU once, unless `num_labels` is given). Logits are accumulated in fp32 whatever the dtypes.
    Extra memory: the inputs' gradients, the weight's in fp32 until it is complete, and a chunk of logits, independent of
    N·V. For "sum" and "mean" the gradients are computed during forward, and wait for the factor that backward brings.
    Those of fp16 inputs wait in fp32, where no mean over many tokens is too small for them, which takes 2 bytes more for
    every element of hidden states, weight and bias until backward; those of other dtypes wait in that dtype. With
    shards there are collectives for every chunk, and one sums the gradient of the hidden states.

    Args:
        student_hidden, lm_head_weight, bias, softcap, logit_scale: as in `StudentHidden`.
        teacher: TeacherHidden has its own output layer and hidden size, sharded as the student's.
        keywords: those of `kd_loss`. `inplace_backward` has no effect, since there are no logits to overwrite; ignored rows
            are dropped whatever `validate` says; the default `chunk_size` is that of `losses.core.logits.computed_chunk`.

    Raises:
        ValueError: naming the argument, the rule and the value; also for a sharded DTensor weight of which nothing says
            that its ranks work on the same rows, as after FSDP.
    """
    return kd_loss(StudentHidden(student_hidden, lm_head_weight, bias, softcap, logit_scale), teacher, **keywords)


class KDLoss(nn.Module):
    """Holds the settings of `kd_loss`; the batch comes with the call. It has no parameters.

        criterion = KDLoss(divergence="jsd", beta=0.3, temperature=2.0, kd_ratio=0.5)
        criterion(logits, targets, labels).loss.backward()
        criterion(hidden, targets, labels, lm_head_weight=head.weight).loss.backward()   # logits never exist

    Args:
        settings: any keyword of `kd_loss` that is not a tensor of the batch.

    Raises:
        TypeError: a keyword that `kd_loss` does not have, or that belongs to the batch.
        ValueError: a value that `kd_loss` refuses.
    """

    def __init__(self, **settings: Unpack[KDSettings]):
        super().__init__()
        allowed = KDSettings.__annotations__.keys()
        if unknown := settings.keys() - allowed:
            known = ", ".join(sorted(allowed))
            raise TypeError(f"KDLoss has no setting {', '.join(sorted(unknown))}; there are {known}")
        defaults = {name: parameter.default for name, parameter in inspect.signature(kd_loss).parameters.items()}
        values: dict[str, Any] = defaults | settings
        _checked(**{name: values[name] for name in inspect.signature(_checked).parameters})
        self.settings = settings

    @untraced
    def forward(
        self,
        student: Tensor,
        teacher: Teacher | Tensor | None,
        labels: Tensor | None = None,
        *,
        token_weights: Tensor | None = None,
        num_items_in_batch: int | float | Tensor | None = None,
        num_labels: int | None = None,
        lm_head_weight: Tensor | None = None,
        bias: Tensor | None = None,
        softcap: float | None = None,
        tp_group: ProcessGroup | None = None,
    ) -> KDOutput:
        """`kd_loss` of a batch with the module's settings, or `fused_linear_kd_loss` if `lm_head_weight` is given.

        Args:
            student: logits, or hidden states if `lm_head_weight` is given.
            teacher: targets; or a tensor of logits, as `DenseLogits` takes them.
            bias, softcap: of the student's output layer, only with `lm_head_weight`.
            tp_group: overrides that of the settings.

        Raises:
            ValueError: `bias` or `softcap` without `lm_head_weight`, or whatever the loss refuses.
        """
        if lm_head_weight is None and (bias is not None or softcap is not None):
            raise ValueError("bias, softcap: belong to lm_head_weight, which is None")
        return kd_loss(
            student if lm_head_weight is None else StudentHidden(student, lm_head_weight, bias, softcap),
            DenseLogits(teacher) if isinstance(teacher, Tensor) else teacher,
            labels=labels,
            token_weights=token_weights,
            num_items_in_batch=num_items_in_batch,
            num_labels=num_labels,
            **(self.settings if tp_group is None else {**self.settings, "tp_group": tp_group}),
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


@untraced
def vocab_parallel_logprobs(
    logits: Student,
    target_ids: Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    inplace_backward: bool = False,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at the targets, and on request the entropy of that softmax.

    The backward pass streams a gradient in the logits' dtype into one buffer (the idea of SkyRL #1806); two collectives
    forward, none backward. StudentHidden: see `fused_linear_logprobs`.

    Args:
        logits: [N, V] or [B, S, V], sharded as in `kd_loss`.
        target_ids: int, of the logits' leading shape. Targets outside the vocabulary are allowed: their value is
            finite, and the caller masks it.
        tp_group, chunk_size, inplace_backward, backend: as in `kd_loss`.

    Returns:
        fp32 (fp64 for fp64 logits) of the shape of `target_ids`; with `return_entropy` a pair, entropies in nats.

    Raises:
        ValueError: temperature not positive, chunk_size below 1, shapes or shards that do not fit, or
            `inplace_backward` of a leaf.
        RuntimeError: a second backward with `inplace_backward`.
    """
    checks.common(temperature, chunk_size, backend=backend)
    student, shard, leading = student_of(logits, tp_group, "logits", inplace=inplace_backward, backend=backend)
    targets = checks.rows("target_ids", target_ids, leading)
    frame = RowFrame(student.num_rows, shard, temperature, student.like)
    function = LabelRows(frame, targets, entropy=return_entropy)
    size = chunk_size or student.default_chunk(shard.widest, dense=return_entropy, function=function)
    values = student.stream(function, RowPlan([*chunks(student.num_rows, size)]))
    logprobs = values[0].view(target_ids.shape)
    return (logprobs, values[1].view(target_ids.shape)) if return_entropy else logprobs


def fused_linear_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target_ids: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    **keywords: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`vocab_parallel_logprobs` of softcap(logit_scale · hidden · lm_head_weightᵀ + bias), which never exists as a whole.

    Every row is worked on. Backward computes the logits again.

    Args:
        hidden, lm_head_weight, bias, softcap, logit_scale: as in `StudentHidden`.
        keywords: those of `vocab_parallel_logprobs`; `inplace_backward` has no effect.
    """
    student = StudentHidden(hidden, lm_head_weight, bias, softcap, logit_scale)
    return vocab_parallel_logprobs(student, target_ids, **keywords)


def _checked(
    divergence: str,
    beta: float,
    temperature: float,
    tail: str,
    kd_ratio: float,
    reduction: str,
    chunk_size: int | None,
    backend: str | None,
) -> Divergence:
    """The divergence with its β; raises ValueError for a setting outside its range."""
    checks.common(temperature, chunk_size, backend=backend, tail=tail)
    found = resolve(divergence, beta)
    checks.one_of("reduction", reduction, REDUCTIONS)
    if not 0 <= kd_ratio <= 1:
        raise ValueError(f"kd_ratio: must lie in [0, 1]; got {kd_ratio!r}")
    return found


@dataclass(frozen=True)
class CountedRows:
    """Which rows of a call count, and how [N] values become one. Invalid rows count as 0 whatever they hold.

    A mean divides by a number of rows, never by weights: by `num_items_in_batch` if given, the count over the *global*
    batch, so that micro-batches and data-parallel ranks simply add up; otherwise by the valid rows here.
    """

    valid: Tensor  # bool [N]
    labels: Tensor | None  # int64 [N], −1 for ignored rows
    num_labels: int | None  # valid rows, if the caller knows
    weights: Tensor | None  # [N]
    reduction: ReductionName
    num_items_in_batch: int | float | Tensor | None

    @property
    def num_rows(self) -> int:
        return len(self.valid)

    @property
    def num_tokens(self) -> Tensor:
        """int64 scalar, the number of valid rows."""
        return self.valid.sum()

    def streamed(
        self, student: StudentLogits, targets: Targets | None, validate: bool | None
    ) -> tuple[CountedRows, Targets | None, Tensor | None, Tensor | None]:
        """The rows that are streamed, their targets, and `order` and `counts` of their `RowPlan`.

        Ignored rows are left out where their number is known or labels may be read, and always where logits are computed.
        Otherwise that would only wait for the GPU: all rows are streamed, and the gradient of ignored rows is set to 0.
        """
        if self.labels is None or self.num_labels == self.num_rows:
            return self, targets, None, None
        valid, known = self.valid, self.num_labels is not None or student.weight is not None
        if not known and not checks.looked_at(validate, student.like):
            return self, targets, None, valid
        kept = (valid.nonzero() if self.num_labels is None else valid.nonzero_static(size=self.num_labels))[:, 0]
        if len(kept) == self.num_rows:
            return self, targets, None, None
        weights = None if self.weights is None else self.weights[kept]
        rows = replace(self, valid=valid[kept], labels=self.labels[kept], num_labels=len(kept), weights=weights)
        return rows, None if targets is None else targets.select(kept), kept, None

    def factors(self, dtype: torch.dtype) -> Tensor:
        """[N], the factor of each row in a sum or a mean: 0 for invalid rows, otherwise its weight (or 1)."""
        weights = self.valid.to(dtype)
        if self.weights is not None:
            weights = weights * self.weights
        return weights if self.reduction != "mean" else weights / self._denominator()

    def reduce(self, values: Tensor, *, weighted: bool = True) -> Tensor:
        """[N] → a scalar, or [N] for "none". It stays connected to the graph when no row is valid."""
        if weighted and self.weights is not None:
            values = values * self.weights
        values = torch.where(self.valid, values, 0)
        if self.reduction == "none":
            return values
        return values.sum() if self.reduction == "sum" else values.sum() / self._denominator()

    def _denominator(self) -> Tensor | float:
        count = self.num_tokens if self.num_items_in_batch is None else self.num_items_in_batch
        return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


def counted_rows(
    student: StudentLogits,
    leading: torch.Size,
    labels: Tensor | None,
    *,
    ignore_index: int,
    num_labels: int | None,
    validate: bool | None,
    reduction: ReductionName = "sum",
    token_weights: Tensor | None = None,
    num_items_in_batch: int | float | Tensor | None = None,
) -> CountedRows:
    """Checks labels, weights and counts of a call against its rows.

    Args:
        leading: the dimensions of the student's rows, [N] or [B, S].

    Raises:
        ValueError: an argument does not fit.
    """
    checks.count("num_items_in_batch", num_items_in_batch)
    if token_weights is not None:
        if token_weights.requires_grad:
            rule = "are constants and get no gradient"
            raise ValueError(f"token_weights: {rule}; got a tensor that requires one, detach it")
        token_weights = checks.rows("token_weights", token_weights, leading)
    if labels is None:
        valid = torch.ones(leading.numel(), dtype=torch.bool, device=student.inputs.device)
    else:
        labels = checks.rows("labels", labels, leading)
        valid = labels != ignore_index
        checks.labels("labels", labels, valid, student.settings.shard.total, ignore_index, validate)
        labels = torch.where(valid, labels, -1)
        if num_labels is not None and checks.looked_at(validate, labels) and (found := int(valid.sum())) != num_labels:
            raise ValueError(f"num_labels: must be the {found} rows that are not ignored; got {num_labels}")
    return CountedRows(valid, labels, num_labels, token_weights, reduction, num_items_in_batch)


def local_teacher(
    teacher: Teacher, rows: CountedRows, shard: VocabularyShard, temperature: float, validate: bool | None
) -> Targets:
    """The targets in the form that row functions take, checked against the student's rows and columns.

    Raises:
        ValueError: targets that do not fit.
    """
    if isinstance(teacher, TopKLogprobs):
        checks.top_k(teacher, rows.num_rows, shard.total, temperature, validate)
        checks.log_probabilities(teacher, rows.valid, validate)
        return teacher
    if isinstance(teacher, SampledTokens):
        checks.sampled(teacher, rows.num_rows, shard.total, temperature, validate)
        return teacher
    if isinstance(teacher, DenseLogits):
        checks.floating("teacher.logits", teacher.logits, (2, 3))
        logits = local_like(teacher.logits.detach(), shard, dim=-1, name="teacher.logits")
        if logits.shape[:-1].numel() != rows.num_rows:
            raise ValueError(f"teacher.logits: must have {rows.num_rows} rows; got {list(logits.shape)}")
        return DenseTeacher(logits.reshape(rows.num_rows, shard.size))
    if isinstance(teacher, TeacherHidden):
        checks.floating("teacher.hidden", teacher.hidden, (2, 3))
        checks.floating("teacher.lm_head_weight", teacher.lm_head_weight, (2,))
        weight = local_like(teacher.lm_head_weight.detach(), shard, dim=0, name="teacher.lm_head_weight")
        hidden, width = teacher.hidden.detach(), weight.shape[1]
        if hidden.shape[:-1].numel() != rows.num_rows or hidden.shape[-1] != width:
            rule = f"must have {rows.num_rows} rows of {width}, the width of its lm_head_weight"
            raise ValueError(f"teacher.hidden: {rule}; got {list(hidden.shape)}")
        if teacher.softcap is not None:
            checks.positive("teacher.softcap", teacher.softcap)
        bias = teacher.bias
        if bias is not None:
            bias = local_like(bias.detach(), shard, dim=0, name="teacher.bias")
        head = Head(weight, bias, softcap=teacher.softcap, scale=teacher.logit_scale)
        return DenseTeacher(hidden.reshape(rows.num_rows, width), head)
    kinds = "DenseLogits, TopKLogprobs, SampledTokens or TeacherHidden"
    raise ValueError(f"teacher: must be {kinds}; got {type(teacher).__name__}")


def _row_function(
    frame: RowFrame, targets: Targets | None, labels: Tensor | None, divergence: Divergence, tail: Tail
) -> RowFunction:
    """T²·D with or without cross-entropy, or the labels' log-probabilities at T = 1, minus the cross-entropy."""
    if targets is None:
        assert labels is not None
        return LabelRows(frame._replace(temperature=1.0), labels, entropy=False)
    if isinstance(targets, TopKLogprobs):
        return TopKRows(frame, targets, divergence, tail, labels)
    if isinstance(targets, SampledTokens):
        return SampledRows(frame, targets, labels)
    return DenseRows(frame, targets, divergence, labels)


def _row_weights(
    rows: CountedRows, dtype: torch.dtype, kd_ratio: float, targets: Targets | None
) -> tuple[Tensor | None, ...]:
    """∂loss/∂value [N] of each differentiable value of the row function; None for one whose share of the loss is 0."""
    factors = rows.factors(dtype)
    ce = factors * (1 - kd_ratio) if kd_ratio < 1 else None
    if targets is None:
        assert ce is not None
        return (-ce,)
    return (factors * kd_ratio if kd_ratio > 0 else None, ce)


def _output(
    rows: CountedRows, values: Sequence[Tensor], kd_ratio: float, targets: Targets | None, loss: Tensor | None = None
) -> KDOutput:
    """Reduces the row function's values [N]. The loss is computed from them unless it is given."""
    if targets is None:
        kd = teacher_mass = student_mass = torch.zeros_like(values[0])
        ce = [-values[0]]
    else:
        kd, *ce, teacher_mass, student_mass = values
    kd_loss = rows.reduce(kd if kd_ratio > 0 else kd.detach())
    ce_loss = rows.reduce(ce[0] if kd_ratio < 1 else ce[0].detach()) if ce else None
    if loss is None:
        # A part with weight 0 is left out, so that an infinite one does not make the loss NaN.
        loss = kd_loss
        if ce_loss is not None and kd_ratio < 1:
            loss = ce_loss if kd_ratio == 0 else kd_ratio * kd_loss + (1 - kd_ratio) * ce_loss
    return KDOutput(
        loss=loss,
        kd_loss=kd_loss.detach(),
        ce_loss=None if ce_loss is None else ce_loss.detach(),
        num_tokens=rows.num_tokens,
        teacher_mass=rows.reduce(teacher_mass, weighted=False),
        student_mass=rows.reduce(student_mass, weighted=False),
    )
