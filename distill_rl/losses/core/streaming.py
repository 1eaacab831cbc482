"""A sweep over vocabulary-sharded logits, a chunk of rows at a time: values per row forward, a streamed gradient backward.

Rows are independent, so no more than a chunk of them is ever held in the arithmetic's dtype. Forward keeps a few numbers
per row; backward recomputes a chunk from the logits and writes its gradient, rounded once, into one buffer.

The gradient under tensor parallelism: collectives are called inside `forward`, where autograd does not see them, and
none in `backward`. Every rank back-propagates its own copy of the replicated values, and what comes out is exactly the
derivative with respect to its own columns. A collective inside the graph would add it up once more per rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distill_rl.losses.core.autograd import first_derivative, own_dtypes
from distill_rl.losses.core.shards import VocabularyShard

_CPU_CHUNK = 2**17
_CUDA_CHUNK = 2**25


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic on logits of this dtype: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def floor_of(dtype: torch.dtype) -> float:
    """Stands for −inf, so that differences of two masked logits are 0 instead of NaN; its exponential is 0."""
    return torch.finfo(dtype).min / 4


def default_chunk(columns: int, device: torch.device) -> int:
    """Rows per chunk: on a CPU a chunk and its copies fit into a core's cache, on a GPU it is 128 MiB of fp32."""
    return max(1, (_CUDA_CHUNK if device.type == "cuda" else _CPU_CHUNK) // max(columns, 1))


def chunks(num_rows: int, size: int) -> Iterator[slice]:
    """Consecutive slices of `size` rows that tile `num_rows`; the last may be shorter."""
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


@dataclass(frozen=True)
class RowPlan:
    """Which rows are swept, in which order and in which pieces. A row that is left out has no value and no gradient."""

    pieces: tuple[slice, ...]
    """positions in the order of the sweep; they tile it"""
    order: Tensor | None = None
    """int64 [M], distinct row numbers; None: all rows as they stand"""
    counts: Tensor | None = None
    """bool [N]: the gradient of a row that does not count is 0 whatever the row holds, NaN included; None: all count"""

    @classmethod
    def of(cls, num_rows: int, size: int, *, order: Tensor | None = None, counts: Tensor | None = None) -> RowPlan:
        """So many rows, `size` at once: all that there are, or those of `order`."""
        return cls(tuple(chunks(num_rows, size)), order, counts)

    @property
    def length(self) -> int:
        """M, the rows swept."""
        return self.pieces[-1].stop if self.pieces else 0

    @property
    def largest(self) -> int:
        return max((rows.stop - rows.start for rows in self.pieces), default=0)

    def take(self, logits: Tensor, rows: slice) -> Tensor:
        """[n, Vl]"""
        return logits[rows] if self.order is None else logits.index_select(0, self.order[rows])

    def clear_others(self, out: Tensor) -> Tensor:
        """Sets the rows that are not swept to 0."""
        assert self.order is not None
        others = torch.ones(out.shape[0], dtype=torch.bool, device=out.device).index_fill_(0, self.order, False)
        return out.index_fill_(0, others.nonzero()[:, 0], 0)

    def put(self, out: Tensor, rows: slice, gradient: Tensor) -> None:
        if self.order is not None:
            out.index_copy_(0, self.order[rows], gradient.to(out.dtype))
            return
        out[rows].copy_(gradient)
        if self.counts is not None:
            out[rows].masked_fill_(~self.counts[rows, None], 0)


def row_sum(x: Tensor) -> Tensor:
    """[n, columns] → [n]. A row's sum has the same bits whatever n: torch adds a lone row up in another order."""
    return x.sum(1) if x.shape[0] != 1 else x.expand(2, -1).sum(1)[:1]


_ROW_MULTIPLE = 32
"""Elements; 128 bytes of fp32, a line of a GPU's cache. At least 16 bytes is what its matrix products want of every row."""


def padded_width(columns: int) -> int:
    """Columns of a chunk's buffer: those of the shard, at least one dummy column, and more of those up to a multiple of 32."""
    return -(-(columns + 1) // _ROW_MULTIPLE) * _ROW_MULTIPLE


class Scratch:
    """Chunk-sized buffers, used again for every chunk, each followed by dummy columns: [rows, width].

    Ids that another rank holds point to the first dummy column, `columns`, so that gathering from it yields the floor,
    scattering to it harms nothing, and an empty shard is no special case.

    The other dummy columns let every row begin at a multiple of 128 bytes, so that a GPU's matrix products read and
    write `buffer[:, :columns]` in place. They are part of the buffer rather than a gap between its rows: torch
    vectorises an elementwise CUDA kernel only if its tensors are contiguous. They stay at the floor, which adds exactly
    0 to a row's sums, as a masked column does.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device):
        self.columns = columns
        self._shape, self._dtype, self._device = (rows, padded_width(columns)), dtype, device
        self._buffers: dict[str, Tensor] = {}
        self.held: dict[str, tuple[slice, bool]] = {}
        """which rows a buffer holds, and whether by their first centre, for those who would rather not fill it again"""

    def buffer(self, name: str, rows: int) -> Tensor:
        """[rows, width], contiguous, with whatever was left in it."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._buffers[name][:rows]

    def load(self, name: str, logits: Tensor, centre: Centre, rows: slice, *, first: bool = False) -> Tensor:
        """Logits [n, columns] of these rows, centred and scaled, with the floor for −inf and in the dummy columns."""
        buffer = self.buffer(name, logits.shape[0])
        return self.finish(buffer, logits, centre, rows, first=first)

    def finish(self, buffer: Tensor, logits: Tensor, centre: Centre, rows: slice, *, first: bool) -> Tensor:
        """What `load` does, for logits that may already lie in the buffer. They are widened on the way."""
        if first:
            centre.measure(rows, logits)
        torch.sub(logits, centre.of(rows, first=first)[:, None], out=buffer[:, : self.columns])
        if centre.scale != 1:
            buffer.mul_(centre.scale)
        buffer.clamp_(min=floor_of(buffer.dtype))
        buffer[:, self.columns :] = floor_of(buffer.dtype)
        return buffer


class Centre:
    """What is subtracted from each row of logits before anything else: about their maximum.

    Nothing here depends on it but rounding: fp32 has seven digits, of which logits near 300, and a normaliser of their
    size, would leave four for what they differ by. Each rank begins with the maximum of its own columns; `all_reduce_sums` then
    moves all ranks to the largest of these.
    """

    NOTHING = -1e30
    """of a row of which this rank has no column, or masked ones only"""

    def __init__(self, num_rows: int, like: Tensor, shard: VocabularyShard, scale: float):
        """scale: factor on the centred logits, 1/T."""
        self.scale, self.split = scale, shard.group is not None
        self.local = like.new_empty(num_rows)
        """[N], in units of the logits"""
        self.value = like.new_empty(num_rows) if self.split else self.local
        """[N], the same on all ranks, once they have been combined"""

    def of(self, rows: slice, *, first: bool) -> Tensor:
        """[n]; `first`: in the sweep that comes before the ranks agree."""
        return self.local[rows] if first else self.value[rows]

    def measure(self, rows: slice, logits: Tensor) -> None:
        """logits: [n, Vl]"""
        if not logits.shape[1]:
            self.local[rows] = self.NOTHING
            return
        largest = logits.amax(1)
        self.local[rows] = largest.masked_fill_(largest == -torch.inf, self.NOTHING)

    def moved(self, rows: slice) -> Tensor:
        """[n], what to add to scaled logits that were centred by `local`, so that they are centred by `value`."""
        return (self.local[rows] - self.value[rows]) * self.scale


class LogSums:
    """Σ_v exp(power · (x_v − m)) · y_v per row of centred logits x, with m a maximum: first over this rank's columns, then
    over all.

    One total per power, with y = 1: power 1 is the normaliser, power T that of logits divided by T at temperature 1.
    With `weighted` there is one more, of power 1 (`weigh`); with `columns` many more of that kind for the caller to fill.
    """

    def __init__(
        self,
        num_rows: int,
        powers: Sequence[float],
        centre: Centre,
        *,
        whole: bool,
        weighted: bool = False,
        against: Centre | None = None,
        columns: int | None = None,
    ):
        """
        Args:
            whole: x has all columns of this rank, so that its maximum is the centre and m is 0.
            against: where y is x less other logits, their centre; else y is x itself.
        """
        like = centre.local
        self.powers, self.centre, self.against, self._whole = tuple(powers), centre, against, whole
        self.max = like.new_zeros(num_rows)
        self.totals = [like.new_empty(num_rows) for _ in powers]
        self.weighted = like.new_empty(num_rows) if weighted else None
        self.table = None if columns is None else like.new_zeros(num_rows, columns)

    def add(self, rows: slice, x: Tensor, work: Tensor) -> Tensor:
        """Sums of exponentials of a chunk x; returns exp(x − m), which lies in `work`."""
        if not self._whole:
            self.max[rows] = x.amax(1)
            x = torch.sub(x, self.max[rows, None], out=work)
        for power, total in sorted(zip(self.powers, self.totals), key=lambda each: each[0] == 1):  # power 1 is the last
            exponents = x if power == 1 else torch.mul(x, power)
            total[rows] = row_sum(torch.exp(exponents, out=work if power == 1 else exponents))
        return work

    def weigh(self, rows: slice, exponentials: Tensor, y: Tensor) -> None:
        """Takes the weighted sum of what `add` returned, which it overwrites."""
        assert self.weighted is not None
        self.weighted[rows] = row_sum(exponentials.mul_(y))

    def log(self, rows: slice, number: int = 0) -> Tensor:
        """log Σ exp(power · x), not below the floor."""
        total = self.max[rows] * self.powers[number] + self.totals[number][rows].log()
        return total.clamp_min(floor_of(total.dtype))

    def mean(self, rows: slice) -> Tensor:
        """Σ exp(x) · y / Σ exp(x) of the weighted sum."""
        assert self.weighted is not None
        return self.weighted[rows] / self.totals[0][rows]

    def parts(self) -> list[tuple[float, Tensor]]:
        """Every sum with its power."""
        more = [(1.0, extra) for extra in (self.weighted, self.table) if extra is not None]
        return [*zip(self.powers, self.totals), *more]

    def move(self, rows: slice, largest: Tensor) -> None:
        """To the common centre, and to the common maximum `largest` [n], which is in units of uncentred logits."""
        if self.weighted is not None:
            moved = self.centre.moved(rows)
            moved = moved if self.against is None else moved - self.against.moved(rows)
            self.weighted[rows].addcmul_(moved, self.totals[0][rows])
        common = (largest - self.centre.value[rows] * self.centre.scale).clamp_min(floor_of(largest.dtype))
        shift = self.max[rows] + self.centre.moved(rows) - common
        self.max[rows] = common
        for power, total in self.parts():
            factor = (shift * power).exp()
            total[rows].mul_(factor if total.ndim == 1 else factor[:, None])


Picked = tuple[Tensor, Tensor]
"""Centred logits that were picked from columns, [N] or [N, k], 0 where another rank has the column; and which those were
in the rows at hand, [n] or [n, k]: local columns, `VocabularyShard.size` for those of other ranks."""


def all_reduce_sums(shard: VocabularyShard, rows: slice, sums: Sequence[LogSums], picked: Sequence[Picked]) -> None:
    """Turn this rank's sums of these rows into those over the whole vocabulary: one MAX and one SUM.

    Args:
        picked: of the logits that the first of the sums is of; added up over the ranks, in place.
    """
    if shard.group is None:
        return
    centres = list(dict.fromkeys(group.centre for group in sums))
    common = [centre.local[rows].clone() for centre in centres]
    largest = [group.max[rows] + group.centre.local[rows] * group.centre.scale for group in sums]
    shard.max_(*common, *largest)
    for centre, value in zip(centres, common):
        centre.value[rows] = value
    for group, value in zip(sums, largest):
        group.move(rows, value)
    moved = centres[0].moved(rows)
    for logits, columns in picked:
        own, shift = columns < shard.size, moved if logits.ndim == 1 else moved[:, None]
        logits[rows] = torch.where(own, logits[rows] + shift, 0)
    totals = [total[rows] for group in sums for _, total in group.parts()]
    shard.sum_(*totals, *[logits[rows] for logits, _ in picked])


Pass = tuple[Callable[[slice, Tensor, Scratch], None], Callable[[slice], None]]
"""Collect the sums of a chunk; then, over any range of rows, combine them over the ranks."""


class RowFunction(ABC):
    """Numbers per row of logits, and their derivative. A plain object: autograd is the business of the caller.

    u stands for a loaded chunk, [n, width] (see `Scratch`). Collecting leaves it as it was, `gradient` may overwrite it.
    """

    centre: Centre
    """Of the student's logits, with the factor 1/T."""

    @property
    @abstractmethod
    def passes(self) -> list[Pass]:
        """One after the other; a later one needs what an earlier one combined."""

    @abstractmethod
    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The [N] values, differentiable and not. The object lets go of them: they will refer to it."""

    @abstractmethod
    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], scratch: Scratch) -> Tensor:
        """Derivative with respect to the unscaled logits of Σ grads · differentiable values, [n, width]."""

    def to_save(self) -> tuple[Tensor, ...]:
        """The caller's tensors that `gradient` reads, which the object lets go of until `restore`.

        Autograd keeps them in between: it notices when somebody has written to them, and frees them after backward.
        """
        return ()

    def restore(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027, most have lent nothing
        """What `to_save` returned, in the same order; others in their place if hooks have moved them."""


class LearningFunction(RowFunction):
    """One that has parameters of its own."""

    @abstractmethod
    def parameter_gradients(self) -> tuple[Tensor, ...]:
        """Added up over the calls of `gradient`, and forgotten."""


class StreamingLoss(torch.autograd.Function):
    """A row function of logits that exist: [N, Vl] → its values.

    One of the two autograd functions of this package that see logits; the other is `linear.FusedRows`.
    """

    @staticmethod
    @own_dtypes
    def forward(
        ctx, logits: Tensor, function: RowFunction, plan: RowPlan, inplace: bool, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """parameters: tensors that the function knows already, a `LearningFunction` then; named to be given gradients."""
        scratch = _scratch_for(logits, plan)
        for number, (collect, complete) in enumerate(function.passes):
            for rows in plan.pieces:
                u = scratch.load("student", plan.take(logits, rows), function.centre, rows, first=number == 0)
                collect(rows, u, scratch)
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
        if ctx.spent:
            raise RuntimeError("inplace_backward: the gradient has overwritten the logits, a second backward has none")
        logits, *lent = ctx.saved_tensors
        ctx.function.restore(lent)
        ctx.spent = ctx.inplace
        plan: RowPlan = ctx.plan
        whole = plan.length == logits.shape[0]
        if ctx.inplace:
            out = logits.detach() if whole else plan.clear_others(logits.detach())
        else:
            out = torch.empty_like(logits) if whole else torch.zeros_like(logits)
        scratch = _scratch_for(logits, plan)
        for rows in plan.pieces:
            u = scratch.load("student", plan.take(logits, rows), ctx.function.centre, rows)
            gradient = ctx.function.gradient(rows, u, [part(g, rows) for g in grads[: ctx.num_values]], scratch)
            plan.put(out, rows, gradient[:, : scratch.columns])
        ctx.function.to_save()
        parameters = ctx.function.parameter_gradients() if ctx.num_parameters else ()  # those of a LearningFunction
        return out, None, None, None, *parameters


def _scratch_for(logits: Tensor, plan: RowPlan) -> Scratch:
    return Scratch(plan.largest, logits.shape[1], accumulator(logits.dtype), logits.device)


def part(grad: Tensor | None, rows: slice) -> Tensor | None:
    """Rows of a gradient that may be missing."""
    return None if grad is None else grad[rows]
