"""Starts the kernels of `rows`: for the visits of a row function to the logits, and for a teacher's top k.

What a `RowFunction` keeps, and how its sums become a loss, is the same as without kernels. Only the two visits to the
logits differ: these read them in their own dtype, with no centred copy in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from distill_rl.losses.core.rows import (
    Centre,
    DenseRows,
    LabelRows,
    LabelTerm,
    LabelWeights,
    LogSums,
    RowFunction,
    RowKernels,
    TopKRows,
    Visit,
    floor_of,
    given,
    weight_of,
)
from distill_rl.losses.kernels import rows as kernels

_BLOCK = 4096
"""Columns that one program works on at a time."""
PAIR_BLOCK = 2048
"""The same where it holds two rows, of student and teacher: more would spill registers on sm_80."""
_GROUP = 64
"""Columns of which `group_sums` keeps one maximum and one sum."""
_WARPS = 8
FLOOR = floor_of(torch.float32)


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


class TopKKernels(RowKernels):
    """Those of `TopKRows`: the rest R is summed by the kernel, the k columns of S are torch's."""

    def __init__(self, function: TopKRows):
        self.function = function

    def collect(self, visit: Visit) -> None:
        function, rows = self.function, visit.rows
        columns = function.shard.columns(function.ids[rows])
        found = _row_sums(visit, columns, function.rest)
        _set_centre(function.centre, rows, found["largest"])
        maximum = found["maximum"]
        u = ((maximum - function.centre.local[rows]) * function.centre.scale).clamp_min(FLOOR)
        function.rest.max[rows] = torch.where(maximum <= FLOOR, FLOOR, u)
        _set_totals(function.rest, rows, found)
        function.top[rows] = _gathered(visit, columns, function.centre.local, function.centre.scale, absent=0.0)
        _collect_label(function.label, visit, function.centre)

    def gradient(self, visit: Visit, grads: Sequence[Tensor | None], out: Tensor, counts: Tensor | None) -> None:
        function, rows = self.function, visit.rows
        columns = function.shard.columns(function.ids[rows])
        top = _gathered(visit, columns, function.centre.value, function.centre.scale, absent=FLOOR)
        kd = weight_of(grads, 0, top) * function.temperature
        label = LabelWeights(function.label, rows, top, given(grads, 1), given(grads, 2))
        rest_q = (function.rest_lse[rows] - function.lse[rows]).exp()
        factor = kd * function.rest_factor[rows] + label.shared * rest_q
        _row_gradient(visit, function.centre, factor, function.rest_lse[rows], label, out, counts)
        values = function.gradient_at_top(rows, kd, (top, label.shared))
        put_entries(out, visit.order, columns, _with_label(label, values, columns, top), counts)


class PairKernels(RowKernels):
    """Those of `DenseRows` with a plain KL. Logits of a teacher that sends hidden states are made a chunk at a time."""

    def __init__(self, function: DenseRows):
        self.function, self.by_chunk = function, function.teacher.computed

    def collect(self, visit: Visit) -> None:
        function = self.function
        rows, logits, order, buffers = visit
        teacher, teacher_order = function.teacher.plain(rows, buffers)
        teacher_leads = function.divergence.leads == "teacher"
        names = ("largest", "total", "total_at_one", "teacher_largest", "teacher_total", "weighted")
        found = _outputs(names, visit, function.student_sums)
        sizes = logits.stride(0), teacher.stride(0), logits.shape[1], function.centre.scale, FLOOR
        arguments = logits, teacher, order, teacher_order, *found.values(), *sizes
        block = _block_for(logits.shape[1], PAIR_BLOCK)
        _start(kernels.pair_sums, (_length(rows),), *arguments, TEACHER_LEADS=teacher_leads, BLOCK=block)
        _set_centre(function.centre, rows, found["largest"])
        _set_centre(function.teacher_centre, rows, found["teacher_largest"])
        _set_totals(function.student_sums, rows, found)
        function.teacher_sums.totals[1.0][rows] = found["teacher_total"]
        leading = function.teacher_sums if teacher_leads else function.student_sums
        assert leading.weighted is not None
        leading.weighted[rows] = found["weighted"]
        _collect_label(function.label, visit, function.centre)

    def gradient(self, visit: Visit, grads: Sequence[Tensor | None], out: Tensor, counts: Tensor | None) -> None:
        function = self.function
        rows, logits, order, buffers = visit
        teacher, teacher_order = function.teacher.plain(rows, buffers)
        lse = function.student_lse[rows]
        kd = weight_of(grads, 0, lse[:, None]) * function.temperature
        label = LabelWeights(function.label, rows, lse[:, None], given(grads, 1))
        factor = label.shared - kd * function.slope_sum[rows]
        normalisers = function.centre.value[rows], lse, function.teacher_centre.value[rows], function.teacher_lse[rows]
        sizes = logits.stride(0), teacher.stride(0), out.stride(0), logits.shape[1], function.centre.scale, FLOOR
        block = _block_for(logits.shape[1], PAIR_BLOCK)
        grid = _length(rows), triton.cdiv(logits.shape[1], block)
        teacher_leads = function.divergence.leads == "teacher"
        arguments = logits, teacher, order, teacher_order, counts, out, *normalisers, kd, factor
        further = *_label_arguments(label), *sizes
        _start(kernels.pair_gradient, grid, *arguments, *further, TEACHER_LEADS=teacher_leads, BLOCK=block)


