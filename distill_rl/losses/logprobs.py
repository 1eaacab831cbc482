"""Log-probabilities of given tokens, from logits that are whole or sharded over the vocabulary."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from distill_rl.losses.core import checks
from distill_rl.losses.core.autograd import untraced
from distill_rl.losses.core.labels import LabelRows
from distill_rl.losses.core.logits.student import Student, student_of
from distill_rl.losses.core.streaming import RowPlan
from distill_rl.losses.kernels import kernels_of
from distill_rl.losses.options import Backend


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
    checks.chunk_size(chunk_size)
    student, shard, leading = student_of(
        logits, tp_group, "logits", inplace=inplace_backward, kernels=kernels_of(backend)
    )
    targets = checks.rows("target_ids", target_ids, leading)
    function = LabelRows(targets, shard, student.like, temperature, return_entropy)
    plan = RowPlan.of(
        student.num_rows, chunk_size or student.default_chunk(shard.widest, dense=False, function=function)
    )
    values = [value.view(target_ids.shape) for value in student.stream(function, plan)]
    return (values[0], values[1]) if return_entropy else values[0]
