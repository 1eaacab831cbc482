"""Losses of hidden states and an output layer: a chunk of logits exists at a time, and never the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from distill_rl.losses import checks
from distill_rl.losses.head import Head, multiply
from distill_rl.losses.kd import KDOutput, Task, local_teacher, make_task
from distill_rl.losses.labels import LabelRows
from distill_rl.losses.reduce import ReductionName
from distill_rl.losses.shards import VocabularyShard, split
from distill_rl.losses.sparse import Tail
from distill_rl.losses.sweep import RowFunction, Scratch, accumulator, chunks, part
from distill_rl.losses.targets import Teacher

_CPU_CHUNK = 64


class FusedRows(torch.autograd.Function):
    """A row function of logits that are made on the way: hidden [n, H], weight [Vl, H], bias [Vl] → its values.

    With `weights`, the derivative of the final number with respect to each value, the first output is Σ weights · values,
    the only differentiable one, and gradients are made while the logits are at hand: 6·N·H·Vl operations. Without, every
    value is differentiable and backward makes the logits again: 8·N·H·Vl.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        function: RowFunction,
        shard: VocabularyShard,
        chunk: int,
        weights: Sequence[Tensor | None] | None,
    ) -> tuple[Tensor, ...]:
        needs = ctx.needs_input_grad[:3]
        gradients = _Gradients(hidden, weight, bias, needs, shard) if weights is not None and any(needs) else None
        head, scratch = Head(weight, bias, softcap), _scratch(hidden, weight, chunk)
        for rows in chunks(hidden.shape[0], chunk):
            u = head.load("student", hidden[rows], scratch, function.scale)
            for collect, complete in function.sweeps:
                collect(rows, u, scratch)
                complete(rows)
            if gradients is not None:
                gradients.add(rows, u, function, weights, head, scratch)
        values, constants = function.outputs()
        ctx.set_materialize_grads(False)
        if weights is None:
            ctx.save_for_backward(hidden, weight, bias)
            ctx.rest = softcap, function, shard, chunk, len(values)
            ctx.mark_non_differentiable(*constants)
            return *values, *constants
        ctx.rest = None
        ctx.save_for_backward(*(gradients.finish() if gradients is not None else ()))
        ctx.mark_non_differentiable(*values, *constants)
        total = sum(((value * share).sum() for value, share in zip(values, weights) if share is not None))
        return total, *values, *constants

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):
        if ctx.rest is None:
            factor = grads[0]
            made = (None if made is None or factor is None else made * factor.to(made.dtype) for made in ctx.saved_tensors)
            return *made, *[None] * 5
        hidden, weight, bias = ctx.saved_tensors
        softcap, function, shard, chunk, count = ctx.rest
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], shard)
        head, scratch = Head(weight, bias, softcap), _scratch(hidden, weight, chunk)
        for rows in chunks(hidden.shape[0], chunk):
            u = head.load("student", hidden[rows], scratch, function.scale)
            gradients.add(rows, u, function, grads[:count], head, scratch)
        return *gradients.finish(), *[None] * 5


