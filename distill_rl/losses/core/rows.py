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

What is computed per row: the label's log-probability, and KD against the three kinds of targets. Notation of
docs/losses.md: p is the teacher, q the student, u = z/T the student's logits over the temperature, w the teacher's;
D(p, q) = Σ_v f(p_v, q_v) with slope_v = ∂f/∂(log q_v) (`divergence.py`).

    value      T²·D
    gradient   ∂(T²·D)/∂z_v = T · ∂D/∂u_v

The factor T² keeps the gradient's size independent of T (arXiv 1503.02531); one T cancels with ∂u/∂z = 1/T. The
cross-entropy comes out of the same pass (`LabelTerm` forward, `LabelGradient` backward).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from distill_rl.losses.core.checks import Tail
from distill_rl.losses.core.shards import VocabularyShard
from distill_rl.losses.divergence import Distribution, Divergence
from distill_rl.losses.targets import SampledTokens, TopKLogprobs

if TYPE_CHECKING:
    from distill_rl.losses.core.logits import DenseTeacher  # whose kernels import this file

_CPU_CHUNK = {False: 2**18, True: 2**17}
"""Elements; with them, the buffers of a chunk fit into a core's cache: one, or with a dense teacher four."""
_CUDA_CHUNK = 2**25
PRODUCT_ROWS = 64
"""Fewer make a poor matrix product."""
_ROW_MULTIPLE = 32
"""Elements: 128 bytes of fp32, a GPU's cache line. GPU matrix products need rows aligned to at least 16 bytes."""
FULL_MASS = 1 - 1e-6
"""If the k columns hold more than this and `rest_logprob` is absent, the rest is taken to be 0: it cannot be told from rounding."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic on logits of this dtype: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@cache
def floor_of(dtype: torch.dtype) -> float:
    """A finite stand-in for −inf: its exponential is 0, and the difference of two masked logits is 0 instead of NaN."""
    return torch.finfo(dtype).min / 4


def default_chunk(columns: int, device: torch.device, *, dense: bool = True, computed: bool = False) -> int:
    """Rows per chunk, at least 1: on CUDA 128 MiB of fp32; on a CPU 1 MiB, or 512 KiB if `dense`.

    Args:
        dense: whether more is made of a chunk than one copy.
        computed: whether a matrix product makes logits of the chunk, which reads the whole output layer whatever the number
            of rows: at least PRODUCT_ROWS then.
    """
    rows = (_CUDA_CHUNK if device.type == "cuda" else _CPU_CHUNK[dense]) // max(columns, 1)
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


def is_copied(logits: Tensor, buffer: Tensor, *, first: bool) -> bool:
    """Whether a pass copies a chunk before it computes with it: on a CPU, where kernels of two dtypes take longer than that."""
    return not logits.is_cuda and (first or logits.dtype != buffer.dtype)  # the first pass reads the logits twice


class Buffers:
    """Chunk-sized buffers [rows, width], reused for every chunk. The shard's columns are followed by dummy columns.

    Dummy columns hold the floor, so they add exactly 0 to a row's sums, as masked columns do. They serve two purposes:

    - Ids that another rank holds map to the first dummy column, `columns`. Gathering from it yields the floor,
      scattering to it does no harm, and an empty shard is no special case.
    - Every row starts at a multiple of 128 bytes, so that a GPU's matrix products can use `buffer[:, :columns]` in
      place. The padding is part of the buffer instead of a gap between rows, because torch vectorises elementwise CUDA
      kernels only over contiguous tensors.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, reloaded: bool = False):
        """
        Args:
            reloaded: whether chunks are loaded anew for every pass and for the gradient.
        """
        self.columns, self.reloaded = columns, reloaded
        self._shape, self._dtype, self._device = (rows, padded_width(columns)), dtype, device
        self._buffers: dict[str, Tensor] = {}
        # The rows that a buffer holds, and whether they use the first centre, for callers that avoid computing them again.
        self.held: dict[str, tuple[slice, bool]] = {}

    def buffer(self, name: str, rows: int) -> Tensor:
        """The first rows of the buffer with this name, [rows, width], contiguous; it holds what was last written to it."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._buffers[name][:rows]

    def spare(self, chunk: Tensor, name: str = "work") -> Tensor:
        """Where a pass that needs `chunk` no more may write: in its place if that is loaded anew, else a buffer."""
        if not self.reloaded:
            return self.buffer(name, chunk.shape[0])
        self.held.clear()
        return chunk

    def load(self, name: str, logits: Tensor, centre: Centre, rows: slice, *, first: bool = False) -> Tensor:
        """Returns u = (z − c)/T of these rows' logits z [n, columns] in a buffer [n, width].

        u is the floor in the dummy columns, and where z is −inf unless `centre` keeps that.

        Args:
            first: whether this is the first pass, which measures the centre of these rows.
        """
        buffer = self.buffer(name, logits.shape[0])
        if is_copied(logits, buffer, first=first):
            logits = buffer[:, : self.columns].copy_(logits)
        return self.finish(buffer, logits, centre, rows, first=first)

    def finish(self, buffer: Tensor, logits: Tensor, centre: Centre, rows: slice, *, first: bool) -> Tensor:
        """As `load`, into `buffer` [n, width], of which the logits may be the first columns."""
        if first:
            centre.measure(rows, logits)
        of_rows = (centre.local if first else centre.value)[rows, None]
        torch.sub(logits, of_rows, out=buffer[:, : self.columns])
        if centre.scale != 1:
            buffer.mul_(centre.scale)
        if not centre.keeps_inf:
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

    def __init__(self, num_rows: int, like: Tensor, shard: VocabularyShard, scale: float, *, keeps_inf: bool = False):
        self.scale = scale  # 1/T, the factor on centred logits
        self.keeps_inf = keeps_inf  # whether −inf stays −inf: its exponential is 0, too, and nothing else is made of it
        self.split = shard.group is not None
        self.local = like.new_empty(num_rows)  # this rank's centres, in units of the logits
        self.value = like.new_empty(num_rows) if self.split else self.local  # those common to all ranks

    def measure(self, rows: slice, logits: Tensor) -> None:
        """Sets this rank's centre of these rows to the maximum of logits [n, Vl], or `NOTHING` if that is −inf."""
        if not logits.shape[1]:
            self.local[rows] = self.NOTHING
            return
        largest = logits.amax(1).to(self.local.dtype)
        torch.nan_to_num(largest, torch.nan, torch.inf, self.NOTHING, out=self.local[rows])

    def moved(self, rows: slice) -> Tensor:
        """[n], the difference u(value) − u(local) between logits centred in either way."""
        return ((self.local[rows] - self.value[rows]) * self.scale).clamp_min(self.NOTHING)