class LabelKernels(RowKernels):
    """Those of `LabelRows` without entropy."""

    def __init__(self, function: LabelRows):
        self.function = function

    def collect(self, visit: Visit) -> None:
        function = self.function
        found = _row_sums(visit, None, function.sums)
        _set_centre(function.centre, visit.rows, found["largest"])
        _set_totals(function.sums, visit.rows, found)
        _collect_label(function.label, visit, function.centre)

    def gradient(self, visit: Visit, grads: Sequence[Tensor | None], out: Tensor, counts: Tensor | None) -> None:
        function, rows = self.function, visit.rows
        lse = function.lse[rows]
        factor = -weight_of(grads, 0, lse[:, None]) / function.temperature
        label = LabelWeights(function.label, rows, lse[:, None], factor)
        _row_gradient(visit, function.centre, factor, lse, label, out, counts)


def _label_arguments(label: LabelWeights) -> tuple[Tensor | None, ...]:
    """What kernels take for the label terms: `factor_at_one`, `lse_at_one`, `label` and `label_weight`."""
    at_one = (label.at_one, label.lse) if label.apart else (None, None)
    of_label = (label.columns, label.shared + label.at_one) if label.given else (None, None)
    return *at_one, *of_label


def _with_label(label: LabelWeights, values: Tensor, columns: Tensor, top: Tensor) -> Tensor:
    """The gradient at a row's entries [n, k] with the label terms that `shared` has not added."""
    if not label.given:
        return values
    at_label = columns == label.columns[:, None]
    if label.logprob_grad is None:
        values = values - torch.where(at_label, label.shared[:, None], 0)
    else:
        exact = torch.where(label.logprob_grad[:, None] != 0, -(label.shared * label.others)[:, None], values)
        shared = torch.where(label.logprob_grad != 0, 0, label.shared)[:, None]
        values = torch.where(at_label, exact - shared, values)
    if label.apart:
        softmax = (top * label.temperature - label.lse[:, None]).exp()
        values = values + label.at_one[:, None] * (softmax - at_label.to(values.dtype))
    return values


def _outputs(names: Sequence[str], visit: Visit, sums: LogSums) -> dict[str, Any]:
    """An fp32 tensor [n] for each name, None for a total at temperature 1 that `sums` does not have."""
    found = {name: visit.logits.new_empty(_length(visit.rows), dtype=torch.float32) for name in names}
    return found if len(sums.totals) > 1 else found | {"total_at_one": None}


def _row_sums(visit: Visit, columns: Tensor | None, sums: LogSums) -> dict[str, Any]:
    """Runs `rows.row_sums`, without the columns [n, k] of each row, if there are any, for totals like those of `sums`."""
    rows, logits, order, _ = visit
    entries, num_entries = None, 0
    if columns is not None:
        beyond = columns.new_full((_length(rows), 1), torch.iinfo(torch.int32).max)
        entries, num_entries = torch.cat([columns.sort(1).values, beyond], 1).to(torch.int32), columns.shape[1]
    found = _outputs(("largest", "maximum", "total", "total_at_one"), visit, sums)
    sizes = logits.stride(0), logits.shape[1], num_entries, sums.centre.scale, FLOOR
    arguments = logits, order, entries, *found.values(), *sizes
    _start(kernels.row_sums, (_length(rows),), *arguments, BLOCK=_block_for(logits.shape[1]))
    return found


