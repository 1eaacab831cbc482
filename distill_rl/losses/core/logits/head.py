"""An output layer applied to a chunk of hidden states at a time.

Products are accumulated in fp32 and never rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from distill_rl.losses.core.streaming import Buffers, Centre, accumulator, chunks
from distill_rl.losses.targets import DenseLogits, TeacherHidden

_TILE = 2**18
"""Elements of a tile of the weight: 1 MiB of fp32."""


class Head:
    """logits = softcap(scale · hidden · Wᵀ + bias) on this rank's rows of W; hidden [n, H], W [Vl, H], bias [Vl]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, softcap: float | None = None, scale: float = 1.0):
        self.weight, self.bias, self.softcap, self.scale = weight, bias, softcap, scale

    def apart(self) -> tuple[tuple[Tensor, ...], Head]:
        """Its tensors, and the same layer without them."""
        tensors = (self.weight,) if self.bias is None else (self.weight, self.bias)
        return tensors, Head(self.weight.new_empty(0), None, self.softcap, self.scale)

    def of(self, tensors: Sequence[Tensor]) -> Head:
        """The same layer with the tensors that `apart` returned."""
        weight, *bias = tensors
        return Head(weight, bias[0] if bias else None, self.softcap, self.scale)

    def load(
        self, name: str, hidden: Tensor, buffers: Buffers, centre: Centre, rows: slice, *, first: bool = False
    ) -> Tensor:
        """Computes the logits of these rows and centres and scales them as `Buffers.load` does, [n, width].

        Args:
            name: of the buffer that receives them.
            hidden: the rows' hidden states [n, H].
            first: during the first pass, which measures the centre.
        """
        buffer = buffers.buffer(name, hidden.shape[0])
        logits = buffer[:, : buffers.columns]
        self.logits(hidden, logits)
        return buffers.finish(buffer, logits, centre, rows, first=first)

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Writes softcap(scale · hidden · Wᵀ + bias) into `out`, [n, Vl] in fp32 (fp64 for fp64 weights).

        Columns whose bias is −inf are masked and stay −inf under a softcap.
        """
        self._product(hidden, out)
        if self.scale != 1:
            out.mul_(self.scale)
        if self.bias is not None:
            out.add_(self.bias)
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
            if self.bias is not None:
                out.masked_fill_(self.bias == -torch.inf, -torch.inf)  # the cap has turned masked columns into −softcap

    def cap_slope(self, loaded: Tensor, centre: Centre, rows: slice, buffers: Buffers) -> Tensor | None:
        """∂ logits/∂ (uncapped logits) = 1 − tanh², [n, width]; None without a softcap.

        Args:
            loaded: what `load` returned for these rows, moved to the ranks' common centre; left as it is.
            buffers: the slope is written into its buffer `cap`.
        """
        if self.softcap is None:
            return None
        slope = torch.mul(loaded, 1 / (centre.scale * self.softcap), out=buffers.buffer("cap", loaded.shape[0]))
        slope.add_((centre.value[rows] / self.softcap)[:, None])
        return slope.square_().neg_().add_(1).clamp_min_(0)  # a masked column is at −inf

    def cap_slope_of(self, logits: Tensor, buffers: Buffers) -> Tensor | None:
        """As `cap_slope`, from logits [n, width] that are neither centred nor scaled."""
        if self.softcap is None:
            return None
        slope = torch.mul(logits, 1 / self.softcap, out=buffers.buffer("cap", logits.shape[0]))
        return slope.square_().neg_().add_(1).clamp_min_(0)

    def hidden_gradient(self, gradient: Tensor) -> Tensor:
        """gradient · W, this rank's part of the hidden states' gradient, [n, H] in fp32 (fp64 for fp64 weights).

        The caller sums the parts over the ranks.

        Args:
            gradient: [n, Vl], with respect to hidden · Wᵀ, before scale, bias and softcap.
        """
        wide = accumulator(self.weight.dtype)
        if self.weight.is_cuda or self.weight.dtype == wide:
            return multiply(gradient, self.weight, self.weight.dtype)
        total = gradient.new_zeros(gradient.shape[0], self.weight.shape[1])
        for columns, tile in self._tiles(wide):
            total.addmm_(gradient[:, columns], tile)
        return total

    def _product(self, hidden: Tensor, out: Tensor) -> None:
        """Writes hidden · Wᵀ into `out` [n, Vl], which is fp32 (fp64 for fp64 weights), accumulated in that dtype."""
        if self.weight.dtype == out.dtype:
            torch.mm(hidden.to(out.dtype), self.weight.T, out=out)
        elif self.weight.is_cuda:  # bf16 or fp16 inputs, fp32 accumulation and output
            torch.mm(hidden.to(self.weight.dtype), self.weight.T, out_dtype=out.dtype, out=out)
        else:
            hidden = hidden.to(out.dtype)
            for columns, tile in self._tiles(out.dtype):
                torch.mm(hidden, tile.T, out=out[:, columns])

    def _tiles(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yields slices of the weight's rows with those rows in `dtype`, a cache-sized tile at a time.

        All tiles share one buffer: each is valid only until the next. A CPU's bf16 products are rounded to bf16, so it
        multiplies in fp32; an fp32 copy of the whole weight would be the largest tensor of all.
        """
        buffer = self.weight.new_empty(max(1, _TILE // max(self.weight.shape[1], 1)), self.weight.shape[1], dtype=dtype)
        for columns in chunks(self.weight.shape[0], buffer.shape[0]):
            tile = buffer[: columns.stop - columns.start]
            yield columns, tile.copy_(self.weight[columns])


def multiply(a: Tensor, b: Tensor, narrow: torch.dtype) -> Tensor:
    """The matrix product a · b in fp32, or in fp64 if `narrow` is fp64.

    On a GPU both inputs are rounded to `narrow` first and accumulated in fp32; a CPU multiplies in the result's dtype.
    """
    wide = accumulator(narrow)
    if a.is_cuda and narrow != wide:
        return torch.mm(a.to(narrow), b.to(narrow), out_dtype=wide)
    return a.to(wide) @ b.to(wide)


class TeacherLogits:
    """Rows of a teacher's logits over its whole vocabulary, which it sends, or which its hidden states yield."""

    def __init__(self, teacher: DenseLogits | TeacherHidden):
        self.label_logprob = teacher.label_logprob
        """As in the targets."""
        if isinstance(teacher, DenseLogits):
            self._rows, self._head = teacher.logits.detach(), None
            self.columns = self._rows.shape[1]
            return
        weight, bias = teacher.lm_head_weight.detach(), teacher.bias
        self._rows = teacher.hidden.detach()
        self._head = Head(weight, None if bias is None else bias.detach(), teacher.softcap, teacher.logit_scale)
        self.columns = weight.shape[0]

    @property
    def num_rows(self) -> int:
        return self._rows.shape[0]

    @property
    def computed(self) -> bool:
        """Whether its logits are computed from hidden states, and do not exist."""
        return self._head is not None

    def of(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The logits of the rows with these numbers, [n, V_t], a copy."""
        found = self._rows.index_select(0, rows)
        if self._head is None:
            return found.to(dtype)
        weight = self._head.weight
        logits = torch.empty(len(rows), self.columns, dtype=accumulator(weight.dtype), device=weight.device)
        self._head.logits(found, logits)
        return logits.to(dtype)

    def to_save(self) -> tuple[Tensor, ...]:
        """Returns the teacher's tensors and drops them until `restore`; see `RowFunction.to_save`."""
        rows, self._rows = self._rows, self._rows.new_empty(0)
        if self._head is None:
            return (rows,)
        tensors, self._head = self._head.apart()
        return rows, *tensors

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """See `RowFunction.restore`."""
        self._rows, *rest = tensors
        if self._head is not None:
            self._head = self._head.of(rest)


class HiddenChunks:
    """Teacher logits computed from its hidden states [N, Ht], a chunk at a time."""

    def __init__(self, hidden: Tensor, head: Head):
        self.hidden, self.head = hidden, head

    def load(self, rows: slice, buffers: Buffers, centre: Centre, *, first: bool) -> Tensor:
        """The teacher's centred logits u of these rows, [n, width], in the buffer `teacher`. Read-only.

        They are computed only if the buffer does not hold them already; if it holds them with this rank's first centre,
        they are shifted to the common one.

        Args:
            first: during the first pass, before the ranks agree on a common centre.
        """
        if buffers.held.get("teacher") != (rows, first):
            again = buffers.held.get("teacher") == (rows, True)
            buffer = buffers.buffer("teacher", rows.stop - rows.start)
            if not again:
                self.head.load("teacher", self.hidden[rows], buffers, centre, rows, first=first)
            elif centre.split:
                buffer.add_(centre.moved(rows)[:, None])
            buffers.held["teacher"] = rows, first
        return buffers.buffer("teacher", rows.stop - rows.start)

    def plain(self, rows: slice, buffers: Buffers) -> tuple[Tensor, Tensor | None]:
        """See `TeacherChunks.plain`. Computed only if the buffer `plain` does not hold these rows already."""
        logits = buffers.buffer("plain", rows.stop - rows.start)[:, : buffers.columns]
        if buffers.held.get("plain") != (rows, False):
            self.head.logits(self.hidden[rows], logits)
            buffers.held["plain"] = rows, False
        return logits, None

    def select(self, kept: Tensor) -> HiddenChunks:
        return HiddenChunks(self.hidden[kept], self.head)

    def to_save(self) -> tuple[Tensor, ...]:
        hidden, self.hidden = self.hidden, self.hidden.new_empty(0)
        tensors, self.head = self.head.apart()
        return hidden, *tensors

    def restore(self, tensors: Sequence[Tensor]) -> None:
        self.hidden, *rest = tensors
        self.head = self.head.of(rest)