class LogSums:
    """Per row Σ_v exp(power · (x_v − m)) · y_v over centred logits x, first over this rank's columns, then over all.

    m is the maximum of x. There is one total with y = 1 per power: power 1 gives the normaliser at the temperature of
    x, power T that at temperature 1. `weighted` adds one total of power 1 with another y; `table` [N, any] may
    hold further totals of power 1, which the caller sets and fills.
    """

    def __init__(
        self,
        centre: Centre,
        *,
        whole: bool,
        powers: Sequence[float] = (1.0,),
        weighted: bool = False,
        against: Centre | None = None,
    ):
        """
        Args:
            whole: x has all of this rank's columns, so its maximum is the centre and m = 0.
            against: the centre of the logits w, if the weighted total has y = x − w. None: y = x.
        """
        like = centre.local
        self.centre, self.against, self._whole = centre, against, whole
        self.max = torch.zeros_like(like)
        # Power 1, whose exponentials are kept, comes last.
        self.totals = {power: torch.empty_like(like) for power in sorted(powers, key=lambda power: power == 1)}
        self.weighted = torch.empty_like(like) if weighted else None
        self.table: Tensor | None = None

    def add(self, rows: slice, x: Tensor, work: Tensor) -> Tensor:
        """Sets the maximum and the totals of these rows from a chunk x [n, width]; returns exp(x − m), in `work`.

        x is left as it is, unless it is `work`, and so are the weighted total and the table.
        """
        if not self._whole:
            largest = torch.amax(x, 1, out=self.max[rows])
            x = torch.sub(x, largest[:, None], out=work)
        for power, total in self.totals.items():
            exponents = x if power == 1 else torch.mul(x, power)
            total[rows] = row_sum(torch.exp(exponents, out=work if power == 1 else exponents))
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


