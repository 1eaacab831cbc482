"""Logits of the student that never exist as a whole: computed from hidden states, a chunk of rows at a time.

With z = scale · hidden · Wᵀ + bias, softcapped (`head.Head`), and G = ∂loss/∂z of a chunk [n, Vl] before the softcap:

    ∂loss/∂hidden = scale · G · W   (summed over the tensor-parallel ranks)
    ∂loss/∂W += scale · Gᵀ · hidden        ∂loss/∂bias += Σ_rows G

There are two ways to get G. `FusedLoss` knows in advance how much every row counts, as a sum or a mean does, and makes
the gradients in forward while a chunk's logits exist: 6·N·H·Vl operations. What comes in for the loss, such as the factor
of a loss scaler, multiplies them in backward, and fp16 cannot hold what they are before (`gradients`). `FusedRows`
returns differentiable values per row, and computes the logits again in backward: 8·N·H·Vl operations, and 2·N·H·Vl more
for each pass after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distill_rl.losses.core.autograd import Anchor, first_derivative, own_dtypes
from distill_rl.losses.core.logits.gradients import Gradients, enlargement, scaled
from distill_rl.losses.core.logits.head import Head
from distill_rl.losses.core.row_function import KernelChoice, RowFunction, StudentLogits, part
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.core.streaming import PRODUCT_ROWS, Buffers, RowPlan, accumulator, padded_width

_LEAST_ROWS = 16
_CUDA_ROWS = 2048
"""Rows per chunk on CUDA, if memory allows: with fewer, adding to the weight's gradient takes longer than the products."""
_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 192 * 2**20, 2**30
"""What a chunk's logits and all that is computed from them may take together, unless that is less than `_LEAST_ROWS`."""
_BYTES = {False: 12, True: 32}
"""Per logit of a chunk: logits, exponentials and gradient; with a dense teacher also its logits, and both distributions."""
_KERNEL_BYTES = {False: 8, True: 12}
"""The same with kernels, which need no exponentials and no distributions."""


