"""Losses streamed over logits that are sharded over the vocabulary: [N, Vl] → numbers per row, and a streamed gradient.

Rows are independent, so logits are processed a chunk of rows at a time and no more than a chunk ever exists in the
dtype of the arithmetic. Forward keeps a few numbers per row. Backward recomputes each chunk from the logits and writes
its gradient, rounded once, into one buffer of the logits' dtype.

How one chunk is processed, with z the logits of this rank's columns, T the temperature and c a row's centre:

1. `Buffers.load` computes u = (z − c)/T in fp32, with c about the row's maximum (`Centre`).
2. The passes of a `RowFunction` collect sums over this rank's columns, such as Σ exp(u) (`LogSums`).
3. `all_reduce_sums` turns them into sums over the whole vocabulary: one MAX and one SUM over the tensor-parallel ranks.
4. In backward `RowFunction.gradient` returns ∂(Σ grads · values)/∂z of the chunk from u and the kept numbers.

Tensor parallelism: all collectives are called inside `forward` of one autograd function (`logits`), where autograd does
not see them, and none in backward. Every rank back-propagates its own copy of the replicated values and gets exactly the
derivative with respect to its own columns. A collective inside the graph would add that up once per rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distill_rl.losses.core.shards import VocabularyShard

_CPU_CHUNK = 2**17
_CUDA_CHUNK = 2**25
PRODUCT_ROWS = 64
"""Fewer make a poor matrix product."""
_ROW_MULTIPLE = 32
"""Elements: 128 bytes of fp32, a GPU's cache line. GPU matrix products need rows aligned to at least 16 bytes."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic on logits of this dtype: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def floor_of(dtype: torch.dtype) -> float:
    """A finite stand-in for −inf: its exponential is 0, and the difference of two masked logits is 0 instead of NaN."""
    return torch.finfo(dtype).min / 4


def default_chunk(columns: int, device: torch.device, *, computed: bool = False) -> int:
    """Rows per chunk, at least 1: on CUDA 128 MiB of fp32; on a CPU 512 KiB, so that copies fit into a core's cache.

    Args:
        computed: whether a matrix product makes logits of the chunk, which reads the whole output layer whatever the number
            of rows: at least PRODUCT_ROWS then.
    """
    rows = (_CUDA_CHUNK if device.type == "cuda" else _CPU_CHUNK) // max(columns, 1)
    return max(1, rows, PRODUCT_ROWS if computed else 1)


def chunks(num_rows: int, size: int) -> Iterator[slice]:
    """Yields consecutive slices of `size` rows that tile `num_rows`; the last may be shorter. Nothing for 0 rows."""
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


@dataclass(frozen=True)
class RowPlan:
    """Which rows are streamed, in which order and in which chunks.

    Rows that are left out have no value, and their gradient is 0. Slices of rows are positions in this order everywhere.
    """

    pieces: Sequence[slice]  # the chunks, which tile the order
    order: Tensor | None = None  # int64 [M], distinct row numbers; None: all rows, in their own order
    counts: Tensor | None = None  # bool [N]; False: the row's gradient is 0 even if it holds NaN. None: all rows count

    @property
    def length(self) -> int:
        """M, the number of rows streamed."""
        return self.pieces[-1].stop if self.pieces else 0

    @property
    def largest(self) -> int:
        """Rows of the largest chunk."""
        return max((rows.stop - rows.start for rows in self.pieces), default=0)

    def take(self, logits: Tensor, rows: slice) -> Tensor:
        """The logits of one chunk: [N, Vl] → [n, Vl], a view without `order`, otherwise a copy."""
        return logits[rows] if self.order is None else logits.index_select(0, self.order[rows])

    def put(self, out: Tensor, rows: slice, gradient: Tensor) -> None:
        """Writes a chunk's gradient [n, Vl] into its rows of `out` [N, Vl], in the dtype of `out`."""
        if self.order is not None:  # which leaves out what does not count
            out.index_copy_(0, self.order[rows], gradient.to(out.dtype))
            return
        out[rows].copy_(gradient)
        if self.counts is not None:
            out[rows].masked_fill_(~self.counts[rows, None], 0)


def row_sum(x: Tensor) -> Tensor:
    """[n, columns] → [n]. The bits of a row's sum do not depend on n: torch sums a single row in another order."""
    return x.sum(1) if x.shape[0] != 1 else x.expand(2, -1).sum(1)[:1]