Grads = Sequence[Tensor | None]
"""One per differentiable value of a row function; None for one that does not enter the loss."""
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

    def centre(self, *, keeps_inf: bool = False) -> Centre:
        return Centre(self.num_rows, self.like, self.shard, 1 / self.temperature, keeps_inf=keeps_inf)


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

    def weights(self, rows: slice, grads: Grads) -> Sequence[Tensor | None]:
        """What `gradient` needs of the gradients [n] of the values of these rows; called for many chunks at once.

        Args:
            grads: one per differentiable value; None for one that does not enter the loss.

        Returns:
            Tensors of n rows, or None; by default the gradients.
        """
        return grads

    def gradient(self, rows: slice, u: Tensor, weights: Sequence[Any], buffers: Buffers) -> Tensor:
        """∂(Σ grads · differentiable values)/∂z of a chunk's logits z, [n, width]. A measurement has none.

        Args:
            u: the loaded chunk; may be overwritten and returned.
            weights: the chunk's rows of what `weights` returned for the gradients.
        """
        raise NotImplementedError

    def exchange(self, tensors: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Returns the held tensors and holds these instead.

        Autograd keeps them between forward and backward (`save_for_backward`): it detects writes to them, frees them
        after backward, and lets saved-tensor hooks move them elsewhere.
        """
        holder = self.lender or self
        held, holder.held = holder.held, tuple(tensors)
        return held

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
    def gradient(self, visit: Visit, grads: Grads, out: Tensor, counts: Tensor | None) -> None:
        """Writes ∂(Σ grads · values)/∂z of these rows into their rows of `out` [N, Vl], in its dtype.

        Args:
            grads: [n] per differentiable value; None for one that does not enter the loss.
            out: its columns must be contiguous, as those of the logits; may be the logits themselves.
            counts: bool [n]; rows at False receive 0. None: all count.
        """


class LabelTerm:
    """The label's logit per row, collected in a pass over logits divided by T, and what follows from it.

    The cross-entropy is at T = 1. A label that no rank holds (an ignored row) counts as a logit of 0, which is finite;
    the caller masks the row.
    """

    def __init__(self, labels: Tensor, frame: RowFrame):
        self.ids, self.columns, self.size = labels, frame.shard.columns(labels), frame.shard.size  # [N], global ids
        self.temperature = frame.temperature
        # The powers of the totals that both softmaxes need (`LogSums`). The last one is that of T = 1.
        self.powers: tuple[float, ...] = (1.0,) if frame.temperature == 1 else (1.0, frame.temperature)
        # Per row: the label's logit; the logsumexp at T = 1; and, set by `logprob`, the probability at T of all others.
        self.logit, self.lse, self.others = (frame.empty() for _ in range(3))

    def picked(self, rows: slice) -> Picked:
        """The labels' logits, of which those of these rows are made finite: at least the floor, 0 on other ranks."""
        columns = self.columns[rows]
        self.logit[rows].masked_fill_(columns == self.size, 0).clamp_(min=floor_of(self.logit.dtype))
        return self.logit, columns

    def collect(self, rows: slice, u: Tensor) -> None:
        """Stores the labels' logits of these rows from u [n, width]."""
        torch.gather(u, 1, self.columns[rows, None], out=self.logit[rows, None])

    def cross_entropy(self, rows: slice, lse: Tensor) -> Tensor:
        """[n], from the logsumexp [n] over the whole vocabulary of the logits that are not divided by T."""
        self.lse[rows] = lse
        return lse - self.logit[rows] * self.temperature

    def logprob(self, rows: slice, others: Tensor) -> Tensor:
        """The label's log-probability at T, [n], from the logsumexp [n] of u over all other columns.

        Computed from the other columns, so that it keeps its digits where q(label) is close to 1; so does 1 − q(label).
        """
        self.others[rows] = (others - self.logit[rows]).sigmoid()
        return logsigmoid(self.logit[rows] - others)


class LabelWeights:
    """What the softmaxes and the label's column of some rows count in the gradient of the label terms:

        cross-entropy at T = 1           ce · (softmax(z) − 1[label])
        label's log-probability at T     logprob_grad · (1[label] − softmax(z/T)) / T

    Terms with the softmax at T, which KD computes anyway, are added by the caller: their weight is `shared` [n]. A
    cross-entropy at T ≠ 1 has the weight `at_one` [n], and needs a softmax of its own (`apart`), with the logsumexp `lse`.

    `logprob_grad` may be as large as 1/(1 − q). Therefore 1 − q(label) is taken from `LabelTerm.others` instead of from
    the softmax, where rounding has lost it when q is close to 1. Rows with a `logprob_grad` have no KD.
    """

    def __init__(
        self, term: LabelTerm | None, rows: slice, like: Tensor, ce: Tensor | None, logprob_grad: Tensor | None = None
    ):
        """
        Args:
            like: any tensor with n rows and the dtype of the arithmetic.
            ce, logprob_grad: [n], weights of the cross-entropy and of the label's log-probability.
        """
        self.given, self.apart, self.logprob_grad = term is not None, False, logprob_grad
        self.shared = self.at_one = self.lse = self.columns = self.others = like.new_zeros(like.shape[0])
        if term is None:
            return
        self.columns, self.temperature = term.columns[rows], term.temperature
        if logprob_grad is not None:
            self.shared, self.others = logprob_grad.to(like.dtype) * (-1 / term.temperature), term.others[rows]
        if ce is not None and term.temperature == 1:
            self.shared = self.shared + ce.to(like.dtype)
        elif ce is not None:  # may be one number, expanded
            self.apart, self.at_one, self.lse = True, ce.to(like.dtype).contiguous(), term.lse[rows]


class LabelGradient(LabelWeights):
    """The label's part of a chunk's gradient, made before the chunk u [n, width] is overwritten."""

    def __init__(self, term: LabelTerm | None, rows: slice, u: Tensor, grads: Grads, buffers: Buffers):
        """
        Args:
            grads: those of the cross-entropy and of the log-probability, as far as there are any.
        """
        super().__init__(term, rows, u, given(grads, 0), given(grads, 1))
        if self.apart:  # at_one · softmax(z)
            logits = torch.mul(u, self.temperature, out=buffers.buffer("label", u.shape[0]))
            self._softmax = logits.sub_(self.lse[:, None]).exp_().mul_(self.at_one[:, None])

    def add_to(self, gradient: Tensor) -> Tensor:
        """Adds the label terms, if there are any, to `gradient` [n, width], in place, which has shared · softmax(z/T) already."""
        if not self.given:
            return gradient
        columns = self.columns[:, None]
        subtract_at(gradient, self.columns, self.shared)
        if self.logprob_grad is not None:
            exact = self.shared * -self.others
            exact = torch.where(self.logprob_grad != 0, exact, gradient.gather(1, columns)[:, 0])
            gradient.scatter_(1, columns, exact[:, None])
        if self.apart:
            subtract_at(gradient.add_(self._softmax), self.columns, self.at_one)
        return gradient


def subtract_at(gradient: Tensor, columns: Tensor, weight: Tensor) -> Tensor:
    """Subtracts `weight` [n] from these columns [n] of `gradient` [n, width], in place, and returns it.

    A label that another rank holds changes a dummy column only.
    """
    return gradient.scatter_add_(1, columns[:, None], -weight[:, None])


def given(grads: Grads, number: int) -> Tensor | None:
    """The gradient of the value with this number; None if there is none, or there are fewer values."""
    return grads[number] if number < len(grads) else None


def weight_of(grads: Grads, number: int, u: Tensor) -> Tensor:
    """As `given`, [n] in the dtype of the chunk u; zeros for None."""
    grad = given(grads, number)
    return u.new_zeros(u.shape[0]) if grad is None else grad.to(u.dtype)


class LabelRows(RowFunction):
    """log q(target) per row and, on request, the entropy of q, for q at temperature T.

    ∂ log q(t)/∂u_v = 1[v = t] − q_v        ∂ entropy/∂u_v = −q_v·(log q_v + entropy)
    """

    def __init__(self, frame: RowFrame, targets: Tensor, *, entropy: bool):
        self.shard, self.temperature, self.with_entropy = frame.shard, frame.temperature, entropy
        self.centre = frame.centre(keeps_inf=not entropy)
        self.label = LabelTerm(targets, frame._replace(temperature=1.0))  # of the logits that the pass reads
        self.sums = LogSums(self.centre, whole=True, weighted=entropy)
        self.lse = frame.empty()
        self.entropy = frame.empty() if entropy else frame.like.new_empty(0)
        self.values = [frame.empty() for _ in range(1 + entropy)]

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        self.label.collect(rows, u)
        if self.with_entropy:
            self.sums.weigh(rows, self.sums.add(rows, u, buffers.buffer("work", u.shape[0])), u)
        else:
            self.sums.add(rows, u, buffers.spare(u))

    def complete(self, rows: slice) -> None:
        all_reduce_sums(self.shard, rows, [self.sums], [self.label.picked(rows)])
        self.lse[rows] = self.sums.log(rows)
        self.values[0][rows] = self.label.logit[rows] - self.lse[rows]
        if self.with_entropy:
            self.entropy[rows] = (self.lse[rows] - self.sums.mean(rows)).clamp_min(0)
            self.values[1][rows] = self.entropy[rows]

    def weights(self, rows: slice, grads: Grads) -> Sequence[Tensor | None]:
        return [-(weight_of(grads, i, self.lse[rows]) / self.temperature) for i in range(1 + self.with_entropy)]

    def gradient(self, rows: slice, u: Tensor, weights: Sequence[Any], buffers: Buffers) -> Tensor:
        label, log_q = weights[0], u.sub_(self.lse[rows, None])
        if self.with_entropy:
            q = torch.exp(log_q, out=buffers.buffer("work", u.shape[0]))
            gradient = log_q.add_(self.entropy[rows, None]).mul_(q).mul_(weights[1][:, None])
            gradient.addcmul_(q, label[:, None])
        else:
            gradient = log_q.exp_().mul_(label[:, None])
        return subtract_at(gradient, self.label.columns[rows], label)


class TeacherRows(RowFunction):
    """Per row T²·D and, with labels, the cross-entropy; as constants both sides' mass in the compared columns."""

    def __init__(self, frame: RowFrame, labels: Tensor | None, centre: Centre | None = None):
        """
        Args:
            centre: of the student's logits, if another row function loads and centres them.
        """
        self.shard, self.temperature = frame.shard, frame.temperature
        self.label = None if labels is None else LabelTerm(labels, frame)
        self.powers = (1.0,) if self.label is None else self.label.powers
        self.centre = centre or frame.centre()
        self.values = [frame.empty() for _ in range(1 + (labels is not None))]
        self.constants = [frame.like.new_ones(frame.num_rows) for _ in range(2)]

    def all_reduce(self, rows: slice, sums: Sequence[LogSums], picked: Sequence[Picked] = ()) -> None:
        label = [] if self.label is None else [self.label.picked(rows)]
        all_reduce_sums(self.shard, rows, sums, [*picked, *label])


class DenseRows(TeacherRows):
    """Against a teacher whose whole distribution is known.

        ∂D/∂u_v = slope_v − q_v · H,   H = Σ_w slope_w

    The two plain KLs need a single pass, because log(p/q) is linear in the logits. With x the logits of the leading side
    (the teacher's for forward KL, the student's for reverse KL), y the other side's, and e_v = exp(x_v − m):

        D = Σ_v softmax(x)_v · (x_v − lse_x − y_v + lse_y) = Σ_v e_v·(x_v − y_v) / Σ_v e_v − lse_x + lse_y

    and H is known: −1 for forward KL, D + 1 for reverse KL. All other divergences need both normalisers before they can
    compare, hence a second pass and a third collective.
    """

    def __init__(self, frame: RowFrame, teacher: DenseTeacher, divergence: Divergence, labels: Tensor | None):
        super().__init__(frame, labels)
        self.divergence, self.teacher, self.lender = divergence, teacher, teacher
        self.teacher_centre = frame.centre()
        leads, centre, other = divergence.leads, self.centre, self.teacher_centre
        self.student_sums = LogSums(centre, whole=True, powers=self.powers, weighted=leads == "student", against=other)
        self.teacher_sums = LogSums(other, whole=True, weighted=leads == "teacher", against=centre)
        self.student_lse, self.teacher_lse, self.slope_sum = (frame.empty() for _ in range(3))

    @property
    def passes(self) -> list[Pass]:
        if self.divergence.leads:
            return [(self.collect, self._complete_kl)]
        return [(self.collect, self.complete), (self._collect_terms, self._complete_terms)]

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        w = self.teacher.load(rows, buffers, self.teacher_centre, first=True)
        if self.label is not None:
            self.label.collect(rows, u)
        work = buffers.buffer("work", u.shape[0])
        for sums, x, y in ((self.student_sums, u, w), (self.teacher_sums, w, u)):
            exponentials = sums.add(rows, x, work)
            if sums.weighted is not None:
                sums.weigh(rows, exponentials, torch.sub(x, y, out=buffers.spare(x, "difference")))

    def complete(self, rows: slice) -> None:
        self.all_reduce(rows, [self.student_sums, self.teacher_sums])
        self.student_lse[rows] = self.student_sums.log(rows)
        self.teacher_lse[rows] = self.teacher_sums.log(rows)
        if self.label is not None:
            self.values[1][rows] = self.label.cross_entropy(rows, self.student_sums.log(rows, self.powers[-1]))

    def _complete_kl(self, rows: slice) -> None:
        # One pass is enough: D from the weighted mean of the leading side, H in closed form.
        self.complete(rows)
        difference = self.student_lse[rows] - self.teacher_lse[rows]
        if self.divergence.leads == "teacher":
            self._set_value(rows, self.teacher_sums.mean(rows) + difference)
            self.slope_sum[rows] = -1
        else:
            value = self.student_sums.mean(rows) - difference
            self._set_value(rows, value)
            self.slope_sum[rows] = value + 1

    def _collect_terms(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        # Second pass: this rank's parts of D = Σ f(p, q) and of H.
        w = self.teacher.load(rows, buffers, self.teacher_centre, first=False)
        log_q = torch.sub(u, self.student_lse[rows, None], out=buffers.buffer("work", u.shape[0]))
        p, q = Distribution(w - self.teacher_lse[rows, None]), Distribution(log_q)
        self.values[0][rows] = row_sum(self.divergence.value(p, q))
        self.slope_sum[rows] = row_sum(self.divergence.slope(p, q))

    def _complete_terms(self, rows: slice) -> None:
        self.shard.sum_(self.values[0][rows], self.slope_sum[rows])
        # A NaN must reach the gradient, too: the sign in TVD's slope would hide it.
        self.slope_sum[rows].masked_fill_(self.values[0][rows].isnan(), torch.nan)
        self._set_value(rows, self.values[0][rows])

    def _set_value(self, rows: slice, divergence: Tensor) -> None:
        # Below 0 there is only rounding. NaN stays.
        self.values[0][rows] = self.temperature**2 * divergence.clamp_min(0)

    def weights(self, rows: slice, grads: Grads) -> Sequence[Tensor | None]:
        # The weight of each column's slope, that of its q, and the gradient of the cross-entropy.
        kd = weight_of(grads, 0, self.student_lse[rows]) * self.temperature
        shared = LabelWeights(self.label, rows, kd, given(grads, 1)).shared
        return kd, shared - kd * self.slope_sum[rows], *grads[1:]

    def gradient(self, rows: slice, u: Tensor, weights: Sequence[Any], buffers: Buffers) -> Tensor:
        kd, factor, *of_label = weights
        label = LabelGradient(self.label, rows, u, of_label, buffers)
        w = self.teacher.load(rows, buffers, self.teacher_centre, first=False)
        buffers.held.pop("teacher", None)  # overwritten, as u is
        log_p, log_q = w.sub_(self.teacher_lse[rows, None]), u.sub_(self.student_lse[rows, None])
        slope, q = self.divergence.slope_(log_p, log_q)
        gradient = slope.mul_(kd[:, None]).addcmul_(q, factor[:, None])
        return label.add_to(gradient)


class TopKRows(TeacherRows):
    """Against a teacher that is known in k columns per row. S are these columns, R all others.

        D          Σ_{v∈S} f(p_v, q_v)  +  f(p_R, q_R) with `tail="bucket"`: R is one more outcome
        gradient   ∂D/∂u_v = slope_v − q_v·H for v in S,   exp(u_v − lse_R)·(slope_R − q_R·H) for v in R,   H = Σ slopes

    q_R comes from a logsumexp over R, never from 1 − Σ_S q: at q_R = 1e-9 the latter is noise. With a bucket every term is
    balanced (`Divergence.balance`), so that log-probabilities that were rounded to 16 bits on their way cannot make D
    negative. `truncate` leaves R out; `renormalize` conditions both sides on S. An id of −1 is an absent entry: neither
    side has mass there.

    The student's logits at S are summed over the ranks together with the normalisers (k + 1 numbers per row, two
    collectives). After that every rank holds the whole comparison, so every divergence costs one pass.

    With `with_label_logprob` the label's log-probability at T is a third value, of rows whose label is an entry of S.
    """

    def __init__(
        self,
        frame: RowFrame,
        teacher: TopKLogprobs,
        divergence: Divergence,
        tail: Tail,
        labels: Tensor | None,
        *,
        with_label_logprob: bool = False,
        centre: Centre | None = None,
    ):
        super().__init__(frame, labels, centre or frame.centre(keeps_inf=True))
        rest = () if teacher.rest_logprob is None else (teacher.rest_logprob,)
        self.held = (teacher.ids, teacher.logprobs, *rest)
        self.divergence, self.tail = divergence, tail
        self.balance = divergence.balance if tail == "bucket" else 0.0
        self.rest = LogSums(self.centre, whole=False, powers=self.powers)
        # Kept for backward, per row: the logsumexp over all columns and over R, the common factor slope_R − q_R·H of R's
        # columns, and ∂D/∂u at S, [N, k], which is the student's u there before `compare`.
        self.lse, self.rest_lse, self.rest_factor = (frame.empty() for _ in range(3))
        self.top = frame.empty(teacher.ids.shape[1])
        self.columns = self.shard.columns(teacher.ids)  # [N, k], during the passes
        if with_label_logprob:
            self.values.append(frame.empty())

    @property
    def ids(self) -> Tensor:
        """[N, k], in the student's vocabulary."""
        return self.held[0]

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        self.columns = self.columns.new_empty(0)
        return super().outputs()

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        if self.label is not None:
            self.label.collect(rows, u)
        self.top[rows] = self.rest.add_others(rows, u, self.columns[rows], buffers.spare(u))

    def complete(self, rows: slice) -> None:
        self.all_reduce(rows, [self.rest], [(self.top, self.columns[rows])])
        top = self.top[rows].masked_fill(self.ids[rows] < 0, -torch.inf).clamp_min_(floor_of(self.top.dtype))
        # Where R is empty or masked, its sums are those of columns at the floor.
        rest_lse = torch.where(self.rest.max[rows] > floor_of(top.dtype), self.rest.log(rows), floor_of(top.dtype))
        lse = _logsumexp(top, rest_lse)
        self.lse[rows], self.rest_lse[rows] = lse, rest_lse
        self.compare(rows, top, lse, rest_lse)
        if self.label is None:
            return
        at_one = lse
        if self.temperature != 1:
            at_one = _logsumexp(top * self.temperature, self.rest.log(rows, self.powers[-1]))
        self.values[1][rows] = self.label.cross_entropy(rows, at_one)
        if len(self.values) > 2:
            label = self.ids[rows] == self.label.ids[rows, None]
            others = _logsumexp(torch.where(label, floor_of(top.dtype), top), rest_lse)
            self.values[2][rows] = self.label.logprob(rows, others)

    def compare(self, rows: slice, top: Tensor, lse: Tensor, rest_lse: Tensor) -> None:
        """Sets T²·D, both sides' mass in S, and what backward needs, for these rows.

        Args:
            top: [n, k], the student's u at S, at the floor for absent entries.
            lse, rest_lse: [n], the logsumexp of u over all columns and over R.
        """
        log_p, log_q = self.teacher_logprobs(rows, top.dtype), top - lse[:, None]
        for mass, logprobs in ((self.constants[0], log_p), (self.constants[1], log_q)):
            mass[rows] = logprobs.exp().sum(1)
        if self.tail == "renormalize":
            log_p, log_q = log_p - log_p.logsumexp(1, keepdim=True), top - top.logsumexp(1, keepdim=True)
        q = Distribution(log_q)
        value, slope_at_top = self._terms(Distribution(log_p), q)
        value, slope = value.sum(1), slope_at_top.sum(1)
        rest_q = Distribution(rest_lse - lse)
        rest_slope = torch.zeros_like(slope)
        if self.tail == "bucket":
            rest_p = Distribution(self.teacher_rest(rows, log_p))
            rest_value, rest_slope = self._terms(rest_p, rest_q)
            kept = rest_lse > floor_of(top.dtype)
            if self.divergence.needs_support:
                kept &= rest_p.log > floor_of(top.dtype)
            rest_slope = torch.where(kept, rest_slope, 0)
            value, slope = value + torch.where(kept, rest_value, 0), slope + rest_slope
        if self.tail != "truncate":
            value = value.clamp_min(0)  # below zero there is only rounding
        self.values[0][rows] = self.temperature**2 * value
        slope = slope.masked_fill(value.isnan(), torch.nan)  # TVD's sign would hide it
        self.top[rows] = slope_at_top - q.prob * slope[:, None]
        self.rest_factor[rows] = 0 if self.tail == "renormalize" else rest_slope - rest_q.prob * slope

    def _terms(self, p: Distribution, q: Distribution) -> tuple[Tensor, Tensor]:
        """Per compared token the divergence's term and its slope, with a bucket balanced by κ·(q − p)."""
        value, slope = self.divergence.value(p, q), self.divergence.slope(p, q)
        if self.balance:
            value, slope = value + self.balance * (q.prob - p.prob), slope + self.balance * q.prob
        return value, slope

    def teacher_logprobs(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """The teacher's log-probabilities of these rows, [n, k] in `dtype`, with the floor instead of −inf."""
        return self.held[1][rows].to(dtype).clamp_min(floor_of(dtype))

    def teacher_rest(self, rows: slice, log_p: Tensor) -> Tensor:
        """log p_R [n], at least the floor: the teacher's `rest_logprob`, or without one what `log_p` [n, k] leaves."""
        if len(self.held) < 3:
            return rest_of(log_p)
        return self.held[2][rows].to(log_p.dtype).clamp_min(floor_of(log_p.dtype))

    def weights(self, rows: slice, grads: Grads) -> Sequence[Tensor | None]:
        # The weight of D, the factor of R's columns, the columns of S, and the gradients of the label's values.
        lse = self.lse[rows]
        kd = weight_of(grads, 0, lse) * self.temperature
        factor = kd * self.rest_factor[rows]
        if self.label is not None:
            shared = LabelWeights(self.label, rows, lse, given(grads, 1), given(grads, 2)).shared
            factor = factor + shared * (self.rest_lse[rows] - lse).exp()
        return kd, factor, self.shard.columns(self.ids[rows]), *grads[1:]

    def gradient(self, rows: slice, u: Tensor, weights: Sequence[Any], buffers: Buffers) -> Tensor:
        kd, factor, columns, *of_label = weights
        label = LabelGradient(self.label, rows, u, of_label, buffers)
        softmax = (u.gather(1, columns), label.shared) if label.given else None
        at_top = self.gradient_at_top(rows, kd, softmax)
        gradient = u.sub_(self.rest_lse[rows, None]).exp_().mul_(factor[:, None]).scatter_(1, columns, at_top)
        return label.add_to(gradient)

    def gradient_at_top(self, rows: slice, kd: Tensor, softmax: tuple[Tensor, Tensor] | None) -> Tensor:
        """∂(Σ kd · D + ce · cross-entropy)/∂u at the columns of S, without the label's own column, [n, k].

        Args:
            kd: weights per row, [n].
            softmax: the student's u at S, [n, k], and what all columns share of ce, [n] (`LabelGradient.shared`); None
                without labels.
        """
        gradient = self.top[rows] * kd[:, None]
        if softmax is None:
            return gradient
        top, shared = softmax
        return gradient.addcmul_((top - self.lse[rows, None]).exp(), shared[:, None])


def rest_of(logprobs: Tensor) -> Tensor:
    """log(1 − Σ exp(logprobs)) per row, [n, k] → [n]; the floor where the sum is at least `FULL_MASS`."""
    mass = logprobs.exp().sum(1)
    return torch.where(mass >= FULL_MASS, floor_of(mass.dtype), torch.log1p(-mass.clamp_max(FULL_MASS)))


def _logsumexp(top: Tensor, rest: Tensor) -> Tensor:
    """Of each row of `top` [n, k] and its entry of `rest` [n]: [n]."""
    return torch.cat([top, rest[:, None]], 1).logsumexp(1)


class SampledRows(TeacherRows):
    """Against a teacher that is known by draws from its distribution (random sampling KD, arXiv 2503.16870).

    With w the weights of a row's ids, each id's share of the draws:

        D          Σ w_v · (log p_v − log q_v)
        gradient   ∂D/∂u_v = q_v − w_v

    Both are linear in w, and the expectation of w_v is the teacher's probability p_v. So D is forward KL in expectation,
    and its gradient is that of forward KL: no column is left out, unlike with a top k. Of the teacher's log-probabilities
    only the sum Σ w log p is needed, which comes with the draws; as it is taken at the same ids as the student's, a student
    that equals the teacher has D = 0 whatever was drawn. D of single rows may be negative, and is not clamped, which would
    bias it. Divergences that are not linear in p have no unbiased estimate of this kind.

    The student's logits at the ids are summed over the ranks together with the normaliser (m + 1 numbers per row, two
    collectives). An id of −1 is an absent entry. A row without draws has the value 0 and no gradient.
    """

    def __init__(self, frame: RowFrame, teacher: SampledTokens, labels: Tensor | None):
        super().__init__(frame, labels, frame.centre(keeps_inf=True))
        self.held, self._mean_logprob = (teacher.ids, teacher.counts), teacher.mean_logprob
        self.sums = LogSums(self.centre, whole=True, powers=self.powers)
        self.drawn = frame.empty(teacher.ids.shape[1])
        # Kept for backward, per row: the logsumexp, and Σ w, which is 1, or 0 without draws; NaN where D is.
        self.lse, self.total = (frame.empty() for _ in range(2))

    def outputs(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        self.drawn, self._mean_logprob = self.drawn.new_empty(0), None
        return super().outputs()

    def collect(self, rows: slice, u: Tensor, buffers: Buffers) -> None:
        if self.label is not None:
            self.label.collect(rows, u)
        columns = self.shard.columns(self.held[0][rows])
        self.drawn[rows] = torch.where(columns < self.shard.size, u.gather(1, columns).clamp_min_(floor_of(u.dtype)), 0)
        self.sums.add(rows, u, buffers.spare(u))

    def complete(self, rows: slice) -> None:
        self.all_reduce(rows, [self.sums], [(self.drawn, self.shard.columns(self.held[0][rows]))])
        lse = self.lse[rows] = self.sums.log(rows)
        weights = self._weights(rows, lse.dtype)
        total = (weights.amax(1) > 0).to(lse.dtype)
        value = -(weights * (self.drawn[rows] - lse[:, None])).sum(1)
        if self._mean_logprob is not None:
            value = value + total * self._mean_logprob[rows].to(lse.dtype)
        self.values[0][rows] = self.temperature**2 * value
        self.total[rows] = total.masked_fill(value.isnan(), torch.nan)
        if self.label is not None:
            self.values[1][rows] = self.label.cross_entropy(rows, self.sums.log(rows, self.powers[-1]))

    def _weights(self, rows: slice, dtype: torch.dtype) -> Tensor:
        ids, counts = self.held
        return SampledTokens(ids[rows], counts[rows]).weights(dtype)

    def gradient(self, rows: slice, u: Tensor, grads: Grads, buffers: Buffers) -> Tensor:
        label = LabelGradient(self.label, rows, u, grads[1:], buffers)
        kd = weight_of(grads, 0, u) * self.temperature
        gradient = u.sub_(self.lse[rows, None]).exp_()
        gradient.mul_((kd * self.total[rows] + label.shared)[:, None])
        # Ids are distinct but for absent ones, which meet in a dummy column. So nothing is added up in an order that varies.
        columns = self.shard.columns(self.held[0][rows])
        at_ids = gradient.gather(1, columns).addcmul_(self._weights(rows, u.dtype), kd[:, None], value=-1)
        return label.add_to(gradient.scatter_(1, columns, at_ids))
