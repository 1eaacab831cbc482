"""Runs the kernels of `rows` for row functions: fills the sums that a pass collects, and writes the gradient.

What a `RowFunction` keeps, and how its sums become a loss, is the same as without kernels. Only the two visits to the
logits differ: these read them in their own dtype, with no centred copy in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from distill_rl.losses.core.dense import DenseRows, LogitChunks
from distill_rl.losses.core.labels import LabelRows, LabelTerm, given, weight_of
from distill_rl.losses.core.row_function import RowFunction, RowKernels
from distill_rl.losses.core.sparse import TopKRows
from distill_rl.losses.core.streaming import Buffers, Centre, LogSums, floor_of
from distill_rl.losses.kernels import rows as kernels
from distill_rl.losses.kernels import topk

_BLOCK = 4096
"""Columns that one program works on at a time."""
_PAIR_BLOCK = 2048
"""The same where it holds two rows, of student and teacher: more would spill registers on sm_80."""
_GROUP = 64
"""Columns of which `topk.group_sums` keeps one maximum and one sum."""
_WARPS = 8
_FLOOR = floor_of(torch.float32)


def kernels_for(function: RowFunction) -> RowKernels | None:
    """The kernels of a row function; None if it has none.

    There are kernels for top-k targets, forward and reverse KL against dense logits, and labels without entropy.
    """
    if type(function) is TopKRows:
        return TopKKernels(function)
    if type(function) is DenseRows and function.divergence.leads:
        return PairKernels(function)
    if type(function) is LabelRows and not function.with_entropy:
        return LabelKernels(function)
    return None


def try_out(device: torch.device) -> None:
    """Runs small kernels on a device; raises whatever keeps Triton from working there."""
    out = torch.zeros(1, 16, device=device, dtype=torch.bfloat16)
    _put_entries(out, None, torch.tensor([[3]], device=device), torch.ones(1, 1, device=device), None)
    columns, *_ = best(out, 1, 1.0)
    if columns.tolist() != [[3]]:
        raise RuntimeError("a kernel's result is wrong")


def best(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The k largest logits of each row, and what is left of the row; two kernels, of which one reads all columns.

    Args:
        logits: [N, Vl], contiguous in a row.
        k: at most Vl and `kernels.MOST_ENTRIES`.

    Returns:
        int64 columns [N, k]; (z − c)/T of these columns, [N, k], largest first, with c the largest logit; the logsumexp
        [N] of (z − c)/T over the other columns, the floor where there are none; and c [N], `Centre.NOTHING` if that is
        −inf. All but the columns in fp32.
    """
    n, num_columns = logits.shape
    padded = max(2, triton.next_power_of_2(k))
    num_groups = triton.cdiv(num_columns, _GROUP)
    at_once = min(64, triton.next_power_of_2(num_groups))
    like = logits.new_empty(0, dtype=torch.float32)
    maxima, totals = like.new_empty(n, num_groups), like.new_empty(n, num_groups)
    _launch(
        topk.group_sums,
        (n, triton.cdiv(num_groups, at_once)),
        logits,
        maxima,
        totals,
        logits.stride(0),
        num_columns,
        num_groups,
        1 / temperature,
        _FLOOR,
        GROUP=_GROUP,
        GROUPS=at_once,
    )
    columns = torch.empty(n, k, dtype=torch.int64, device=logits.device)
    values, rest = like.new_empty(n, k), like.new_empty(n)
    _launch(
        topk.best_columns,
        (n,),
        logits,
        maxima,
        totals,
        columns,
        values,
        rest,
        logits.stride(0),
        num_columns,
        num_groups,
        k,
        1 / temperature,
        _FLOOR,
        GROUP=_GROUP,
        ALL_GROUPS=max(padded, triton.next_power_of_2(num_groups)),
        K=padded,
    )
    centre = values[:, 0].masked_fill(values[:, 0] <= _FLOOR, Centre.NOTHING)
    values = ((values - centre[:, None]) / temperature).clamp_min(_FLOOR)
    return columns, values, rest.clamp_min(_FLOOR), centre


