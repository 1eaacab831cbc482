"""Knowledge distillation on student logits, whole or sharded over the vocabulary."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from distill_rl.losses.core import checks
from distill_rl.losses.core.autograd import untraced
from distill_rl.losses.core.logits.head import HiddenChunks
from distill_rl.losses.core.logits.student import Student, StudentHidden, student_of
from distill_rl.losses.core.reduce import ReductionName
from distill_rl.losses.core.streaming import RowPlan
from distill_rl.losses.core.task import Batch, KDOutput, local_teacher, make_task, spread
from distill_rl.losses.kernels import kernels_of
from distill_rl.losses.options import Backend, KDOptions, Tail
from distill_rl.losses.targets import SampledTokens, Teacher, TopKLogprobs


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
    options = KDOptions.of(locals())
    batch = Batch(labels, token_weights, num_items_in_batch, num_labels)
    student, shard, leading = student_of(
        student_logits, tp_group, "student_logits", inplace=inplace_backward, kernels=kernels_of(backend)
    )
    task = make_task(options, batch, leading, shard, student.like.device)
    targets = local_teacher(teacher, task)

    # Ignored rows are left out where their number is known or labels may be read, and always where logits are computed.
    # Otherwise that would only wait for the GPU: all rows are streamed, and the gradient of ignored rows is set to 0.
    known = num_labels is not None or isinstance(student_logits, StudentHidden)
    leave_out = known or checks.looked_at(validate, student.like)
    counted, kept = task.without_ignored() if leave_out else (task, None)
    if kept is not None and targets is not None:
        targets = targets.select(kept)
    mask = None if leave_out or labels is None else task.reduction.valid
    dense = targets is not None and not isinstance(targets, TopKLogprobs | SampledTokens)
    computed = isinstance(targets, HiddenChunks)
    rows = counted.rows(targets, student.like)
    size = chunk_size or student.default_chunk(shard.widest, dense=dense, computed=computed, function=rows)
    plan = RowPlan.of(counted.num_rows, size, order=kept, counts=mask)

    # Per row: T²·D, CE and the compared masses, with a streamed gradient. Then the one reduction.
    if reduction == "none":
        return task.output(spread(student.stream(rows, plan), kept, task.num_rows), teacher is not None)
    loss, values = student.loss(rows, plan, counted.row_weights(student.like.dtype, teacher is not None))
    return counted.output(values, teacher is not None, loss)
