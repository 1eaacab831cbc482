"""The autograd function of the fused losses: hidden states in, values per row out, gradients of all inputs back.

Logits = hidden · Wᵀ exist a chunk of rows at a time (`head.Head`). With G = ∂loss/∂logits of a chunk [n, Vl]:

    ∂loss/∂hidden = G · W   (summed over the tensor-parallel ranks)
    ∂loss/∂W += Gᵀ · hidden        ∂loss/∂bias += Σ_rows G
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distill_rl.losses.core.autograd import first_derivative, own_dtypes
from distill_rl.losses.core.head import Head, multiply
from distill_rl.losses.core.row_function import RowFunction, part
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.core.streaming import Buffers, accumulator, chunks

_TILE = 2**12
"""Rows of the weight's gradient that are rounded at a time, so that it never exists as a whole in fp32 for that."""


class FusedRows(torch.autograd.Function):
    """A row function of logits that are computed on the way: hidden [N, H], weight [Vl, H], bias [Vl] → its values.

    Two modes:

    - With `weights` (∂loss/∂value of every row, known in advance for "sum" and "mean"), the first output is the loss
      Σ weights · values, the only differentiable one. Gradients are computed in forward while a chunk's logits exist:
      6·N·H·Vl operations.
    - Without them every value is differentiable, and backward computes the logits again: 8·N·H·Vl operations.
    """

    @staticmethod
    @own_dtypes
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
        *anchors: Tensor,
    ) -> tuple[Tensor, ...]:
        """The row function's values and constants, [N] each; with `weights` preceded by the loss, a scalar.

        The modes, and which outputs are differentiable, are in the class docstring.

        Args:
            softcap: see `Head`.
            function: its outputs become the outputs here, differentiable ones first.
            chunk: rows at a time.
            shard: the columns that `weight` holds; its group sums the gradient of the hidden states.
            weights: ∂loss/∂value [N] per differentiable value; None within for a value that does not enter the loss.
            anchors: empty tensors connected to the inputs that require a gradient, so that a second derivative is
                refused.
        """
        needs = ctx.needs_input_grad[:3]
        gradients = (
            _Gradients(hidden, weight, bias, needs, shard, chunk) if weights is not None and any(needs) else None
        )
        _forward(hidden, Head(weight, bias, softcap), function, shard, chunk, gradients, weights)
        values, constants = function.outputs()
        ctx.set_materialize_grads(False)
        if weights is None:
            ctx.save_for_backward(hidden, weight, bias, *function.to_save())
            ctx.rest = softcap, function, shard, chunk, len(values), len(anchors)
            ctx.mark_non_differentiable(*constants)
            return *values, *constants
        ctx.rest = None
        ctx.save_for_backward(*(gradients.finish() if gradients is not None else [None] * 3), *anchors)
        ctx.mark_non_differentiable(*values, *constants)
        parts = [(value * share).sum() for value, share in zip(values, weights) if share is not None]
        total = torch.stack(parts).sum()
        return total, *values, *constants

    @staticmethod
    @first_derivative
    def backward(ctx, *grads: Tensor | None):
        """Gradients of hidden, weight and bias, None for the other arguments.

        With `weights` those made in forward times the loss's gradient; otherwise computed now from the saved inputs.
        """
        if ctx.rest is None:
            factor, made, anchors = grads[0], ctx.saved_tensors[:3], ctx.saved_tensors[3:]
            assert factor is not None
            scaled = (None if one is None else _scaled(one, factor) for one in made)
            return *scaled, *[None] * (5 + len(anchors))
        hidden, weight, bias, *lent = ctx.saved_tensors
        softcap, function, shard, chunk, count, num_anchors = ctx.rest
        function.restore(lent)
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], shard, chunk)
        _backward(hidden, Head(weight, bias, softcap), function, chunk, gradients, grads[:count])
        function.to_save()
        return *gradients.finish(), *[None] * (5 + num_anchors)


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient · factor in the gradient's dtype, rounded once. If dtypes differ, it is computed in tiles of rows.

    Args:
        factor: a scalar tensor.
    """
    if gradient.dtype == factor.dtype:
        return gradient * factor
    out = torch.empty_like(gradient)
    for rows in chunks(gradient.shape[0], _TILE):
        out[rows] = gradient[rows].to(factor.dtype) * factor
    return out


# Functions of their own, so that the chunks' buffers are freed before the gradients are rounded, which needs memory too.


def _forward(
    hidden: Tensor,
    head: Head,
    function: RowFunction,
    shard: VocabularyShard,
    chunk: int,
    gradients: _Gradients | None,
    weights: Sequence[Tensor | None] | None,
) -> None:
    """Streams all rows through the function's passes; with `gradients` adds each chunk's while its logits exist.

    Results stay in `function` and `gradients`. With tensor parallelism, u is moved to the ranks' common centre after
    the first pass.

    Args:
        gradients: sums to add to, or None. Used only together with `weights`.
        weights: ∂loss/∂value per row of each differentiable value; None within for a value without weight.
    """
    buffers = _buffers(hidden, head.weight, chunk)
    for rows in chunks(hidden.shape[0], chunk):
        u = head.load("student", hidden[rows], buffers, function.centre, rows, first=True)
        for number, (collect, complete) in enumerate(function.passes):
            collect(rows, u, buffers)
            complete(rows)
            if number == 0 and shard.group is not None:
                u.add_(function.centre.moved(rows)[:, None])
        if gradients is not None and weights is not None:
            gradients.add(rows, u, function, weights, head, buffers)


def _backward(
    hidden: Tensor,
    head: Head,
    function: RowFunction,
    chunk: int,
    gradients: _Gradients,
    grads: Sequence[Tensor | None],
) -> None:
    """Computes each chunk's logits again and adds its gradients to `gradients`.

    Args:
        function: has been through `_forward` and has its tensors back (`restore`).
        grads: [N] per differentiable value; None for one that does not enter the loss.
    """
    buffers = _buffers(hidden, head.weight, chunk)
    for rows in chunks(hidden.shape[0], chunk):
        u = head.load("student", hidden[rows], buffers, function.centre, rows)
        gradients.add(rows, u, function, grads, head, buffers)


class _Gradients:
    """Gradients of the inputs that need one, collected chunk by chunk.

    Those of weight and bias are sums over chunks in fp32 (fp64 for fp64 weights), except that a single chunk's weight
    gradient is made in the weight's dtype. `finish` sums that of the hidden states over the ranks.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: Sequence[bool],
        shard: VocabularyShard,
        chunk: int,
    ):
        self.inputs, self.shard = (hidden, weight, bias), shard
        wide = accumulator(weight.dtype)
        self.at_once = hidden.shape[0] <= chunk
        """Whether there is a single chunk, so that nothing has to be accumulated in fp32."""
        self.hidden = torch.empty_like(hidden, dtype=wide if shard.group else hidden.dtype) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=weight.dtype if self.at_once else wide) if needs[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None

    def add(
        self,
        rows: slice,
        u: Tensor,
        function: RowFunction,
        grads: Sequence[Tensor | None],
        head: Head,
        buffers: Buffers,
    ) -> None:
        """Adds one chunk to the gradients of weight and bias and sets its rows of that of hidden, as needed.

        Args:
            u: the chunk's centred logits, [n, width]; overwritten.
            grads: [N] per differentiable value of `function`, or None.
        """
        cap_slope = head.cap_slope(u, function.centre, rows, buffers)
        gradient = function.gradient(rows, u, [part(grad, rows) for grad in grads], buffers)
        if cap_slope is not None:
            gradient.mul_(cap_slope)
        gradient, chunk = gradient[:, : buffers.columns], self.inputs[0][rows]
        if self.bias is not None:
            self.bias.add_(gradient.sum(0))
        if gradient.is_cuda and chunk.dtype == head.weight.dtype:
            gradient = gradient.to(chunk.dtype)  # rounded once, used by both products
        if self.hidden is not None:
            self.hidden[rows] = head.hidden_gradient(gradient)
        if self.weight is not None:
            self._add_to_weight(gradient, chunk)

    def _add_to_weight(self, gradient: Tensor, chunk: Tensor) -> None:
        """Adds Gᵀ · hidden of one chunk to the weight's gradient, or sets it if all rows are one chunk.

        Args:
            gradient: G, [n, Vl].
            chunk: the hidden states, [n, H].
        """
        assert self.weight is not None
        wide = accumulator(self.weight.dtype)
        if self.at_once and self.weight.dtype != wide:
            narrow = chunk.dtype
            chunk = chunk if self.weight.is_cuda else chunk.to(wide)
            for columns in chunks(self.weight.shape[0], _TILE):
                self.weight[columns] = multiply(gradient[:, columns].T, chunk, narrow)
        elif self.weight.is_cuda:
            self.weight.add_(multiply(gradient.T, chunk, chunk.dtype))
        else:
            self.weight.addmm_(gradient.T, chunk.to(wide))

    def finish(self) -> tuple[Tensor | None, ...]:
        """Returns the gradients of hidden, weight and bias in the dtypes of the inputs; None where none is needed.

        Sums that of the hidden states over the ranks first (a collective), so call it once.
        """
        if self.hidden is not None:
            self.shard.sum_(self.hidden)
        made = zip((self.hidden, self.weight, self.bias), self.inputs)
        return tuple(None if grad is None or given is None else grad.to(given.dtype) for grad, given in made)


def _buffers(hidden: Tensor, weight: Tensor, chunk: int) -> Buffers:
    """Buffers for the logits of one chunk, of at most `chunk` rows."""
    return Buffers(min(chunk, max(hidden.shape[0], 1)), weight.shape[0], accumulator(weight.dtype), hidden.device)