def default_chunk(hidden_size: int, columns: int, device: torch.device, *, dense: bool, kernels: bool = False) -> int:
    """Rows per chunk, a multiple of 16.

    On a CPU half the hidden size, at least 64, but no more than fit into 192 MiB: with half the hidden size, a chunk of
    fp32 logits is as large as the weight's bf16 gradient. On CUDA 2,048, but no more than fit into 1 GiB: every chunk
    reads and writes the weight's fp32 gradient and launches the same kernels, whatever its size. Chunks of a multiple of
    16 rows begin at addresses for which kernels are compiled only once.

    Args:
        dense: as in `StudentLogits.default_chunk`.
        kernels: whether kernels read the logits.
    """
    wanted, most = max(PRODUCT_ROWS, hidden_size // 2), _CHUNK_BYTES
    if device.type == "cuda":
        wanted, most = _CUDA_ROWS, _CUDA_CHUNK_BYTES
    row = (_KERNEL_BYTES if kernels else _BYTES)[dense] * padded_width(columns)
    return max(_LEAST_ROWS, min(wanted, most // row) // _LEAST_ROWS * _LEAST_ROWS)


@dataclass(frozen=True)
class ComputedLogits(StudentLogits):
    """softcap(scale · hidden · Wᵀ + bias), for hidden [N, H] and this rank's rows of the output layer, W [Vl, H]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    scale: float
    shard: VocabularyShard
    """The columns that `weight` holds; its group sums the gradient of the hidden states."""
    kernels: KernelChoice | None = None
    """None: torch computes."""

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        return self.hidden.shape[0]

    @property
    def like(self) -> Tensor:  # type: ignore[override]
        return self.weight.new_empty(0, dtype=accumulator(self.weight.dtype))

    @property
    def _layer(self) -> _Layer:
        return _Layer(self.softcap, self.scale, self.shard, self.kernels)

    def stream(self, function: RowFunction, plan: RowPlan, *parameters: Tensor) -> tuple[Tensor, ...]:
        return FusedRows.apply(self.hidden, self.weight, self.bias, self._layer, function, plan, *parameters)

    def loss(
        self, function: RowFunction, plan: RowPlan, weights: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """As `stream`, preceded by Σ weights · values, which alone is differentiable."""
        inputs: list[Tensor | None] = [self.hidden, self.weight, self.bias]
        if (
            not torch.is_grad_enabled()
        ):  # inside forward it never is, and parameters still say that they need a gradient
            inputs = [None if each is None else each.detach() for each in inputs]
        anchors = [Anchor.apply(each) for each in inputs if each is not None and each.requires_grad]
        loss, *values = FusedLoss.apply(*inputs, self._layer, function, plan, weights, *anchors)
        return loss, tuple(values)

    @torch.no_grad()
    def rows(self, numbers: Tensor) -> Tensor:
        logits = self.like.new_empty(len(numbers), self.shard.size)
        self._layer.head(self.weight.detach(), self.bias).logits(self.hidden.detach()[numbers], logits)
        return logits

    def default_chunk(
        self, columns: int, *, dense: bool, computed: bool = False, function: RowFunction | None = None
    ) -> int:
        kernels = None
        if self.kernels is not None and function is not None:
            kernels = self.kernels(function, self.like.new_empty(1, 1))
        width, device = self.hidden.shape[1], self.hidden.device
        return default_chunk(width, columns, device, dense=dense, kernels=kernels is not None)

    def apart(self, numbers: Tensor) -> tuple[ComputedLogits, ComputedLogits]:
        return self, replace(self, hidden=self.hidden.index_select(0, numbers))


@dataclass(frozen=True)
class _Layer:
    """What an autograd function may keep of the output layer: everything but its tensors."""

    softcap: float | None
    scale: float
    shard: VocabularyShard
    kernels: KernelChoice | None

    def head(self, weight: Tensor, bias: Tensor | None) -> Head:
        return Head(weight, bias, self.softcap, self.scale)


class FusedLoss(torch.autograd.Function):
    """Σ weights · values of a row function: hidden [N, H], weight [Vl, H], bias [Vl] → the loss."""

    @staticmethod
    @own_dtypes
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: _Layer,
        function: RowFunction,
        plan: RowPlan,
        weights: Sequence[Tensor | None],
        *anchors: Tensor,
    ) -> tuple[Tensor, ...]:
        """The loss, a scalar, then the row function's values and constants, [N] each. Only the loss is differentiable.

        All passes go over a chunk before the next one is computed. With tensor parallelism, u is moved to the ranks'
        common centre after the first pass.

        Args:
            weights: ∂loss/∂value [M] per value; None within for a value that does not enter the loss.
            anchors: empty tensors connected to the inputs that require a gradient, so that a second derivative is
                refused.
        """
        needs, inputs = ctx.needs_input_grad[:3], (hidden, weight, bias)
        gradients, ctx.enlarged, shares = None, None, weights
        if any(needs):
            gradients = Gradients(*inputs, needs, layer.shard, plan, scaled_later=True)
            ctx.enlarged = enlargement(inputs, weights)
        if ctx.enlarged is not None:
            shares = [None if share is None else share * ctx.enlarged for share in weights]
        _forward_by_chunk(_Chunks(*inputs, layer, function, plan), gradients, shares)
        values, constants = function.outputs()
        ctx.dtypes = tuple(None if each is None else each.dtype for each in inputs)
        ctx.save_for_backward(*(gradients.finish() if gradients is not None else [None] * 3), *anchors)
        ctx.mark_non_differentiable(*values, *constants)
        ctx.set_materialize_grads(False)
        parts = [(value * share).sum() for value, share in zip(values, weights) if share is not None]
        return torch.stack(parts).sum(), *values, *constants

    @staticmethod
    @first_derivative
    def backward(ctx, saved: Sequence[Tensor | None], *grads: Tensor | None):
        """The gradients made in forward times the loss's, of hidden, weight and bias; None for the other arguments."""
        factor, made, anchors = grads[0], saved[:3], saved[3:]
        assert factor is not None
        if ctx.enlarged is not None:
            factor = factor / ctx.enlarged
        found = (None if one is None else scaled(one, factor, dtype) for one, dtype in zip(made, ctx.dtypes))
        return *found, *[None] * (4 + len(anchors))


class FusedRows(torch.autograd.Function):
    """A row function of logits that are computed on the way: hidden [N, H], weight [Vl, H], bias [Vl] → its values."""

    @staticmethod
    @own_dtypes
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: _Layer,
        function: RowFunction,
        plan: RowPlan,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        """The row function's differentiable values and then its constants, of the plan's M rows in its order.

        Args:
            parameters: of the function, see `StudentLogits.stream`.
        """
        _forward_by_pass(_Chunks(hidden, weight, bias, layer, function, plan))
        values, constants = function.outputs()
        ctx.save_for_backward(hidden, weight, bias, *function.to_save())
        ctx.layer, ctx.function, ctx.plan = layer, function, plan
        ctx.num_values, ctx.num_parameters = len(values), len(parameters)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constants)
        return *values, *constants

    @staticmethod
    @first_derivative
    def backward(ctx, saved: Sequence[Tensor], *grads: Tensor | None):
        """The gradients of hidden, weight and bias, None for the other arguments, then those of the parameters."""
        hidden, weight, bias, *others = saved
        function, layer, plan = ctx.function, ctx.layer, ctx.plan
        function.restore(others)
        gradients = Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], layer.shard, plan)
        _backward(_Chunks(hidden, weight, bias, layer, function, plan), gradients, grads[: ctx.num_values])
        function.to_save()
        parameters = function.parameter_gradients() if ctx.num_parameters else ()
        return *gradients.finish(), None, None, None, *parameters


