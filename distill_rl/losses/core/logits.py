"""Logits of a student and a teacher, which exist as a whole or are computed from hidden states, a chunk of rows at a time.

With z = scale · hidden · Wᵀ + bias, softcapped (`Head`), and G = ∂loss/∂z of a chunk [n, Vl] before the softcap:

    ∂loss/∂hidden = scale · G · W   (summed over the tensor-parallel ranks)
    ∂loss/∂W += scale · Gᵀ · hidden        ∂loss/∂bias += Σ_rows G

There are two ways to get G. `FusedLoss` knows in advance how much every row counts, as a sum or a mean does, and makes
the gradients in forward while a chunk's logits exist: 6·N·H·Vl operations. What comes in for the loss, such as the factor
of a loss scaler, multiplies them in backward, and fp16 cannot hold what they are before (`Gradients`). `RowValues`
returns differentiable values per row, and computes the logits again in backward: 8·N·H·Vl operations, and 2·N·H·Vl more
for each pass after the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils import _pytree as pytree

from distill_rl.losses.core import checks
from distill_rl.losses.core.checks import Backend
from distill_rl.losses.core.rows import (
    PRODUCT_ROWS,
    Buffers,
    Centre,
    Grads,
    RowFunction,
    RowKernels,
    RowPlan,
    Visit,
    accumulator,
    chunks,
    default_chunk,
    padded_width,
)
from distill_rl.losses.core.shards import VocabularyShard, local_like, split
from distill_rl.losses.kernels import choose_kernels
from distill_rl.losses.targets import DenseLogits, TeacherHidden

_LEAST_ROWS = 16
_CUDA_ROWS = 2048
"""Rows per chunk on CUDA, if memory allows: with fewer, adding to the weight's gradient takes longer than the products."""
_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 192 * 2**20, 2**30
"""What a chunk's logits and all that is computed from them may take together, unless that is less than `_LEAST_ROWS`."""
_BYTES = {False: 12, True: 32}
"""Per logit of a chunk: logits, exponentials and gradient; with a dense teacher also its logits, and both distributions."""
_KERNEL_BYTES = {False: 8, True: 12}
"""The same with kernels, which need no exponentials and no distributions."""
_WEIGHT_TILE = 2**18
"""Elements of a tile of a weight: 1 MiB of fp32."""
_GRADIENT_TILE = 2**24
"""Elements of a gradient that are rounded or added at a time, so that no second copy of it exists."""
_LARGEST_SHARE = 4
"""Binary logarithm of about what the largest weight of a row becomes. fp16 then has 12 bits above it, for slopes,
temperature and scale, and 28 below it, for small probabilities, of which the last 10 cost digits."""

Entry = TypeVar("Entry", bound=Callable[..., Any])
Output = TypeVar("Output")


# What all functions and outputs of this package share: torch.compile does not trace them, they choose their own dtypes,
# and second derivatives raise an error instead of silently being 0.