def _row_gradient(
    visit: Visit, centre: Centre, factor: Tensor, lse: Tensor, label: LabelWeights, out: Tensor, counts: Tensor | None
) -> None:
    rows, logits, order, _ = visit
    block = _block_for(logits.shape[1])
    terms = centre.value[rows], factor, lse, *_label_arguments(label)
    sizes = logits.stride(0), out.stride(0), logits.shape[1], centre.scale
    grid = _length(rows), triton.cdiv(logits.shape[1], block)
    _start(kernels.row_gradient, grid, logits, order, counts, out, *terms, *sizes, BLOCK=block)


def put_entries(out: Tensor, order: Tensor | None, columns: Tensor, values: Tensor, counts: Tensor | None) -> None:
    n, k = columns.shape
    block = min(1024, triton.next_power_of_2(k))
    entries, sizes = (columns.contiguous(), values.contiguous()), (out.stride(0), out.shape[1], k)
    _start(kernels.put_entries, (n, triton.cdiv(k, block)), out, order, counts, *entries, *sizes, BLOCK=block)


def _gathered(visit: Visit, columns: Tensor, centres: Tensor, scale: float, *, absent: float) -> Tensor:
    """u = (z − c)/T at single columns, [n] or [n, k], fp32; the floor where z is −inf."""
    # The columns are `logits.shape[1]` where another rank holds the column, or none does: u is `absent` there.
    rows, logits, order, _ = visit
    if not logits.shape[1]:
        return torch.full(columns.shape, absent, dtype=torch.float32, device=logits.device)
    held = columns < logits.shape[1]
    numbers, c = torch.arange(_length(rows), device=logits.device) if order is None else order, centres[rows]
    if columns.ndim == 2:
        numbers, c = numbers[:, None], c[:, None]
    z = logits[numbers, torch.where(held, columns, 0)].float()
    return torch.where(held, ((z - c) * scale).clamp_min(FLOOR), absent)


def _collect_label(term: LabelTerm | None, visit: Visit, centre: Centre) -> None:
    if term is not None:
        columns = term.columns[visit.rows]
        term.logit[visit.rows] = _gathered(visit, columns, centre.local, centre.scale, absent=0.0)


def _set_centre(centre: Centre, rows: slice, largest: Tensor) -> None:
    centre.local[rows] = largest.masked_fill(largest <= FLOOR, Centre.NOTHING)


def _set_totals(sums: LogSums, rows: slice, found: dict[str, Tensor]) -> None:
    # The total at the temperature, and where it is wanted that at temperature 1.
    for power, total in sums.totals.items():
        total[rows] = found["total" if power == 1 else "total_at_one"]


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
    groups = like.new_empty(n, num_groups), like.new_empty(n, num_groups)  # maxima, totals
    sizes = logits.stride(0), num_columns, num_groups
    grid = n, triton.cdiv(num_groups, at_once)
    _start(kernels.group_sums, grid, logits, *groups, *sizes, 1 / temperature, FLOOR, GROUP=_GROUP, GROUPS=at_once)
    columns = torch.empty(n, k, dtype=torch.int64, device=logits.device)
    values, rest = like.new_empty(n, k), like.new_empty(n)
    arguments = logits, *groups, columns, values, rest, *sizes, k, 1 / temperature, FLOOR
    all_groups = max(padded, triton.next_power_of_2(num_groups))
    _start(kernels.best_columns, (n,), *arguments, GROUP=_GROUP, ALL_GROUPS=all_groups, K=padded)
    centre = values[:, 0].masked_fill(values[:, 0] <= FLOOR, Centre.NOTHING)
    masked = values <= FLOOR
    values = ((values - centre[:, None]) / temperature).clamp_min(FLOOR).masked_fill_(masked, FLOOR)
    return columns, values, rest.clamp_min(FLOOR), centre


def try_out(device: torch.device) -> None:
    """Runs small kernels on a device; raises whatever keeps Triton from working there."""
    out = torch.zeros(1, 16, device=device, dtype=torch.bfloat16)
    put_entries(out, None, torch.tensor([[3]], device=device), torch.ones(1, 1, device=device), None)
    columns, *_ = best(out, 1, 1.0)
    if columns.tolist() != [[3]]:
        raise RuntimeError("a kernel's result is wrong")


def _block_for(num_columns: int, largest: int = _BLOCK) -> int:
    return min(largest, max(16, triton.next_power_of_2(num_columns)))


def _length(rows: slice) -> int:
    return rows.stop - rows.start


def _start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Starts one program per point of the grid, on the device of the first argument; none for an empty grid."""
    if all(grid):
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, num_warps=_WARPS, **constants)