class TopKKernels(RowKernels):
    """Those of `TopKRows`: the rest R is summed by the kernel, the k columns of S are torch's."""

    def __init__(self, function: TopKRows):
        self.function = function

    def collect(self, rows: slice, logits: Tensor, order: Tensor | None, buffers: Buffers) -> None:
        function = self.function
        columns = function.shard.columns(function.teacher.ids[rows])
        found = _row_sums(logits, order, _length(rows), columns, function.rest)
        _set_centre(function.centre, rows, found["largest"])
        function.rest.max[rows] = _centred(function.centre, rows, found["maximum"])
        _set_totals(function.rest, rows, found)
        function.top[rows] = _gathered(logits, order, columns, function.centre, rows, absent=0.0)
        _collect_label(function.label, rows, logits, order, function.centre)

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
        function = self.function
        columns = function.shard.columns(function.teacher.ids[rows])
        top = _gathered(logits, order, columns, function.centre, rows, absent=_FLOOR, common=True)
        kd = weight_of(grads, 0, top) * function.temperature
        label = _LabelWeights(function.label, rows, top, given(grads, 1), given(grads, 2))
        rest_q = (function.rest_lse[rows] - function.lse[rows]).exp()
        factor = kd * function.rest_factor[rows] + label.shared * rest_q
        _row_gradient(logits, order, function.centre, rows, factor, function.rest_lse[rows], label, out, counts)
        values = function.gradient_at_top(rows, top, kd, label.shared)
        values = label.at_entries(values, columns, top)
        _put_entries(out, order, columns, values, counts)


class PairKernels(RowKernels):
    """Those of `DenseRows` with a plain KL. Logits of a teacher that sends hidden states are made a chunk at a time."""

    def __init__(self, function: DenseRows):
        self.function, self.by_chunk = function, type(function.teacher) is not LogitChunks

    def collect(self, rows: slice, logits: Tensor, order: Tensor | None, buffers: Buffers) -> None:
        function = self.function
        teacher, teacher_order = function.teacher.plain(rows, buffers)
        at_one = len(function.student_sums.powers) > 1
        n = _length(rows)
        found = {
            name: logits.new_empty(n, dtype=torch.float32)
            for name in ("largest", "total", "total_at_one", "teacher_largest", "teacher_total", "weighted")
        }
        _launch(
            kernels.pair_sums,
            (n,),
            logits,
            teacher,
            logits if order is None else order,
            logits if teacher_order is None else teacher_order,
            found["largest"],
            found["total"],
            found["total_at_one"],
            found["teacher_largest"],
            found["teacher_total"],
            found["weighted"],
            logits.stride(0),
            teacher.stride(0),
            logits.shape[1],
            function.centre.scale,
            _FLOOR,
            ORDERED=order is not None,
            TEACHER_ORDERED=teacher_order is not None,
            TEACHER_LEADS=function.divergence.leads == "teacher",
            AT_ONE=at_one,
            BLOCK=_block(logits.shape[1], _PAIR_BLOCK),
        )
        _set_centre(function.centre, rows, found["largest"])
        _set_centre(function.teacher_centre, rows, found["teacher_largest"])
        _set_totals(function.student_sums, rows, found)
        function.teacher_sums.totals[0][rows] = found["teacher_total"]
        leading = function.teacher_sums if function.divergence.leads == "teacher" else function.student_sums
        assert leading.weighted is not None
        leading.weighted[rows] = found["weighted"]
        _collect_label(function.label, rows, logits, order, function.centre)

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
        function = self.function
        teacher, teacher_order = function.teacher.plain(rows, buffers)
        lse = function.student_lse[rows]
        kd = weight_of(grads, 0, lse[:, None]) * function.temperature
        label = _LabelWeights(function.label, rows, lse[:, None], given(grads, 1), None)
        block = _block(logits.shape[1], _PAIR_BLOCK)
        _launch(
            kernels.pair_gradient,
            (_length(rows), triton.cdiv(logits.shape[1], block)),
            logits,
            teacher,
            logits if order is None else order,
            logits if teacher_order is None else teacher_order,
            logits if counts is None else counts,
            out,
            function.centre.value[rows],
            lse,
            function.teacher_centre.value[rows],
            function.teacher_lse[rows],
            kd,
            label.shared - kd * function.slope_sum[rows],
            label.at_one,
            label.lse,
            label.columns,
            label.weight,
            logits.stride(0),
            teacher.stride(0),
            out.stride(0),
            logits.shape[1],
            function.centre.scale,
            _FLOOR,
            ORDERED=order is not None,
            TEACHER_ORDERED=teacher_order is not None,
            COUNTED=counts is not None,
            TEACHER_LEADS=function.divergence.leads == "teacher",
            AT_ONE=label.apart,
            LABELLED=label.given,
            BLOCK=block,
        )