def as_tree(cls: type[Output]) -> type[Output]:
    """Decorator of a dataclass: registers it as a torch pytree of its fields and returns it unchanged.

    So torch.compile, checkpointing and FSDP see the tensors inside.
    """
    pytree.register_dataclass(cls, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
    return cls


def untraced(entry: Entry) -> Entry:
    """Decorator of the public functions: torch.compile does not trace them; a compiled caller has a graph break there.

    Traced, the loop over chunks would be unrolled, or broken at every collective.
    """
    return cast(Entry, torch.compiler.disable(entry))


def own_dtypes(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of an autograd function's `forward`: runs it with autocast disabled on the device of its first tensor.

    Autocast would do its matrix products in bf16.
    """

    @wraps(forward)
    def wrapped(ctx: Any, tensor: Tensor, *arguments: Any) -> Any:
        with _without_autocast(tensor.device.type):
            return forward(ctx, tensor, *arguments)

    return wrapped


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of an autograd function's `backward`: runs it without autocast and without building a graph.

    It calls `backward(ctx, saved, *grads)`, `saved` being `ctx.saved_tensors`, which are read once: hooks on saved
    tensors may move them anew at each reading, and `torch.utils.checkpoint` refuses a second one. If `ctx.refusal` is
    set, it is raised as a RuntimeError before they are read.

    With `create_graph=True` the returned gradients raise RuntimeError when they are differentiated in turn.

    torch's `once_differentiable` does this only if an incoming gradient requires a gradient. The second derivative of a
    loss that is the root of its graph would silently be 0.
    """

    @wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor | None) -> Any:
        if refusal := getattr(ctx, "refusal", None):
            raise RuntimeError(refusal)
        saved = ctx.saved_tensors
        device = next((each.device.type for each in grads if each is not None), "cpu")
        with torch.no_grad(), _without_autocast(device):
            found = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():
            return found
        # The saved inputs keep the gradients connected to the graph, so that differentiating them reaches `_Refusing`.
        sources = [each for each in (*saved, *grads) if each is not None and each.requires_grad]
        return tuple(_Refusing.apply(each, *sources) if isinstance(each, Tensor) else each for each in found)

    return wrapped


def _without_autocast(device: str) -> torch.autocast:
    known = torch.amp.is_autocast_available(device)  # not on the meta device
    return torch.autocast(device if known else "cpu", enabled=False)


class _Refusing(torch.autograd.Function):
    """Copies a gradient, connected to the graph by `sources`; backward through the copy raises RuntimeError."""

    @staticmethod
    def forward(ctx, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone()  # a view could not be modified in place downstream

    @staticmethod
    def backward(ctx, *grads: Tensor):
        rule = "the losses of this package have first derivatives only"
        raise RuntimeError(f"second derivative: {rule}; take it of losses.reference, which is plain autograd in fp64")


class _Anchor(torch.autograd.Function):
    """An empty tensor connected to another one in the graph, without keeping its memory alive. No gradient goes back."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None


# Output layers.


class Head:
    """logits = softcap(scale · hidden · Wᵀ + bias) on this rank's rows of W; hidden [n, H], W [Vl, H], bias [Vl].

    Products are accumulated in fp32 and never rounded to bf16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, softcap: float | None = None, scale: float = 1.0):
        self.weight, self.bias, self.softcap, self.scale = weight, bias, softcap, scale

    def load(
        self, name: str, hidden: Tensor, buffers: Buffers, centre: Centre, rows: slice, *, first: bool = False
    ) -> Tensor:
        """Computes the logits of these rows from hidden [n, H]; centres and scales them as `Buffers.load`, [n, width]."""
        buffer = buffers.buffer(name, hidden.shape[0])
        logits = buffer[:, : buffers.columns]
        self.logits(hidden, logits)
        return buffers.finish(buffer, logits, centre, rows, first=first)

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Writes the logits into `out`, [n, Vl] in fp32 (fp64 for fp64 weights).

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

    def cap_slope(
        self, logits: Tensor, buffers: Buffers, centre: Centre | None = None, rows: slice | None = None
    ) -> Tensor | None:
        """∂ logits/∂ (uncapped logits) = 1 − tanh², [n, width] in the buffer `cap`; None without a softcap.

        Args:
            logits: [n, width], left as they are.
            centre: common to all ranks, if the logits are what `load` returned for these rows. None: they are plain.
        """
        if self.softcap is None:
            return None
        scale = 1.0 if centre is None else centre.scale
        slope = torch.mul(logits, 1 / (scale * self.softcap), out=buffers.buffer("cap", logits.shape[0]))
        if centre is not None:
            slope.add_((centre.value[rows] / self.softcap)[:, None])
        return slope.square_().neg_().add_(1).clamp_min_(0)  # a masked column is at −inf

    def hidden_gradient(self, gradient: Tensor) -> Tensor:
        """gradient [n, Vl] · W, this rank's part of the hidden states' gradient, [n, H] in fp32 (fp64 for fp64 weights).

        The gradient is with respect to hidden · Wᵀ, before scale, bias and softcap.
        """
        wide = accumulator(self.weight.dtype)
        if self.weight.is_cuda or self.weight.dtype == wide:
            return _multiply(gradient, self.weight, self.weight.dtype)
        total = gradient.new_zeros(gradient.shape[0], self.weight.shape[1])
        for columns, tile in self._tiles(wide):
            total.addmm_(gradient[:, columns], tile)
        return total

    def _product(self, hidden: Tensor, out: Tensor) -> None:
        """Writes hidden · Wᵀ into `out` [n, Vl], accumulated in its dtype."""
        if self.weight.dtype == out.dtype:
            torch.mm(hidden.to(out.dtype), self.weight.T, out=out)
        elif self.weight.is_cuda:  # bf16 or fp16 inputs, fp32 accumulation and output
            torch.mm(hidden.to(self.weight.dtype), self.weight.T, out_dtype=out.dtype, out=out)
        else:
            hidden = hidden.to(out.dtype)
            for columns, tile in self._tiles(out.dtype):
                torch.mm(hidden, tile.T, out=out[:, columns])

    def _tiles(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yields slices of the weight's rows with those rows in `dtype`, a cache-sized tile at a time."""
        # A CPU's bf16 products are rounded to bf16, so it multiplies in fp32; an fp32 copy of the whole weight would be the
        # largest tensor of all. All tiles share one buffer: each is valid only until the next.
        height, width = max(1, _WEIGHT_TILE // max(self.weight.shape[1], 1)), self.weight.shape[1]
        buffer = self.weight.new_empty(height, width, dtype=dtype)
        for columns in chunks(self.weight.shape[0], height):
            tile = buffer[: columns.stop - columns.start]
            yield columns, tile.copy_(self.weight[columns])


def _multiply(a: Tensor, b: Tensor, narrow: torch.dtype) -> Tensor:
    """The matrix product a · b in fp32, or in fp64 if `narrow` is fp64."""
    # A GPU rounds both to `narrow` first and accumulates in fp32; a CPU multiplies in the result's dtype.
    wide = accumulator(narrow)
    if a.is_cuda and narrow != wide:
        return torch.mm(a.to(narrow), b.to(narrow), out_dtype=wide)
    return a.to(wide) @ b.to(wide)


class DenseTeacher:
    """A teacher's logits, which it sends or which its hidden states yield, for a part of its columns or for all."""

    def __init__(
        self, rows: Tensor, head: Head | None = None, kept: Tensor | None = None, label_logprob: Tensor | None = None
    ):
        """
        Args:
            rows: logits [N, columns], or with `head` hidden states [N, H].
            kept: int64, numbers of the rows that this is about; None: all.
            label_logprob: as in the targets.
        """
        self.computed, self.kept, self.label_logprob = head is not None, kept, label_logprob
        self.num_rows, self.columns = rows.shape[0], rows.shape[1] if head is None else head.weight.shape[0]
        self.held: tuple[Tensor, ...] = (rows,)  # the caller's tensors, see `RowFunction`
        if head is not None:
            self.held += (head.weight,) if head.bias is None else (head.weight, head.bias)
            self._shape = head.softcap, head.scale

    @classmethod
    def of_all_columns(cls, teacher: DenseLogits | TeacherHidden) -> DenseTeacher:
        if isinstance(teacher, DenseLogits):
            return cls(teacher.logits.detach(), label_logprob=teacher.label_logprob)
        bias = None if teacher.bias is None else teacher.bias.detach()
        head = Head(teacher.lm_head_weight.detach(), bias, teacher.softcap, teacher.logit_scale)
        return cls(teacher.hidden.detach(), head, label_logprob=teacher.label_logprob)

    @property
    def _head(self) -> Head:
        _, weight, *bias = self.held
        return Head(weight, bias[0] if bias else None, *self._shape)

    def select(self, kept: Tensor) -> DenseTeacher:
        """The teacher of the rows with the numbers `kept` only, counted anew from 0."""
        rows = self.held[0]
        return DenseTeacher(rows[kept], self._head) if self.computed else DenseTeacher(rows, None, kept)

    def load(self, rows: slice, buffers: Buffers, centre: Centre, *, first: bool) -> Tensor:
        """The columns of these rows, centred and scaled as `Buffers.load`, in the buffer `teacher` [n, width]. Read-only."""
        if not self.computed:
            logits = self.held[0][rows if self.kept is None else self.kept[rows]]
            return buffers.load("teacher", logits, centre, rows, first=first)
        # A second pass over a chunk finds its logits there, if no other chunk came in between.
        buffer, held = buffers.buffer("teacher", rows.stop - rows.start), buffers.held.get("teacher")
        if held not in ((rows, first), (rows, True)):
            self._head.load("teacher", self.held[0][rows], buffers, centre, rows, first=first)
        elif held != (rows, first) and centre.split:
            buffer.add_(centre.moved(rows)[:, None])
        buffers.held["teacher"] = rows, first
        return buffer

    def plain(self, rows: slice, buffers: Buffers) -> tuple[Tensor, Tensor | None]:
        """The columns of these rows, neither centred nor scaled, for kernels. Read-only.

        Returns:
            Logits [n, Vl] and None, or logits [N, Vl] and the int64 numbers [n] of these rows. Columns are contiguous.
        """
        if not self.computed:
            given = self.held[0]
            logits = given if given.stride(-1) == 1 else given.contiguous()
            return (logits[rows], None) if self.kept is None else (logits, self.kept[rows])
        logits = buffers.buffer("plain", rows.stop - rows.start)[:, : buffers.columns]
        if buffers.held.get("plain") != (rows, False):
            self._head.logits(self.held[0][rows], logits)
            buffers.held["plain"] = rows, False
        return logits, None

    def of(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The logits of the rows with these numbers, [n, columns], a copy."""
        found = self.held[0].index_select(0, rows)
        if not self.computed:
            return found.to(dtype)
        weight = self.held[1]
        logits = torch.empty(len(rows), self.columns, dtype=accumulator(weight.dtype), device=weight.device)
        self._head.logits(found, logits)
        return logits.to(dtype)


class Gradients:
    """Gradients of hidden states, weight and bias, those that are needed, collected chunk by chunk.

    Those of weight and bias are sums over chunks in fp32 (fp64 for fp64 weights), except that a single chunk's weight
    gradient is made in the dtype of the result. `finish` sums that of the hidden states over the ranks.

    A gradient that is made before its factor is known, such as that of a loss scaler, may be far too small for fp16: a
    mean over a million tokens makes it smaller than 6e-8, the least that fp16 holds. With `scaled_later` the gradients of
    fp16 inputs

    1. are multiplied on the way by a power of two that makes the largest weight of a row about 16 (`enlargement`), since a
       GPU rounds the logits' gradient to fp16 for its matrix products,
    2. are kept in fp32, and
    3. are rounded to fp16 once they are multiplied by the factor, divided by that power of two (`scaled`).

    bf16 has the range of fp32: its gradients are rounded as soon as they are complete, which takes half of the memory.
    """

    def __init__(self, student: StudentLogits, needs: Sequence[bool], plan: RowPlan, *, scaled_later: bool = False):
        hidden, weight, bias = student.inputs, student.weight, student.bias
        assert weight is not None
        self.inputs, self.shard, self.plan = hidden, student.settings.shard, plan
        self.dtypes = [  # of the results
            torch.float32 if scaled_later and each == torch.float16 else each
            for each in (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        ]
        wide = accumulator(weight.dtype)
        self.at_once = len(plan.pieces) <= 1  # nothing has to be accumulated in fp32
        empty = torch.empty_like if plan.length == hidden.shape[0] else torch.zeros_like
        self.hidden = empty(hidden, dtype=wide if self.shard.group else self.dtypes[0]) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=self.dtypes[1] if self.at_once else wide) if needs[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None

    def add(self, rows: slice, gradient: Tensor, head: Head) -> None:
        """Adds one chunk, from the gradient [n, Vl] of its logits before a softcap, which is overwritten."""
        chunk = self.plan.take(self.inputs, rows)
        if self.bias is not None:
            self.bias.add_(gradient.sum(0))
        if head.scale != 1:
            gradient.mul_(head.scale)
        if gradient.is_cuda and chunk.dtype == head.weight.dtype:
            gradient = gradient.to(chunk.dtype)  # rounded once, used by both products
        if self.hidden is not None:
            self.plan.put(self.hidden, rows, head.hidden_gradient(gradient))
        if self.weight is not None:
            self._add_to_weight(self.weight, gradient, chunk)

    def _add_to_weight(self, total: Tensor, gradient: Tensor, chunk: Tensor) -> None:
        """Adds gradientᵀ · chunk, [Vl, n] · [n, H], to `total`, or sets it if all rows are one chunk."""
        wide = accumulator(total.dtype)
        if total.is_cuda and gradient.dtype == chunk.dtype != wide:  # one product, which adds in fp32 as it writes
            if total.dtype == wide:
                torch.addmm(total, gradient.T, chunk, out_dtype=wide, out=total)
            else:
                torch.mm(gradient.T, chunk, out=total)
            return
        if total.dtype == wide and (not total.is_cuda or chunk.dtype == wide):
            total.addmm_(gradient.T, chunk.to(wide))
            return
        narrow, chunk = chunk.dtype, chunk if total.is_cuda else chunk.to(wide)
        for columns in _tiles(total):
            product = _multiply(gradient[:, columns].T, chunk, narrow)
            if self.at_once:
                total[columns] = product
            else:
                total[columns] += product

    def finish(self) -> tuple[Tensor | None, ...]:
        """Returns the gradients of hidden, weight and bias in their dtypes; None where none is needed.

        Sums that of the hidden states over the ranks first (a collective), so call it once.
        """
        if self.hidden is not None:
            self.shard.sum_(self.hidden)
        made = (self.hidden, self.weight, self.bias)
        return tuple(None if one is None else one.to(dtype) for one, dtype in zip(made, self.dtypes))


def enlargement(inputs: Sequence[Tensor | None], weights: Sequence[Tensor | None]) -> Tensor | None:
    """The power of two that brings the largest weight near 2^_LARGEST_SHARE, a scalar; None if no input is in fp16.

    It is computed without waiting for a GPU.
    """
    given = [each.abs() for each in weights if each is not None]
    if not given or all(each is None or each.dtype != torch.float16 for each in inputs):
        return None
    largest = torch.cat([*given, given[0].new_zeros(1)]).amax()
    exponent = _LARGEST_SHARE - torch.frexp(largest).exponent.clamp(-100, 100)
    return torch.ldexp(torch.ones_like(largest), exponent)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient · factor in `dtype`, rounded once. If dtypes differ, it is computed in tiles of rows."""
    if gradient.dtype == factor.dtype == dtype:
        return gradient * factor
    out = torch.empty_like(gradient, dtype=dtype)
    for rows in _tiles(gradient):
        out[rows] = gradient[rows].to(factor.dtype) * factor
    return out


def _tiles(gradient: Tensor) -> Iterator[slice]:
    return chunks(gradient.shape[0], max(1, _GRADIENT_TILE // max(gradient[:1].numel(), 1)))


# The student.


@dataclass(frozen=True, slots=True)
class StudentHidden:
    """Hidden states and the output layer: losses make the logits a chunk of rows at a time."""

    hidden: Tensor
    """[N, H] or [B, S, H], the same on every tensor-parallel rank (plain, or a DTensor Replicate); its gradient arrives
    complete on every rank"""
    lm_head_weight: Tensor
    """[V, H]; a DTensor Shard(0) over ranks that work on the same rows (the hidden states are replicated over the same
    group, its mesh dimension is called "tp", or `tp_group` names it), or with `tp_group` this rank's [Vl, H]. Its
    gradient is the shard's."""
    bias: Tensor | None = None
    """[V], sharded as the weight; −inf masks a column"""
    softcap: float | None = None
    """logits = softcap · tanh(logits / softcap), before the temperature"""
    logit_scale: float = 1.0
    """factor on hidden · Wᵀ"""
    num_tokens: int | None = None
    """columns from this one on stand for no token and are masked; None: every column is one"""


Student = Tensor | StudentHidden


@dataclass(frozen=True)
class _StudentSettings:
    """What an autograd function may keep of the student: everything but its tensors."""

    shard: VocabularyShard
    backend: Backend | None
    inplace: bool = False  # write the gradient over the logits
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class StudentLogits:
    """The student's logits [N, Vl] of this rank's columns: given, or softcap(scale · hidden · Wᵀ + bias)."""

    inputs: Tensor
    """logits [N, Vl], or with `weight` hidden states [N, H]"""
    settings: _StudentSettings
    weight: Tensor | None = None
    """[Vl, H], this rank's rows of the output layer"""
    bias: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.inputs.shape[0]

    @property
    def head(self) -> Head:
        """The output layer, only with `weight`."""
        assert self.weight is not None
        return Head(self.weight.detach(), self.bias, self.settings.softcap, self.settings.scale)

    @property
    def like(self) -> Tensor:
        """Empty, with the device and dtype of the arithmetic on the logits."""
        tensor = self.inputs if self.weight is None else self.weight
        return tensor.new_empty(0, dtype=accumulator(tensor.dtype))

    def stream(self, function: RowFunction, plan: RowPlan, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Streams rows through a row function; returns its differentiable values and then its constants.

        Both are of the plan's M rows, in its order.

        Args:
            parameters: of the function, which already holds them. Passed so that autograd asks for their gradients.
        """
        return RowValues.apply(self.inputs, self.weight, self.bias, _Work(self.settings, function, plan), *parameters)

    def loss(self, function: RowFunction, plan: RowPlan, weights: Grads) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """What `stream` returns, preceded by Σ weights · values, or by None if the caller must compute that from the values.

        Args:
            weights: [M] per differentiable value; None within for one that does not enter the loss.
        """
        if self.weight is None:
            return None, self.stream(function, plan)
        inputs: list[Tensor | None] = [self.inputs, self.weight, self.bias]
        if not torch.is_grad_enabled():
            # Inside forward it never is, and parameters still say that they need a gradient.
            inputs = [None if each is None else each.detach() for each in inputs]
        anchors = [_Anchor.apply(each) for each in inputs if each is not None and each.requires_grad]
        loss, *values = FusedLoss.apply(*inputs, _Work(self.settings, function, plan), weights, *anchors)
        return loss, tuple(values)

    @torch.no_grad()
    def rows(self, numbers: Tensor) -> Tensor:
        """A copy of the logits of these rows, [n, Vl], without a gradient."""
        found = self.inputs.detach().index_select(0, numbers)
        if self.weight is None:
            return found
        logits = self.like.new_empty(len(numbers), self.settings.shard.size)
        self.head.logits(found, logits)
        return logits

    def default_chunk(
        self, columns: int, *, dense: bool, computed: bool = False, function: RowFunction | None = None
    ) -> int:
        """Rows to work on at once, if there are this many columns.

        Args:
            dense: whether every column is compared, which takes more copies of a chunk than top-k targets or labels.
            computed: whether the teacher's logits are computed from hidden states, too, a chunk at a time.
            function: what is computed; if it has kernels, these take fewer copies. None: not known yet.
        """
        if self.weight is None:
            return default_chunk(columns, self.inputs.device, dense=dense, computed=computed)
        found = None if function is None else choose_kernels(function, self.like.new_empty(1, 1), self.settings.backend)
        return computed_chunk(self.inputs.shape[1], columns, self.inputs.device, dense=dense, kernels=found is not None)

    def apart(self, numbers: Tensor) -> tuple[StudentLogits, StudentLogits]:
        """All rows, and once more the rows with these numbers. The gradients of both reach the student."""
        if self.weight is not None:
            return self, replace(self, inputs=self.inputs.index_select(0, numbers))
        whole, some = _RowsApart.apply(self.inputs, numbers)
        return replace(self, inputs=whole), replace(self, inputs=some)


def computed_chunk(hidden_size: int, columns: int, device: torch.device, *, dense: bool, kernels: bool = False) -> int:
    """Rows of logits to compute at a time, a multiple of 16.

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


class _Chunks(ABC):
    """One chunk of logits at a time, and the row function's work on it, by torch or by kernels."""

    kernels: RowKernels | None
    pieces: Sequence[slice]  # the rows that are visited at once
    u: Tensor  # [n, width] of the chunk at hand: centred and scaled, but as they are for kernels

    def __init__(self, student: StudentLogits, function: RowFunction, plan: RowPlan):
        self.inputs, self.settings, self.function, self.plan = student.inputs, student.settings, function, plan
        self.pieces, self.u = plan.pieces, student.like
        size, given = max([1, *(rows.stop - rows.start for rows in plan.pieces)]), student.weight is None
        self.buffers = Buffers(size, self.settings.shard.size, self.u.dtype, self.u.device, reloaded=given)

    @abstractmethod
    def load(self, rows: slice, *, first: bool = False) -> None:
        """Makes these rows the chunk at hand. The first pass measures their centre."""

    @abstractmethod
    def visit(self, rows: slice) -> Visit:
        """What kernels read in its place."""

    def collect(self, rows: slice, number: int) -> None:
        """The row function's pass with this number over the chunk at hand."""
        if self.kernels is None:
            self.function.passes[number][0](rows, self.u, self.buffers)
        else:
            self.kernels.collect(self.visit(rows))

    def forward(self) -> None:
        """Streams all chunks through one pass after another: a pass may need what the one before found for other rows."""
        for number, (_, complete) in enumerate(self.function.passes):
            for rows in self.pieces:
                self.load(rows, first=number == 0)
                self.collect(rows, number)
            complete(slice(0, self.plan.length))


class _GivenChunks(_Chunks):
    """Of logits [N, Vl] that the caller computed. Kernels read them in place, all rows at once where they can."""

    def __init__(self, student: StudentLogits, function: RowFunction, plan: RowPlan):
        super().__init__(student, function, plan)
        self.kernels = choose_kernels(function, self.inputs, self.settings.backend)
        if self.kernels is not None and not self.kernels.by_chunk:
            self.pieces = [slice(0, plan.length)]

    def load(self, rows: slice, *, first: bool = False) -> None:
        if self.kernels is None:
            chunk = self.plan.take(self.inputs, rows)
            self.u = self.buffers.load("student", chunk, self.function.centre, rows, first=first)

    def visit(self, rows: slice) -> Visit:
        if self.plan.order is None:
            return Visit(rows, self.inputs[rows], None, self.buffers)
        return Visit(rows, self.inputs, self.plan.order[rows], self.buffers)

    def backward(self, grads: Grads) -> Tensor:
        """The gradient of the logits, in their dtype; 0 for rows that are not streamed. Maybe in the logits' own memory.

        Args:
            grads: [M] per differentiable value; None for one that does not enter the loss.
        """
        out = self._empty_gradient()
        weights = self.function.weights(slice(0, self.plan.length), grads) if self.kernels is None else grads
        for rows in self.pieces:
            shares = _parts(weights, rows)
            if self.kernels is None:
                self.load(rows)
                gradient = self.function.gradient(rows, self.u, shares, self.buffers)
                self.plan.put(out, rows, gradient[:, : self.buffers.columns])
            else:
                visit, counts = self.visit(rows), self.plan.counts
                of_visit = out if visit.order is not None else out[rows]
                counts = None if counts is None or visit.order is not None else counts[rows]
                self.kernels.gradient(visit, shares, of_visit, counts)
        return out

    def _empty_gradient(self) -> Tensor:
        logits, order = self.inputs, self.plan.order
        whole = self.plan.length == logits.shape[0]
        if not self.settings.inplace:
            return torch.empty_like(logits) if whole else torch.zeros_like(logits)
        out = logits.detach()
        if not whole:
            assert order is not None
            others = torch.ones(out.shape[0], dtype=torch.bool, device=out.device).index_fill_(0, order, False)
            out.index_fill_(0, others.nonzero()[:, 0], 0)
        return out


class _ComputedChunks(_Chunks):
    """Of logits that are computed from hidden states [N, H]."""

    def __init__(self, student: StudentLogits, function: RowFunction, plan: RowPlan):
        super().__init__(student, function, plan)
        self.head = head = student.head
        self.kernels = choose_kernels(function, self.buffers.buffer("student", 1), self.settings.backend)
        # The kernels' gradient is in the dtype to which both products round it anyway where nothing comes in between.
        summed = head.bias is not None and head.bias.requires_grad
        rounded = head.weight.is_cuda and self.inputs.dtype == head.weight.dtype and not summed and head.scale == 1
        self.narrow = head.weight.dtype if rounded and head.softcap is None else self.u.dtype

    def load(self, rows: slice, *, first: bool = False) -> None:
        hidden = self.plan.take(self.inputs, rows)
        if self.kernels is None:
            self.u = self.head.load("student", hidden, self.buffers, self.function.centre, rows, first=first)
        else:
            self.u = self.buffers.buffer("student", hidden.shape[0])
            self.head.logits(hidden, self.u[:, : self.buffers.columns])

    def visit(self, rows: slice) -> Visit:
        return Visit(rows, self.u[:, : self.buffers.columns], None, self.buffers)

    def forward_by_chunk(self, gradients: Gradients | None, weights: Sequence[Tensor | None]) -> None:
        """Streams every chunk through all passes and, with `gradients`, adds its gradient while its logits exist.

        Args:
            weights: ∂loss/∂value [M] per value; None within for a value that does not enter the loss.
        """
        for rows in self.pieces:
            self.load(rows, first=True)
            for number, (_, complete) in enumerate(self.function.passes):
                self.collect(rows, number)
                complete(rows)
                if number == 0 and self.kernels is None and self.settings.shard.group is not None:
                    self.u.add_(self.function.centre.moved(rows)[:, None])  # from this rank's centre to the common one
            if gradients is not None:
                gradients.add(rows, self._gradient(rows, weights), self.head)

    def backward(self, gradients: Gradients, grads: Grads) -> None:
        """Computes each chunk's logits again and adds its gradients to `gradients`."""
        for rows in self.pieces:
            self.load(rows)
            gradients.add(rows, self._gradient(rows, grads), self.head)

    def _gradient(self, rows: slice, grads: Grads) -> Tensor:
        """∂(Σ grads · values)/∂ (the chunk's logits before a softcap), [n, Vl]; overwrites the chunk."""
        columns, shares = self.buffers.columns, _parts(grads, rows)
        if self.kernels is None:
            slope = self.head.cap_slope(self.u, self.buffers, self.function.centre, rows)
            weights = self.function.weights(rows, shares)
            gradient = self.function.gradient(rows, self.u, weights, self.buffers)
        else:
            slope = self.head.cap_slope(self.u, self.buffers)
            gradient = self.u if self.narrow == self.u.dtype else torch.empty_like(self.u, dtype=self.narrow)
            self.kernels.gradient(self.visit(rows), shares, gradient[:, :columns], None)
        return (gradient if slope is None else gradient.mul_(slope))[:, :columns]


def _parts(grads: Grads, rows: slice) -> list[Tensor | None]:
    return [None if grad is None else grad[rows] for grad in grads]


class _Work(NamedTuple):
    """What an autograd function does, and keeps, besides its tensors."""

    settings: _StudentSettings
    function: RowFunction
    plan: RowPlan


class RowValues(torch.autograd.Function):
    """A row function of the student's logits → its values, then its constants, of the plan's M rows in its order."""

    @staticmethod
    @own_dtypes
    def forward(
        ctx, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, work: _Work, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        settings, function, plan = work
        student = StudentLogits(inputs, settings, weight, bias)
        (_GivenChunks if weight is None else _ComputedChunks)(student, function, plan).forward()
        values, constants = function.outputs()
        ctx.save_for_backward(inputs, weight, bias, *function.exchange())
        ctx.work, ctx.num_values, ctx.num_parameters = work, len(values), len(parameters)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constants)
        return *values, *constants

    @staticmethod
    @first_derivative
    def backward(ctx, saved: Sequence[Tensor], *grads: Tensor | None):
        inputs, weight, bias, *others = saved
        (settings, function, plan), shares = ctx.work, grads[: ctx.num_values]
        function.exchange(others)
        student = StudentLogits(inputs, settings, weight, bias)
        found: tuple[Tensor | None, ...]
        if weight is None:
            if settings.inplace:
                ctx.refusal = "inplace_backward: the gradient has overwritten the logits, a second backward has none"
            found = _GivenChunks(student, function, plan).backward(shares), None, None
        else:
            # The chunks' buffers are freed before the gradients are rounded, which needs memory, too.
            gradients = Gradients(student, ctx.needs_input_grad[:3], plan)
            _ComputedChunks(student, function, plan).backward(gradients, shares)
            found = gradients.finish()
        function.exchange()
        parameters = function.parameter_gradients() if ctx.num_parameters else ()
        return *found, None, *parameters


class FusedLoss(torch.autograd.Function):
    """Σ weights · values of a row function, then its values and constants [M]. Only the sum is differentiable.

    Hidden states [N, H], weight [Vl, H] and bias [Vl] get their gradients in forward (module docstring). The anchors are
    empty tensors connected to the inputs that require a gradient, so that a second derivative is refused.
    """

    @staticmethod
    @own_dtypes
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        work: _Work,
        weights: Sequence[Tensor | None],
        *anchors: Tensor,
    ) -> tuple[Tensor, ...]:
        settings, function, plan = work
        needs, inputs = ctx.needs_input_grad[:3], (hidden, weight, bias)
        student = StudentLogits(hidden, settings, weight, bias)
        gradients, ctx.enlarged, shares = None, None, weights
        if any(needs):
            gradients = Gradients(student, needs, plan, scaled_later=True)
            ctx.enlarged = enlargement(inputs, weights)
        if ctx.enlarged is not None:
            shares = [None if share is None else share * ctx.enlarged for share in weights]
        _ComputedChunks(student, function, plan).forward_by_chunk(gradients, shares)
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
        factor, made, anchors = grads[0], saved[:3], saved[3:]
        assert factor is not None
        if ctx.enlarged is not None:
            factor = factor / ctx.enlarged
        found = (None if one is None else scaled(one, factor, dtype) for one, dtype in zip(made, ctx.dtypes))
        return *found, *[None] * (2 + len(anchors))


class _RowsApart(torch.autograd.Function):
    """Returns the logits [N, Vl] (a view) and a copy of some rows."""

    # The copy's gradient is added in place to that of the view: autograd would otherwise allocate a second gradient of
    # the logits' size.

    @staticmethod
    def forward(ctx, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, logits)
        ctx.set_materialize_grads(False)
        return logits.view_as(logits), logits.index_select(0, rows)

    @staticmethod
    @first_derivative
    def backward(ctx, saved: Sequence[Tensor], whole: Tensor | None, apart: Tensor | None):
        rows, logits = saved
        if whole is None:
            whole = torch.zeros_like(logits)
        if apart is not None:
            whole.index_add_(0, rows, apart)
        return whole, None


def student_of(
    student: Student,
    tp_group: ProcessGroup | None,
    name: str,
    *,
    inplace: bool = False,
    backend: Backend | None = "eager",
) -> tuple[StudentLogits, VocabularyShard, torch.Size]:
    """The student's logits of this rank's columns, which columns these are, and the dimensions of the rows.

    Args:
        name: of the argument that holds logits, for error messages.
        inplace: write the gradient over the logits; no effect on hidden states, which have none to overwrite.

    Raises:
        ValueError: shapes, dtypes or shardings that do not fit each other, a softcap or scale that is not positive, or
            `inplace` with logits that are a leaf.
    """
    if isinstance(student, StudentHidden):
        return _computed(student, tp_group, backend)
    checks.floating(name, student, (2, 3))
    logits, shard = split(student, tp_group, dim=-1, name=name)
    if inplace and logits.is_leaf and logits.requires_grad:
        raise ValueError("inplace_backward: overwrites the logits, which must be the output of something; got a leaf")
    leading = logits.shape[:-1]
    flat = logits.reshape(leading.numel(), shard.size)
    return StudentLogits(flat, _StudentSettings(shard, backend, inplace)), shard, leading


def _computed(
    student: StudentHidden, tp_group: ProcessGroup | None, backend: Backend | None
) -> tuple[StudentLogits, VocabularyShard, torch.Size]:
    hidden, weight, bias = student.hidden, student.lm_head_weight, student.bias
    if student.softcap is not None:
        checks.positive("softcap", student.softcap)
    checks.positive("logit_scale", student.logit_scale)
    checks.floating("hidden", hidden, (2, 3))
    checks.floating("lm_head_weight", weight, (2,))
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"lm_head_weight: must be [V, {hidden.shape[-1]}], the hidden size; got {list(weight.shape)}")
    local, shard = split(weight, None if isinstance(weight, DTensor) else tp_group, dim=0, name="lm_head_weight")
    if isinstance(weight, DTensor):
        _require_same_rows(hidden, weight, shard, tp_group)
    if isinstance(hidden, DTensor):
        if not all(_keeps_width(placement, hidden.ndim) for placement in hidden.placements):
            raise ValueError(f"hidden: a DTensor must be replicated over the group; got {hidden.placements}")
        hidden = hidden.to_local()
    if bias is not None:
        bias = local_like(bias, shard, dim=0, name="bias")
    tokens = shard.total if student.num_tokens is None else student.num_tokens
    if not 1 <= tokens <= shard.total:
        raise ValueError(f"num_tokens: must lie in [1, {shard.total}], the rows of lm_head_weight; got {tokens}")
    if tokens < shard.offset + shard.size:
        bias = local.new_zeros(shard.size) if bias is None else bias
        numbers = torch.arange(shard.offset, shard.offset + shard.size, device=bias.device)
        bias = bias.masked_fill(numbers >= tokens, -torch.inf)
    settings = _StudentSettings(shard, backend, softcap=student.softcap, scale=student.logit_scale)
    return StudentLogits(hidden.reshape(-1, hidden.shape[-1]), settings, local, bias), shard, hidden.shape[:-1]


def _require_same_rows(hidden: Tensor, weight: DTensor, shard: VocabularyShard, tp_group: ProcessGroup | None) -> None:
    # FSDP shards a weight in the same way, but its ranks have different rows. So one of these must say that the ranks have
    # the same: hidden states that are replicated over the same group, a mesh dimension called "tp", or a `tp_group`.
    if shard.group is None:
        return
    name = shard.group.group_name
    if tp_group is not None:
        if tp_group.group_name != name:
            raise ValueError("tp_group: must be the group over which lm_head_weight is sharded; got another one")
        return
    if isinstance(hidden, DTensor):
        mesh = hidden.device_mesh
        dims = [dim for dim, placement in enumerate(hidden.placements) if placement.is_replicate()]
    else:
        mesh = weight.device_mesh
        dims = [dim for dim, called in enumerate(mesh.mesh_dim_names or ()) if called == "tp"]
    if any(mesh.get_group(dim).group_name == name for dim in dims):
        return
    rule = "is sharded over ranks of which nobody has said that they work on the same rows"
    remedy = "give hidden as a DTensor that is replicated over them, or name them with tp_group"
    raise ValueError(f"lm_head_weight: {rule}; {remedy}; a weight that FSDP has sharded must be gathered")


def _keeps_width(placement: Placement, ndim: int) -> bool:
    """Whether a placement leaves the last of `ndim` dimensions whole: replicated, or sharded over another dimension."""
    return placement.is_replicate() or (isinstance(placement, Shard) and placement.dim % ndim != ndim - 1)
