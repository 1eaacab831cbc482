"""The gradients of hidden states and of an output layer, collected from those of its logits, a chunk of rows at a time.

A gradient that is made before its factor is known, such as that of a loss scaler, may be far too small for fp16: a mean
over a million tokens makes it smaller than 6e-8, the least that fp16 holds. Such gradients of fp16 inputs

1. are multiplied on the way by a power of two that makes the largest weight of a row about 16 (`enlargement`), since a
   GPU rounds the logits' gradient to fp16 for its matrix products,
2. are kept in fp32, and
3. are rounded to fp16 once they are multiplied by the factor, divided by that power of two (`scaled`).

bf16 has the range of fp32: its gradients are rounded as soon as they are complete, which takes half of the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from distill_rl.losses.core.logits.head import Head, multiply
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.core.streaming import RowPlan, accumulator, chunks

_TILE = 2**24
"""Elements of the weight's gradient that are rounded or added at a time, so that no second copy of it exists."""
_LARGEST_SHARE = 4
"""Binary logarithm of about what the largest weight of a row becomes. fp16 then has 12 bits above it, for slopes,
temperature and scale, and 28 below it, for small probabilities, of which the last 10 cost digits."""


class Gradients:
    """Gradients of the inputs that need one, collected chunk by chunk.

    Those of weight and bias are sums over chunks in fp32 (fp64 for fp64 weights), except that a single chunk's weight
    gradient is made in the dtype of the result. `finish` sums that of the hidden states over the ranks.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: Sequence[bool],
        shard: VocabularyShard,
        plan: RowPlan,
        *,
        scaled_later: bool = False,
    ):
        """
        Args:
            needs: which of the three inputs need a gradient.
            scaled_later: the gradients will be multiplied by a factor (`scaled`), so fp16 inputs get theirs in fp32.
        """
        self.inputs, self.shard, self.plan = (hidden, weight, bias), shard, plan
        self.dtypes = [
            torch.float32 if scaled_later and each == torch.float16 else each
            for each in (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        ]
        """Of the results."""
        wide = accumulator(weight.dtype)
        self.at_once = len(plan.pieces) <= 1
        """Whether there is a single chunk, so that nothing has to be accumulated in fp32."""
        empty = torch.empty_like if plan.length == hidden.shape[0] else torch.zeros_like
        self.hidden = empty(hidden, dtype=wide if shard.group else self.dtypes[0]) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=self.dtypes[1] if self.at_once else wide) if needs[1] else None
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

        With `scaled_later`, those of fp16 inputs are in fp32. Sums that of the hidden states over the ranks first (a
        collective), so call it once.
        """
        if self.hidden is not None:
            self.shard.sum_(self.hidden)
        made = zip((self.hidden, self.weight, self.bias), self.dtypes)
        return tuple(None if grad is None else grad.to(dtype) for grad, dtype in made)


def enlargement(inputs: Sequence[Tensor | None], weights: Sequence[Tensor | None]) -> Tensor | None:
    """The power of two that brings the largest weight near 2^_LARGEST_SHARE, a scalar; None if no input is in fp16.

    It is computed without waiting for a GPU.

    Args:
        weights: [M] per differentiable value; None within for a value without weight.
    """
    given = [each.abs() for each in weights if each is not None]
    if not given or all(each is None or each.dtype != torch.float16 for each in inputs):
        return None
    largest = torch.cat([*given, given[0].new_zeros(1)]).amax()
    exponent = _LARGEST_SHARE - torch.frexp(largest).exponent.clamp(-100, 100)
    return torch.ldexp(torch.ones_like(largest), exponent)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient · factor in `dtype`, rounded once. If dtypes differ, it is computed in tiles of rows.

    Args:
        factor: a scalar tensor.
    """
    if gradient.dtype == factor.dtype == dtype:
        return gradient * factor
    out = torch.empty_like(gradient, dtype=dtype)
    for rows in _tiles(gradient):
        out[rows] = gradient[rows].to(factor.dtype) * factor
    return out


def _tiles(gradient: Tensor) -> Iterator[slice]:
    """Slices of rows that tile a gradient of a weight or of hidden states, of at most _TILE elements or one row."""
    return chunks(gradient.shape[0], max(1, _TILE // max(gradient[:1].numel(), 1)))