class LabelKernels(RowKernels):
    """Those of `LabelRows` without entropy."""

    def __init__(self, function: LabelRows):
        self.function = function

    def collect(self, rows: slice, logits: Tensor, order: Tensor | None, buffers: Buffers) -> None:
        function = self.function
        found = _row_sums(logits, order, _length(rows), None, function.sums)
        _set_centre(function.centre, rows, found["largest"])
        _set_totals(function.sums, rows, found)
        _collect_label(function.label, rows, logits, order, function.centre)

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
        function = self.function
        lse = function.lse[rows]
        factor = -weight_of(grads, 0, lse[:, None]) / function.temperature
        label = _LabelWeights(None, rows, lse[:, None], None, None)
        label.given, label.columns, label.weight = True, function.label.columns[rows], factor
        _row_gradient(logits, order, function.centre, rows, factor, lse, label, out, counts)


class _LabelWeights:
    """The label's part of a gradient, in the terms of the kernels; see `labels.LabelGradient`."""

    def __init__(
        self, term: LabelTerm | None, rows: slice, like: Tensor, ce: Tensor | None, logprob_grad: Tensor | None
    ):
        """
        Args:
            like: any tensor with n rows and the dtype of the arithmetic.
            ce, logprob_grad: [n], weights of the cross-entropy and of the label's log-probability.
        """
        nothing = like.new_zeros(like.shape[0])
        self.given, self.apart = term is not None, False
        self.shared = self.weight = self.at_one = self.lse = nothing
        self.columns = nothing
        self._logprob_grad, self._others = logprob_grad, nothing
        if term is None:
            return
        self.columns = term.columns[rows]
        if logprob_grad is not None:
            self.shared, self._others = logprob_grad.to(like.dtype) * (-1 / term.temperature), term.others[rows]
        if ce is not None and term.temperature == 1:
            self.shared = self.shared + ce.to(like.dtype)
        elif ce is not None:  # may be one number, expanded
            self.apart, self.at_one, self.lse = True, ce.to(like.dtype).contiguous(), term.lse[rows]
        self.temperature = term.temperature
        self.weight = self.shared + self.at_one

    def at_entries(self, values: Tensor, columns: Tensor, top: Tensor) -> Tensor:
        """The gradient at a row's entries [n, k] with the label terms that `shared` has not added.

        Args:
            values: the gradient there, `shared` included.
            columns: of the entries.
            top: the entries' centred u.
        """
        if not self.given:
            return values
        at_label = columns == self.columns[:, None]
        if self._logprob_grad is None:
            values = values - torch.where(at_label, self.shared[:, None], 0)
        else:
            exact = torch.where(self._logprob_grad[:, None] != 0, -(self.shared * self._others)[:, None], values)
            shared = torch.where(self._logprob_grad != 0, 0, self.shared)[:, None]
            values = torch.where(at_label, exact - shared, values)
        if self.apart:
            softmax = (top * self.temperature - self.lse[:, None]).exp()
            values = values + self.at_one[:, None] * (softmax - at_label.to(values.dtype))
        return values


def _row_sums(logits: Tensor, order: Tensor | None, n: int, columns: Tensor | None, sums: LogSums) -> dict[str, Tensor]:
    """Runs `rows.row_sums` for n rows.

    Args:
        columns: [n, k], the columns that are left out; `logits.shape[1]` for none. None: no column is left out.
        sums: that will receive the totals; not changed.
    """
    num_columns = logits.shape[1]
    found = {name: logits.new_empty(n, dtype=torch.float32) for name in ("largest", "maximum", "total", "total_at_one")}
    if columns is None:
        entries, num_entries = logits, 0
    else:
        beyond = columns.new_full((n, 1), torch.iinfo(torch.int32).max)
        entries, num_entries = torch.cat([columns.sort(1).values, beyond], 1).to(torch.int32), columns.shape[1]
    _launch(
        kernels.row_sums,
        (n,),
        logits,
        logits if order is None else order,
        entries,
        found["largest"],
        found["maximum"],
        found["total"],
        found["total_at_one"],
        logits.stride(0),
        num_columns,
        num_entries,
        sums.centre.scale,
        _FLOOR,
        ORDERED=order is not None,
        ENTRIES=columns is not None,
        AT_ONE=len(sums.powers) > 1,
        BLOCK=_block(num_columns),
    )
    return found


