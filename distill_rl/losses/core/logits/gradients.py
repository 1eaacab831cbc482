"""The gradients of hidden states and of an output layer, collected from those of its logits, a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from distill_rl.losses.core.logits.head import Head, multiply
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.core.streaming import RowPlan, accumulator, chunks

_TILE = 2**24
"""Elements of the weight's gradient that are rounded or added at a time, so that no second copy of it exists."""


class Gradients:
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
        plan: RowPlan,
    ):
        self.inputs, self.shard, self.plan = (hidden, weight, bias), shard, plan
        wide = accumulator(weight.dtype)
        self.at_once = len(plan.pieces) <= 1
        """Whether there is a single chunk, so that nothing has to be accumulated in fp32."""
        empty = torch.empty_like if plan.length == hidden.shape[0] else torch.zeros_like
        self.hidden = empty(hidden, dtype=wide if shard.group else hidden.dtype) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=weight.dtype if self.at_once else wide) if needs[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None

    def add(self, rows: slice, gradient: Tensor, head: Head) -> None:
        """Adds one chunk to the gradients of weight and bias and sets its rows of that of hidden, as needed.

        Args:
            gradient: of the chunk's logits before a softcap, [n, Vl]; overwritten.
        """
        chunk = self.plan.take(self.inputs[0], rows)
        if self.bias is not None:
            self.bias.add_(gradient.sum(0))
        if head.scale != 1:
            gradient.mul_(head.scale)
        if gradient.is_cuda and chunk.dtype == head.weight.dtype:
            gradient = gradient.to(chunk.dtype)  # rounded once, used by both products
        if self.hidden is not None:
            self.plan.put(self.hidden, rows, head.hidden_gradient(gradient))
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
        if self.weight.is_cuda and gradient.dtype == chunk.dtype != wide:
            self._add_on_gpu(gradient.T, chunk, wide)
            return
        if self.weight.dtype == wide and (not self.weight.is_cuda or chunk.dtype == wide):
            self.weight.addmm_(gradient.T, chunk.to(wide))
            return
        narrow, chunk = chunk.dtype, chunk if self.weight.is_cuda else chunk.to(wide)
        for columns in _tiles(self.weight):
            product = multiply(gradient[:, columns].T, chunk, narrow)
            if self.at_once:
                self.weight[columns] = product
            else:
                self.weight[columns] += product

    def _add_on_gpu(self, transposed: Tensor, chunk: Tensor, wide: torch.dtype) -> None:
        """`_add_to_weight` for bf16 and fp16: one product, which adds to the sum in fp32 as it writes it."""
        assert self.weight is not None
        if self.weight.dtype == wide:
            torch.addmm(self.weight, transposed, chunk, out_dtype=wide, out=self.weight)
        else:
            torch.mm(transposed, chunk, out=self.weight)

    def finish(self) -> tuple[Tensor | None, ...]:
        """Returns the gradients of hidden, weight and bias in the dtypes of the inputs; None where none is needed.

        Sums that of the hidden states over the ranks first (a collective), so call it once.
        """
        if self.hidden is not None:
            self.shard.sum_(self.hidden)
        made = zip((self.hidden, self.weight, self.bias), self.inputs)
        return tuple(None if grad is None or given is None else grad.to(given.dtype) for grad, given in made)


def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient · factor in the gradient's dtype, rounded once. If dtypes differ, it is computed in tiles of rows.

    Args:
        factor: a scalar tensor.
    """
    if gradient.dtype == factor.dtype:
        return gradient * factor
    out = torch.empty_like(gradient)
    for rows in _tiles(gradient):
        out[rows] = gradient[rows].to(factor.dtype) * factor
    return out


def _tiles(gradient: Tensor) -> Iterator[slice]:
    """Slices of rows that tile a gradient of a weight or of hidden states, of at most _TILE elements or one row."""
    return chunks(gradient.shape[0], max(1, _TILE // max(gradient[:1].numel(), 1)))
