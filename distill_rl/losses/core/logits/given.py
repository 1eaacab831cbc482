"""Logits of the student that exist as a whole, and the autograd function that streams over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill_rl.losses.core.autograd import first_derivative, own_dtypes
from distill_rl.losses.core.row_function import KernelChoice, RowFunction, RowKernels, StudentLogits, part
from distill_rl.losses.core.streaming import Buffers, RowPlan, accumulator, default_chunk


@dataclass(frozen=True)
class GivenLogits(StudentLogits):
    """Logits [N, Vl] that the caller computed."""

    logits: Tensor
    inplace: bool = False
    """Write the gradient over the logits."""
    kernels: KernelChoice | None = None
    """None: torch computes."""

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        return self.logits.shape[0]

    @property
    def like(self) -> Tensor:  # type: ignore[override]
        return self.logits.new_empty(0, dtype=accumulator(self.logits.dtype))

    def stream(self, function: RowFunction, plan: RowPlan, *parameters: Tensor) -> tuple[Tensor, ...]:
        return StreamingLoss.apply(self.logits, function, plan, self.inplace, self.kernels, *parameters)

    def loss(
        self, function: RowFunction, plan: RowPlan, weights: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        return None, self.stream(function, plan)

    def rows(self, numbers: Tensor) -> Tensor:
        return self.logits.detach().index_select(0, numbers)

    def default_chunk(
        self, columns: int, *, dense: bool, computed: bool = False, function: RowFunction | None = None
    ) -> int:
        return default_chunk(columns, self.logits.device, computed=computed)

    def apart(self, numbers: Tensor) -> tuple[GivenLogits, GivenLogits]:
        whole, some = RowsApart.apply(self.logits, numbers)
        return GivenLogits(whole, kernels=self.kernels), GivenLogits(some, kernels=self.kernels)


class StreamingLoss(torch.autograd.Function):
    """A row function of existing logits: [N, Vl] → its values.

    Those of `linear` compute the logits, too.
    """

    @staticmethod
    @own_dtypes
    def forward(
        ctx,
        logits: Tensor,
        function: RowFunction,
        plan: RowPlan,
        inplace: bool,
        choice: KernelChoice | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        """The row function's differentiable values and then its constants, of the plan's M rows in its order.

        Args:
            logits: [N, Vl].
            inplace: write the gradient over the logits.
            choice: as in `GivenLogits`.
            parameters: of the function, which already holds them. Passed so that autograd asks for their gradients.
        """
        everything = slice(0, plan.length)
        buffers = _buffers_for(logits, plan)
        ctx.kernels = None if choice is None else choice(function, logits)
        if ctx.kernels is not None:
            for rows in _visits(ctx.kernels, plan):
                ctx.kernels.collect(rows, *_given(logits, plan, rows), buffers)
            [(_, complete)] = function.passes
            complete(everything)
        else:
            for i, (collect, complete) in enumerate(function.passes):
                for rows in plan.pieces:
                    u = buffers.load("student", plan.take(logits, rows), function.centre, rows, first=i == 0)
                    collect(rows, u, buffers)
                complete(everything)
        ctx.save_for_backward(logits, *function.to_save())
        ctx.function, ctx.plan, ctx.inplace = function, plan, inplace
        ctx.num_parameters = len(parameters)
        ctx.set_materialize_grads(False)
        values, constants = function.outputs()
        ctx.mark_non_differentiable(*constants)
        ctx.num_values = len(values)
        return *values, *constants

    @staticmethod
    @first_derivative
    def backward(ctx, saved: Sequence[Tensor], *grads: Tensor | None):
        """The gradient of the logits, computed chunk by chunk, in their dtype; then those of the parameters.

        It is 0 for rows that are not streamed. With `inplace` it is the logits' own memory.

        Raises:
            RuntimeError: a second backward with `inplace`, which has overwritten the logits.
        """
        logits, *others = saved
        ctx.function.restore(others)
        if ctx.inplace:
            ctx.refusal = "inplace_backward: the gradient has overwritten the logits, a second backward has none"
        plan: RowPlan = ctx.plan
        whole = plan.length == logits.shape[0]
        if ctx.inplace:
            out = logits.detach() if whole else plan.clear_others(logits.detach())
        else:
            out = torch.empty_like(logits) if whole else torch.zeros_like(logits)
        buffers = _buffers_for(logits, plan)
        for rows in plan.pieces if ctx.kernels is None else _visits(ctx.kernels, plan):
            shares = [part(grad, rows) for grad in grads[: ctx.num_values]]
            if ctx.kernels is None:
                u = buffers.load("student", plan.take(logits, rows), ctx.function.centre, rows)
                gradient = ctx.function.gradient(rows, u, shares, buffers)
                plan.put(out, rows, gradient[:, : buffers.columns])
            else:
                given, order = _given(logits, plan, rows)
                counts = None if plan.counts is None or order is not None else plan.counts[rows]
                ctx.kernels.gradient(rows, given, order, shares, _given(out, plan, rows)[0], counts, buffers)
        ctx.function.to_save()
        parameters = ctx.function.parameter_gradients() if ctx.num_parameters else ()
        return out, None, None, None, None, *parameters


def _visits(kernels: RowKernels, plan: RowPlan) -> Iterator[slice]:
    """The rows that kernels work on at once: all of them, or a chunk at a time."""
    yield from plan.pieces if kernels.by_chunk else (slice(0, plan.length),)


def _given(logits: Tensor, plan: RowPlan, rows: slice) -> tuple[Tensor, Tensor | None]:
    """Logits [N, Vl], or a gradient like them, and the order as `RowKernels` take them for these rows."""
    return (logits[rows], None) if plan.order is None else (logits, plan.order[rows])


def _buffers_for(logits: Tensor, plan: RowPlan) -> Buffers:
    """Buffers for the largest chunk of the plan, in the dtype in which sums of these logits are taken."""
    return Buffers(plan.largest, logits.shape[1], accumulator(logits.dtype), logits.device)


class RowsApart(torch.autograd.Function):
    """Returns the logits [N, Vl] (a view) and a copy of some rows.

    The copy's gradient is added in place to that of the view: autograd would otherwise allocate a second gradient of
    the logits' size.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """A view of the logits, and a copy of the rows with the numbers `rows`, [len(rows), Vl]."""
        ctx.save_for_backward(rows, logits)
        ctx.set_materialize_grads(False)
        return logits.view_as(logits), logits.index_select(0, rows)

    @staticmethod
    @first_derivative
    def backward(ctx, saved: Sequence[Tensor], whole: Tensor | None, apart: Tensor | None):
        """The view's gradient, to which that of the copied rows is added in place; None for `rows`."""
        rows, logits = saved
        if whole is None:
            whole = torch.zeros_like(logits)
        if apart is not None:
            whole.index_add_(0, rows, apart)
        return whole, None