# Functions of their own, so that the chunks' buffers are freed before the gradients are rounded, which needs memory too.


def _forward_by_chunk(chunked: _Chunks, gradients: Gradients | None, weights: Sequence[Tensor | None]) -> None:
    """Streams every chunk through all passes and, with `gradients`, adds its gradient while its logits exist.

    Args:
        weights: ∂loss/∂value per row of each differentiable value; None within for a value without weight.
    """
    for rows in chunked.plan.pieces:
        chunked.load(rows, first=True)
        for number, (_, complete) in enumerate(chunked.function.passes):
            chunked.collect(rows, number)
            complete(rows)
            if number == 0:
                chunked.move_to_common_centre(rows)
        if gradients is not None:
            gradients.add(rows, chunked.gradient(rows, weights), chunked.head)


def _forward_by_pass(chunked: _Chunks) -> None:
    """Streams all chunks through one pass after another. A pass may need what the others' rows gave to the one before.

    Results stay in the row function.
    """
    for number, (_, complete) in enumerate(chunked.function.passes):
        for rows in chunked.plan.pieces:
            chunked.load(rows, first=number == 0)
            chunked.collect(rows, number)
        complete(slice(0, chunked.plan.length))


def _backward(chunked: _Chunks, gradients: Gradients, grads: Sequence[Tensor | None]) -> None:
    """Computes each chunk's logits again and adds its gradients to `gradients`.

    Args:
        chunked: its row function has been through `_forward_by_pass` and has its tensors back (`restore`).
        grads: [M] per differentiable value; None for one that does not enter the loss.
    """
    for rows in chunked.plan.pieces:
        chunked.load(rows)
        gradients.add(rows, chunked.gradient(rows, grads), chunked.head)


class _Chunks:
    """One chunk of logits at a time, and the row function's work on it, by torch or by kernels."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer, function: RowFunction, plan: RowPlan
    ):
        self.hidden, self.head, self.function, self.plan = hidden, layer.head(weight, bias), function, plan
        self.split = layer.shard.group is not None
        wide = accumulator(weight.dtype)
        self.buffers = Buffers(max(plan.largest, 1), weight.shape[0], wide, hidden.device)
        self.kernels = None
        if layer.kernels is not None:
            self.kernels = layer.kernels(function, self.buffers.buffer("student", 1))
        summed = bias is not None and bias.requires_grad
        rounded = weight.is_cuda and hidden.dtype == weight.dtype and not summed and layer.scale == 1
        self.narrow = weight.dtype if rounded and layer.softcap is None else wide
        """Of the kernels' gradient, which both products round to this dtype anyway where nothing comes in between."""
        self.logits = hidden.new_empty(0)
        """[n, width] of the chunk at hand: centred and scaled (`Buffers.load`), but as they are for kernels."""

    def load(self, rows: slice, *, first: bool = False) -> None:
        """Computes the logits of these rows.

        Args:
            first: during the first pass, which measures the centre.
        """
        hidden = self.plan.take(self.hidden, rows)
        if self.kernels is None:
            self.logits = self.head.load("student", hidden, self.buffers, self.function.centre, rows, first=first)
        else:
            self.logits = self.buffers.buffer("student", hidden.shape[0])
            self.head.logits(hidden, self.logits[:, : self.buffers.columns])

    def collect(self, rows: slice, number: int) -> None:
        """The row function's pass with this number over the chunk at hand."""
        if self.kernels is None:
            self.function.passes[number][0](rows, self.logits, self.buffers)
        else:
            self.kernels.collect(rows, self.logits[:, : self.buffers.columns], None, self.buffers)

    def move_to_common_centre(self, rows: slice) -> None:
        """After the first pass: moves the chunk at hand from this rank's centre to that of all ranks."""
        if self.kernels is None and self.split:
            self.logits.add_(self.function.centre.moved(rows)[:, None])

    def gradient(self, rows: slice, grads: Sequence[Tensor | None]) -> Tensor:
        """∂(Σ grads · values)/∂ (the chunk's logits before a softcap), [n, Vl]; overwrites the chunk.

        Args:
            grads: [M] per differentiable value; None for one that does not enter the loss.
        """
        columns, shares = self.buffers.columns, [part(grad, rows) for grad in grads]
        if self.kernels is None:
            slope = self.head.cap_slope(self.logits, self.function.centre, rows, self.buffers)
            gradient = self.function.gradient(rows, self.logits, shares, self.buffers)
        else:
            slope = self.head.cap_slope_of(self.logits, self.buffers)
            same = self.narrow == self.logits.dtype
            gradient = self.logits if same else torch.empty_like(self.logits, dtype=self.narrow)
            self.kernels.gradient(
                rows, self.logits[:, :columns], None, shares, gradient[:, :columns], None, self.buffers
            )
        return (gradient if slope is None else gradient.mul_(slope))[:, :columns]