def padded_width(columns: int) -> int:
    """Columns of a chunk's buffer: the shard's, at least one dummy column, then padding to a multiple of 32."""
    return -(-(columns + 1) // _ROW_MULTIPLE) * _ROW_MULTIPLE


class Buffers:
    """Chunk-sized buffers [rows, width], reused for every chunk. The shard's columns are followed by dummy columns.

    Dummy columns hold the floor, so they add exactly 0 to a row's sums, as masked columns do. They serve two purposes:

    - Ids that another rank holds map to the first dummy column, `columns`. Gathering from it yields the floor,
      scattering to it does no harm, and an empty shard is no special case.
    - Every row starts at a multiple of 128 bytes, so that a GPU's matrix products can use `buffer[:, :columns]` in
      place. The padding is part of the buffer instead of a gap between rows, because torch vectorises elementwise CUDA
      kernels only over contiguous tensors.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device):
        self.columns = columns
        self._shape, self._dtype, self._device = (rows, padded_width(columns)), dtype, device
        self._buffers: dict[str, Tensor] = {}
        # The rows that a buffer holds, and whether they use the first centre, for callers that avoid computing them again.
        self.held: dict[str, tuple[slice, bool]] = {}

    def buffer(self, name: str, rows: int) -> Tensor:
        """The first rows of the buffer with this name, [rows, width], contiguous; it holds what was last written to it."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._buffers[name][:rows]

    def load(self, name: str, logits: Tensor, centre: Centre, rows: slice, *, first: bool = False) -> Tensor:
        """Returns u = (z − c)/T of these rows' logits z [n, columns] in a buffer [n, width].

        u is the floor where z is −inf and in the dummy columns.

        Args:
            first: whether this is the first pass, which measures the centre of these rows.
        """
        return self.finish(self.buffer(name, logits.shape[0]), logits, centre, rows, first=first)

    def finish(self, buffer: Tensor, logits: Tensor, centre: Centre, rows: slice, *, first: bool) -> Tensor:
        """As `load`, into `buffer` [n, width], of which the logits may be the first columns."""
        if first:
            centre.measure(rows, logits)
        of_rows = (centre.local if first else centre.value)[rows, None]
        torch.sub(logits, of_rows, out=buffer[:, : self.columns])
        if centre.scale != 1:
            buffer.mul_(centre.scale)
        buffer.clamp_(min=floor_of(buffer.dtype))
        buffer[:, self.columns :] = floor_of(buffer.dtype)
        return buffer


class Centre:
    """What is subtracted from each row of logits before anything else: about its maximum.

    The result does not depend on it, except for rounding: fp32 has seven digits, and logits near 300 (and a normaliser
    of that size) would leave four of them for the differences. Each rank starts with the maximum of its own columns;
    after the first pass `all_reduce_sums` moves all ranks to the largest.
    """

    NOTHING = -1e30
    """The centre of a row of which this rank has no column, or only masked ones."""

    def __init__(self, num_rows: int, like: Tensor, shard: VocabularyShard, scale: float):
        self.scale = scale  # 1/T, the factor on centred logits
        self.split = shard.group is not None
        self.local = like.new_empty(num_rows)  # this rank's centres, in units of the logits
        self.value = like.new_empty(num_rows) if self.split else self.local  # those common to all ranks

    def measure(self, rows: slice, logits: Tensor) -> None:
        """Sets this rank's centre of these rows to the maximum of logits [n, Vl], or `NOTHING` if that is −inf."""
        if not logits.shape[1]:
            self.local[rows] = self.NOTHING
            return
        largest = logits.amax(1).to(self.local.dtype)
        self.local[rows] = largest.masked_fill_(largest == -torch.inf, self.NOTHING)

    def moved(self, rows: slice) -> Tensor:
        """[n], the difference u(value) − u(local) between logits centred in either way."""
        return (self.local[rows] - self.value[rows]) * self.scale


class LogSums:
    """Per row Σ_v exp(power · (x_v − m)) · y_v over centred logits x, first over this rank's columns, then over all.

    m is the maximum of x. There is one total with y = 1 per power: power 1 gives the normaliser at the temperature of
    x, power T that at temperature 1. `weighted` adds one total of power 1 with another y; `columns` adds a table of
    further totals of power 1 that the caller fills.
    """

    def __init__(
        self,
        centre: Centre,
        *,
        whole: bool,
        powers: Sequence[float] = (1.0,),
        weighted: bool = False,
        against: Centre | None = None,
        columns: int | None = None,
    ):
        """
        Args:
            whole: x has all of this rank's columns, so its maximum is the centre and m = 0.
            against: the centre of the logits w, if the weighted total has y = x − w. None: y = x.
        """
        like = centre.local
        self.centre, self.against, self._whole = centre, against, whole
        self.max = torch.zeros_like(like)
        self.totals = {power: torch.empty_like(like) for power in powers}
        self.weighted = torch.empty_like(like) if weighted else None
        self.table = None if columns is None else like.new_zeros(len(like), columns)

    def add(self, rows: slice, x: Tensor, work: Tensor) -> Tensor:
        """Sets the maximum and the totals of these rows from a chunk x [n, width]; returns exp(x − m), in `work`.

        x is left as it is, and so are the weighted total and the table.
        """
        if not self._whole:
            self.max[rows] = x.amax(1)
            x = torch.sub(x, self.max[rows, None], out=work)
        for power in sorted(self.totals, key=lambda power: power == 1):  # power 1, which overwrites x − m, comes last
            exponents = x if power == 1 else torch.mul(x, power)
            self.totals[power][rows] = row_sum(torch.exp(exponents, out=work if power == 1 else exponents))
        return work

    def add_others(self, rows: slice, u: Tensor, columns: Tensor, work: Tensor) -> Tensor:
        """As `add`, of all but these columns [n, k] of a chunk u. Returns u there, [n, k]."""
        left_out = u.gather(1, columns)
        self.add(rows, u.scatter_(1, columns, floor_of(u.dtype)), work)
        u.scatter_(1, columns, left_out)
        return left_out

    def weigh(self, rows: slice, exponentials: Tensor, y: Tensor) -> None:
        """Sets the weighted total Σ exponentials · y of these rows. Overwrites the exponentials, what `add` returned."""
        assert self.weighted is not None
        self.weighted[rows] = row_sum(exponentials.mul_(y))

    def log(self, rows: slice, power: float = 1.0) -> Tensor:
        """log Σ exp(power · x) of these rows, [n]; at least the floor."""
        total = self.max[rows] * power + self.totals[power][rows].log()
        return total.clamp_min(floor_of(total.dtype))

    def mean(self, rows: slice) -> Tensor:
        """Σ exp(x) · y / Σ exp(x) of these rows, [n]. Only with a weighted total."""
        assert self.weighted is not None
        return self.weighted[rows] / self.totals[1.0][rows]

    def parts(self) -> list[tuple[float, Tensor]]:
        """Pairs (power, total) of all totals."""
        return [*self.totals.items(), *[(1.0, extra) for extra in (self.weighted, self.table) if extra is not None]]

    def move(self, rows: slice, largest: Tensor) -> None:
        """Rescales this rank's totals of these rows, in place, to the common centre and maximum, so that ranks add up.

        Args:
            largest: [n], the common maximum of the logits before centring, times 1/T.
        """
        if self.weighted is not None:  # y changes with the centres: Σ e·(y + d) = Σ e·y + d·Σ e
            moved = self.centre.moved(rows)
            moved = moved if self.against is None else moved - self.against.moved(rows)
            self.weighted[rows].addcmul_(moved, self.totals[1.0][rows])
        common = (largest - self.centre.value[rows] * self.centre.scale).clamp_min(floor_of(largest.dtype))
        shift = self.max[rows] + self.centre.moved(rows) - common
        self.max[rows] = common
        for power, total in self.parts():
            factor = (shift * power).exp()
            total[rows].mul_(factor if total.ndim == 1 else factor[:, None])


Picked = tuple[Tensor, Tensor]
"""Centred logits gathered from single columns, [N] or [N, k], 0 where another rank holds the column; and those local
columns of the rows at hand, [n] or [n, k], `VocabularyShard.size` where another rank holds it."""


def all_reduce_sums(shard: VocabularyShard, rows: slice, sums: Sequence[LogSums], picked: Sequence[Picked]) -> None:
    """Turns this rank's totals of these rows into totals over the whole vocabulary, with one MAX and one SUM.

    All ranks of the group must call it alike. Without a group nothing is done.

    Args:
        sums: changed in place, together with their centres.
        picked: gathered from the logits of `sums[0]`; summed over the ranks in place.
    """
    if shard.group is None:
        return
    # MAX: common centres, and the common maximum of each group of totals.
    common = {group.centre: group.centre.local[rows].clone() for group in sums}
    largest = {group: group.max[rows] + group.centre.local[rows] * group.centre.scale for group in sums}
    shard.max_(*common.values(), *largest.values())
    for centre, value in common.items():
        centre.value[rows] = value
    # Every rank rescales its totals to them.
    for group, value in largest.items():
        group.move(rows, value)
    moved = sums[0].centre.moved(rows)
    for logits, columns in picked:
        held, shift = columns < shard.size, moved if logits.ndim == 1 else moved[:, None]
        logits[rows] = torch.where(held, logits[rows] + shift, 0)
    # SUM.
    totals = [total[rows] for group in sums for _, total in group.parts()]
    shard.sum_(*totals, *[logits[rows] for logits, _ in picked])


class RowFrame(NamedTuple):
    """What every row function is told of the rows."""

    num_rows: int
    shard: VocabularyShard
    temperature: float
    like: Tensor  # any tensor with the device and dtype of the arithmetic

    def empty(self, *columns: int) -> Tensor:
        return self.like.new_empty(self.num_rows, *columns)

    def centre(self) -> Centre:
        return Centre(self.num_rows, self.like, self.shard, 1 / self.temperature)


Pass = tuple[Callable[[slice, Tensor, Buffers], None], Callable[[slice], None]]
"""One pass over the logits: collect a chunk's sums; then complete any range of rows over the ranks."""


class RowFunction(ABC):
    """Values per row of logits, and their derivative. It knows nothing of autograd, which is the caller's business.

    u is a loaded chunk [n, width] (`Buffers.load`). Passes leave it unchanged; `gradient` may overwrite it.
    """

    centre: Centre  # of the student's logits
    values: list[Tensor]  # the differentiable values, each with one entry per row
    constants: Sequence[Tensor] = ()  # and those without a gradient
    held: tuple[Tensor, ...] = ()  # the caller's tensors that `gradient` reads
    lender: Any = None  # what holds them in its place

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

        The object drops its references to them, because autograd makes the values refer to it.
        """
        values, constants, self.values, self.constants = tuple(self.values), tuple(self.constants), [], ()
        return values, constants

    @abstractmethod
    def gradient(self, rows: slice, u: Tensor, grads: Sequence[Tensor | None], buffers: Buffers) -> Tensor:
        """∂(Σ grads · differentiable values)/∂z of a chunk's logits z, [n, width].

        Args:
            u: the loaded chunk; may be overwritten and returned.
            grads: [n] per differentiable value; None for one that does not enter the loss.
        """

    def to_save(self) -> tuple[Tensor, ...]:
        """Returns the held tensors and drops them until `restore`.

        Autograd keeps them in between (`save_for_backward`): it detects writes to them, frees them after backward, and
        lets saved-tensor hooks move them elsewhere.
        """
        holder = self.lender or self
        held, holder.held = holder.held, ()
        return held

    def restore(self, tensors: Sequence[Tensor]) -> None:
        (self.lender or self).held = tuple(tensors)

    def parameter_gradients(self) -> tuple[Tensor, ...]:
        """The gradients of its own parameters, summed over the calls of `gradient`; resets the sums. None by default."""
        return ()


class Visit(NamedTuple):
    """Rows of logits that kernels work on at once: n positions in the order of streaming."""

    rows: slice
    logits: Tensor  # [N, Vl], any float dtype
    order: Tensor | None  # int64 [n]: the i-th position has row order[i] of the logits; None: row i
    buffers: Buffers


class RowKernels(ABC):
    """The visits of a row function to the logits, as kernels."""

    by_chunk = False
    """Whether a visit must be to a chunk, for which there are buffers; otherwise it may be to all rows at once."""

    @abstractmethod
    def collect(self, visit: Visit) -> None:
        """The first pass over these rows' logits, before `RowFunction.complete`."""

    @abstractmethod
    def gradient(self, visit: Visit, grads: Sequence[Tensor | None], out: Tensor, counts: Tensor | None) -> None:
        """Writes ∂(Σ grads · values)/∂z of these rows into their rows of `out` [N, Vl], in its dtype.

        Args:
            grads: [n] per differentiable value; None for one that does not enter the loss.
            out: its columns must be contiguous, as those of the logits; may be the logits themselves.
            counts: bool [n]; rows at False receive 0. None: all count.
        """
