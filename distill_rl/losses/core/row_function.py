"""What a loss computes per row of logits, and the autograd function that streams logits through it.

`streaming` describes how a chunk is processed, and has the parts: centres, buffers and sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distill_rl.losses.core.autograd import first_derivative, own_dtypes
from distill_rl.losses.core.streaming import Buffers, Centre, RowPlan, accumulator

Pass = tuple[Callable[[slice, Tensor, Buffers], None], Callable[[slice], None]]
"""One pass over the logits: collect a chunk's sums; then complete any range of rows over the ranks."""


class RowFunction(ABC):
    """Values per row of logits, and their derivative. It knows nothing of autograd, which is the caller's business.

    u is a loaded chunk [n, width] (`Buffers.load`). Passes leave it unchanged; `gradient` may overwrite it.
    """

    centre: Centre
    """Of the student's logits."""
    values: list[Tensor]
    """The differentiable values, each with one entry per row."""
    lender: Any = None
    """What reads the caller's tensors in place of the row function itself, with `to_save` and `restore` as here."""

    @property
    def passes(self) -> list[Pass]:
        """The passes over the logits, in order; by default one. A later pass needs what an earlier one completed."""
        return [(self.collect, self.complete)]

    @abstractmethod
    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        """First pass over a chunk: stores what this rank's columns contribute to these rows."""

    @abstractmethod
    def complete(self, rows: slice) -> None:
        """End of the first pass: sums these rows' contributions over the ranks, and sets what follows from the sums."""

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns (differentiable values, constants), each with one entry per row; called once, after the passes.

        By default there are no constants. The object drops its references to the values, because autograd makes them
        refer to it.
        """
        values, self.values = tuple(self.values), []
        return values, ()

    @abstractmethod
    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        """∂(Σ grads · differentiable values)/∂z of a chunk's logits z, [n, width].

        Args:
            u: the loaded chunk; may be overwritten and returned.
            grads: [n] per differentiable value; None for one that does not enter the loss.
        """

    def to_save(self) -> tuple[Tensor, ...]:
        """Returns the caller's tensors that `gradient` reads, and drops them until `restore`: by default the lender's.

        Autograd keeps them in between (`save_for_backward`): it detects writes to them, frees them after backward, and
        lets saved-tensor hooks move them elsewhere.
        """
        return () if self.lender is None else self.lender.to_save()

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Takes back what `to_save` returned, in the same order."""
        if self.lender is not None:
            self.lender.restore(tensors)

    def parameter_gradients(self) -> tuple[Tensor, ...]:
        """The gradients of its own parameters, summed over the calls of `gradient`; resets the sums. None by default."""
        return ()


class StreamingLoss(torch.autograd.Function):
    """A row function of existing logits: [N, Vl] → its values.

    One of the two autograd functions here that see logits. The other one, `linear.FusedRows`, also computes them.
    """

    @staticmethod
    @own_dtypes
    def forward(
        ctx, logits: Tensor, function: RowFunction, plan: RowPlan, inplace: bool, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """The row function's differentiable values and then its constants, of the plan's M rows in its order.

        Args:
            logits: [N, Vl].
            inplace: write the gradient over the logits.
            parameters: of the function, which already holds them. Passed so that autograd asks for their
                gradients.
        """
        buffers = Buffers(plan.largest, logits.shape[1], accumulator(logits.dtype), logits.device)
        for i, (collect, complete) in enumerate(function.passes):
            for rows in plan.pieces:
                u = buffers.load("student", plan.take(logits, rows), function.centre, rows, first=i == 0)
                collect(rows, u, buffers)
            complete(slice(0, plan.length))
        ctx.save_for_backward(logits, *function.to_save())
        ctx.function, ctx.plan, ctx.inplace, ctx.spent = function, plan, inplace, False
        ctx.num_parameters = len(parameters)
        ctx.set_materialize_grads(False)
        values, constants = function.outputs()
        ctx.mark_non_differentiable(*constants)
        ctx.num_values = len(values)
        return *values, *constants

    @staticmethod
    @first_derivative
    def backward(ctx, *grads: Tensor | None):
        """The gradient of the logits, computed chunk by chunk, in their dtype; then those of the parameters.

        It is 0 for rows that are not streamed. With `inplace` it is the logits' own memory.

        Raises:
            RuntimeError: a second backward with `inplace`, which has overwritten the logits.
        """
        if ctx.spent:
            raise RuntimeError("inplace_backward: the gradient has overwritten the logits, a second backward has none")
        logits, *saved = ctx.saved_tensors
        ctx.function.restore(saved)
        ctx.spent = ctx.inplace
        plan: RowPlan = ctx.plan
        whole = plan.length == logits.shape[0]
        if ctx.inplace:
            out = logits.detach() if whole else plan.clear_others(logits.detach())
        else:
            out = torch.empty_like(logits) if whole else torch.zeros_like(logits)
        buffers = Buffers(plan.largest, logits.shape[1], accumulator(logits.dtype), logits.device)
        for rows in plan.pieces:
            u = buffers.load("student", plan.take(logits, rows), ctx.function.centre, rows)
            gradient = ctx.function.gradient(rows, u, [part(grad, rows) for grad in grads[: ctx.num_values]], buffers)
            plan.put(out, rows, gradient[:, : buffers.columns])
        ctx.function.to_save()
        parameters = ctx.function.parameter_gradients() if ctx.num_parameters else ()
        return out, None, None, None, *parameters


def part(grad: Tensor | None, rows: slice) -> Tensor | None:
    """The part of a gradient [N] that belongs to these rows; None if the gradient is None."""
    return None if grad is None else grad[rows]