class _Gradients:
    """Sums of a chunk at a time, in fp32, of what the inputs need; the hidden states' is complete on every rank."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool], shard: VocabularyShard
    ):
        self.inputs, self.shard = (hidden, weight, bias), shard
        wide = accumulator(weight.dtype)
        self.hidden = torch.empty_like(hidden, dtype=wide if shard.group else hidden.dtype) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None

    def add(
        self,
        rows: slice,
        u: Tensor,
        function: RowFunction,
        grads: Sequence[Tensor | None],
        head: Head,
        scratch: Scratch,
    ) -> None:
        cap_slope = head.cap_slope(u, function.scale, scratch)
        gradient = function.gradient(rows, u, [part(grad, rows) for grad in grads], scratch)
        if cap_slope is not None:
            gradient.mul_(cap_slope)
        gradient = gradient[:, : scratch.columns]
        if self.hidden is not None:
            self.hidden[rows] = head.hidden_gradient(gradient)
        if self.weight is not None:
            chunk = self.inputs[0][rows]
            if self.weight.is_cuda:
                self.weight.add_(multiply(gradient.T, chunk, chunk.dtype))
            else:
                self.weight.addmm_(gradient.T, chunk.to(self.weight.dtype))
        if self.bias is not None:
            self.bias.add_(gradient.sum(0))

    def finish(self) -> tuple[Tensor | None, ...]:
        if self.hidden is not None:
            self.shard.sum_(self.hidden)
        made = (self.hidden, self.weight, self.bias)
        return tuple(None if grad is None else grad.to(given.dtype) for grad, given in zip(made, self.inputs))


def _scratch(hidden: Tensor, weight: Tensor, chunk: int) -> Scratch:
    return Scratch(min(chunk, max(hidden.shape[0], 1)), weight.shape[0], accumulator(weight.dtype), hidden.device)


def default_chunk(hidden_size: int, device: torch.device) -> int:
    """Rows per chunk: on a GPU half the hidden size, for then a chunk of logits is about as large as the weight's gradient,
    which every chunk reads and writes; on a CPU enough for a good matrix product."""
    return max(_CPU_CHUNK, hidden_size // 2) if device.type == "cuda" else _CPU_CHUNK


def fused_linear_kd_loss(
    student_hidden: Tensor,
    lm_head_weight: Tensor,
    teacher: Teacher | None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
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
    """`kd_loss` of the logits softcap(student_hidden · lm_head_weightᵀ + bias), which never exist as a whole.

    Ignored rows are left out before the output layer (reading their number waits for a GPU once). Logits are accumulated
    in fp32 whatever the dtypes. Extra memory: the inputs' gradients, the weight's in fp32 until it is complete, and a
    chunk of logits, whatever N·V. For "sum" and "mean" the gradients are made during forward.

    Args:
        student_hidden: [N, H] or [B, S, H], the same on every tensor-parallel rank (plain, or a DTensor Replicate); its
            gradient arrives complete on every rank.
        lm_head_weight: [V, H]; a DTensor Shard(0), or with `tp_group` this rank's [Vl, H]. Its gradient is the shard's.
        teacher: TeacherHidden has its own output layer and hidden size, sharded as the student's.
        bias: [V], sharded as the weight.
        softcap: softcap · tanh(logits / softcap), before the temperature.
        inplace_backward: without effect, there are no logits to overwrite.

    The other arguments, and what is raised, are those of `kd_loss`.
    """
    hidden, weight, bias, shard = _inputs(student_hidden, lm_head_weight, bias, tp_group)
    checks.chunk_size(chunk_size)
    task = make_task(
        hidden.shape[:-1], shard, labels=labels, divergence=divergence, beta=beta, temperature=temperature, tail=tail,
        kd_ratio=kd_ratio, token_weights=token_weights, ignore_index=ignore_index, reduction=reduction,
        num_items_in_batch=num_items_in_batch, device=hidden.device, validate=validate,
    )  # fmt: skip
    targets = local_teacher(teacher, task, validate)
    like = weight.new_empty(0, dtype=accumulator(weight.dtype))
    chunk = chunk_size or default_chunk(hidden.shape[-1], hidden.device)
    flat = hidden.reshape(task.num_rows, hidden.shape[-1])
    kept, task, flat, targets = compact(task, flat, targets)
    function = task.rows(targets, like)
    if reduction == "none":
        values = FusedRows.apply(flat, weight, bias, softcap, function, shard, chunk, None)
        return task.spread(kept).output(tuple(_spread(value, kept) for value in values), teacher is not None)
    weights = task.row_weights(like.dtype, teacher is not None)
    total, *values = FusedRows.apply(flat, weight, bias, softcap, function, shard, chunk, weights)
    return task.output(tuple(values), teacher is not None, loss=total)
