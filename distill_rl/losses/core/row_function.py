"""What a loss computes per row of logits, and what streams the student's logits through it.

`streaming` describes how a chunk is processed, and has the parts: centres, buffers and sums. Logits that exist are
streamed by `given`, logits that are computed on the way by `linear`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from distill_rl.losses.core.streaming import Buffers, Centre, RowPlan

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


class RowKernels(ABC):
    """The visits of a row function to the logits, as kernels.

    `rows` are n positions in the order of streaming, as everywhere. The i-th of them has row order[i] of the logits that
    are passed, or row i without `order`.
    """

    by_chunk = False
    """Whether `rows` must be a chunk, for which there are buffers; otherwise they may be all rows at once."""

    @abstractmethod
    def collect(self, rows: slice, logits: Tensor, order: Tensor | None, buffers: Buffers) -> None:
        """The first pass over these rows' logits, before `RowFunction.complete`. logits [N, Vl], any float dtype."""

    @abstractmethod
    def gradient(
        self,
        rows: slice,
        logits: Tensor,
        order: Tensor | None,
        grads: Sequence[Tensor | None],
        out: Tensor,
        counts: Tensor | None,
        buffers: Buffers,
    ) -> None:
        """Writes ∂(Σ grads · values)/∂z of these rows into their rows of `out` [N, Vl], in its dtype.

        Args:
            grads: [n] per differentiable value; None for one that does not enter the loss.
            out: its columns must be contiguous, as those of the logits; may be the logits themselves.
            counts: bool [n]; rows at False receive 0. None: all count.
        """


KernelChoice = Callable[[RowFunction, Tensor], RowKernels | None]
"""The kernels that do a row function's work on these logits; None where torch does it."""


class StudentLogits(ABC):
    """The student's logits [N, Vl] of this rank's columns, which exist as a whole or are computed a chunk at a time."""

    num_rows: int
    like: Tensor
    """Empty, with the device and dtype of the arithmetic on the logits."""

    @abstractmethod
    def stream(self, function: RowFunction, plan: RowPlan, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Streams rows through a row function; returns its differentiable values and then its constants.

        Both are of the plan's M rows, in its order.

        Args:
            parameters: of the function, which already holds them. Passed so that autograd asks for their gradients.
        """

    @abstractmethod
    def loss(
        self, function: RowFunction, plan: RowPlan, weights: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """What `stream` returns, preceded by Σ weights · values, or by None if the caller must compute that from the values.

        Args:
            weights: [M] per differentiable value; None within for one that does not enter the loss.
        """

    @abstractmethod
    def rows(self, numbers: Tensor) -> Tensor:
        """A copy of the logits of these rows, [n, Vl], without a gradient."""

    @abstractmethod
    def default_chunk(
        self, columns: int, *, dense: bool, computed: bool = False, function: RowFunction | None = None
    ) -> int:
        """Rows to work on at once, if there are this many columns.

        Args:
            dense: whether every column is compared, which takes more copies of a chunk than top-k targets or labels.
            computed: whether the teacher's logits are computed from hidden states, too, a chunk at a time.
            function: what is computed; if it has kernels, these take fewer copies. None: not known yet.
        """

    @abstractmethod
    def apart(self, numbers: Tensor) -> tuple[StudentLogits, StudentLogits]:
        """All rows, and once more the rows with these numbers. The gradients of both reach the student."""


def part(grad: Tensor | None, rows: slice) -> Tensor | None:
    """The part of a gradient [N] that belongs to these rows; None if the gradient is None."""
    return None if grad is None else grad[rows]