def _row_gradient(
    logits: Tensor,
    order: Tensor | None,
    centre: Centre,
    rows: slice,
    factor: Tensor,
    lse: Tensor,
    label: _LabelWeights,
    out: Tensor,
    counts: Tensor | None,
) -> None:
    """Runs `rows.row_gradient` for these rows."""
    block = _block(logits.shape[1])
    _launch(
        kernels.row_gradient,
        (_length(rows), triton.cdiv(logits.shape[1], block)),
        logits,
        logits if order is None else order,
        logits if counts is None else counts,
        out,
        centre.value[rows],
        factor,
        lse,
        label.at_one,
        label.lse,
        label.columns,
        label.weight,
        logits.stride(0),
        out.stride(0),
        logits.shape[1],
        centre.scale,
        ORDERED=order is not None,
        COUNTED=counts is not None,
        AT_ONE=label.apart,
        LABELLED=label.given,
        BLOCK=block,
    )


def _put_entries(out: Tensor, order: Tensor | None, columns: Tensor, values: Tensor, counts: Tensor | None) -> None:
    """Runs `rows.put_entries`."""
    n, k = columns.shape
    block = min(1024, triton.next_power_of_2(k))
    _launch(
        kernels.put_entries,
        (n, triton.cdiv(k, block)),
        out,
        out if order is None else order,
        out if counts is None else counts,
        columns.contiguous(),
        values.contiguous(),
        out.stride(0),
        out.shape[1],
        k,
        ORDERED=order is not None,
        COUNTED=counts is not None,
        BLOCK=block,
    )


def _gathered(
    logits: Tensor,
    order: Tensor | None,
    columns: Tensor,
    centre: Centre,
    rows: slice,
    *,
    absent: float,
    common: bool = False,
) -> Tensor:
    """u = (z − c)/T at single columns, [n] or [n, k], fp32; the floor where z is −inf.

    Args:
        columns: `logits.shape[1]` where another rank holds the column, or none does.
        absent: for these.
        common: centre with the ranks' common centre instead of this rank's.
    """
    held = columns < logits.shape[1]
    if not logits.shape[1]:
        return torch.full(columns.shape, absent, dtype=torch.float32, device=logits.device)
    numbers = torch.arange(_length(rows), device=logits.device) if order is None else order
    numbers = numbers if columns.ndim == 1 else numbers[:, None]
    z = logits[numbers, torch.where(held, columns, 0)].float()
    c = (centre.value if common else centre.local)[rows]
    u = ((z - (c if columns.ndim == 1 else c[:, None])) * centre.scale).clamp_min(_FLOOR)
    return torch.where(held, u, absent)


def _collect_label(term: LabelTerm | None, rows: slice, logits: Tensor, order: Tensor | None, centre: Centre) -> None:
    """What `LabelTerm.collect` does."""
    if term is not None:
        term.logit[rows] = _gathered(logits, order, term.columns[rows], centre, rows, absent=0.0)


def _set_centre(centre: Centre, rows: slice, largest: Tensor) -> None:
    """What `Centre.measure` does, from the largest logit [n]."""
    centre.local[rows] = largest.masked_fill(largest <= _FLOOR, Centre.NOTHING)


def _centred(centre: Centre, rows: slice, z: Tensor) -> Tensor:
    """(z − c)/T [n], the floor where z is the floor."""
    u = ((z - centre.local[rows]) * centre.scale).clamp_min(_FLOOR)
    return torch.where(z <= _FLOOR, _FLOOR, u)


def _set_totals(sums: LogSums, rows: slice, found: dict[str, Tensor]) -> None:
    """Sets the totals of these rows: that at the temperature, and where it is wanted that at temperature 1."""
    sums.totals[0][rows] = found["total"]
    if len(sums.powers) > 1:
        sums.totals[1][rows] = found["total_at_one"]


def _block(num_columns: int, largest: int = _BLOCK) -> int:
    """Columns at a time for rows of this many: a power of two, at most `largest`."""
    return min(largest, max(16, triton.next_power_of_2(num_columns)))


def _length(rows: slice) -> int:
    return rows.stop - rows.start


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Starts one program per point of the grid, on the device of the first argument; none for an empty grid."""
    if all(grid):
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, num_warps=_WARPS, **constants)
