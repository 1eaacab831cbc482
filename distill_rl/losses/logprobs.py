"""Log-probabilities of given tokens, from logits that are whole, sharded over the vocabulary, or never made."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from distill_rl.losses.core import checks
from distill_rl.losses.core.checks import Backend
from distill_rl.losses.core.logits import Student, StudentHidden, student_of, untraced
from distill_rl.losses.core.rows import LabelRows
from distill_rl.losses.core.streaming import RowFrame, RowPlan, chunks


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
    checks.positive("temperature", temperature)
    checks.at_least_one("chunk_size", chunk_size)
    checks.backend(backend)
    student, shard, leading = student_of(logits, tp_group, "logits", inplace=inplace_backward, backend=backend)
    targets = checks.rows("target_ids", target_ids, leading)
    frame = RowFrame(student.num_rows, shard, temperature, student.like)
    function = LabelRows(frame, targets, entropy=return_entropy)
    size = chunk_size or student.default_chunk(shard.widest, dense=False, function=function)
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
