"""`kd_loss` and `vocab_parallel_logprobs` of hidden states and an output layer, with every setting as a keyword."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from distill_rl.losses.core.logits.student import StudentHidden
from distill_rl.losses.core.reduce import ReductionName
from distill_rl.losses.core.task import KDOutput
from distill_rl.losses.kd import kd_loss
from distill_rl.losses.logprobs import vocab_parallel_logprobs
from distill_rl.losses.options import Backend, Tail
from distill_rl.losses.targets import Teacher


def fused_linear_kd_loss(
    student_hidden: Tensor,
    lm_head_weight: Tensor,
    teacher: Teacher | None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    labels: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    tail: Tail = "bucket",
    kd_ratio: float = 1.0,
    reduction: ReductionName = "mean",
    num_items_in_batch: int | float | Tensor | None = None,
    num_labels: int | None = None,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    inplace_backward: bool = False,
    validate: bool | None = None,
    backend: Backend | None = None,
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
        inplace_backward: no effect, since there are no logits to overwrite.

    All other arguments, the result and errors are those of `kd_loss`; but ignored rows are dropped whatever `validate`
    says, and the default `chunk_size` is that of `losses.core.logits.linear.default_chunk`.

    Raises:
        ValueError: naming the argument, the rule and the value; also for a sharded DTensor weight of which nothing says
            that its ranks work on the same rows, as after FSDP.
    """
    student = StudentHidden(student_hidden, lm_head_weight, bias, softcap, logit_scale)
    return kd_loss(
        student,
        teacher,
        labels=labels,
        token_weights=token_weights,
        ignore_index=ignore_index,
        divergence=divergence,
        beta=beta,
        temperature=temperature,
        tail=tail,
        kd_ratio=kd_ratio,
        reduction=reduction,
        num_items_in_batch=num_items_in_batch,
        num_labels=num_labels,
        tp_group=tp_group,
        chunk_size=chunk_size,
        validate=validate,
        backend=backend,
    )


def fused_linear_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target_ids: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    return_entropy: bool = False,
    tp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    inplace_backward: bool = False,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`vocab_parallel_logprobs` of softcap(logit_scale · hidden · lm_head_weightᵀ + bias), which never exists as a whole.

    Arguments as in `fused_linear_kd_loss` and `vocab_parallel_logprobs`, results and errors too. Every row is worked
    on. Backward computes the logits again. `inplace_backward` has no effect.
    """
    student = StudentHidden(hidden, lm_head_weight, bias, softcap, logit_scale)
    return vocab_parallel_logprobs(
        student,
        target_ids,
        temperature=temperature,
        return_entropy=return_entropy,
        tp_group=tp_group,
        chunk_size=chunk_size,
        backend=backend,
    )
