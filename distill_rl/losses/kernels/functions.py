"""The kernels of each row function: they fill the sums that a pass collects, and write the gradient.

What a `RowFunction` keeps, and how its sums become a loss, is the same as without kernels. Only the two visits to the
logits differ: these read them in their own dtype, with no centred copy in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from distill_rl.losses.core.dense import DenseRows, LogitChunks
from distill_rl.losses.core.labels import LabelRows, LabelTerm, given, weight_of
from distill_rl.losses.core.row_function import RowFunction, RowKernels
from distill_rl.losses.core.sparse import TopKRows
from distill_rl.losses.core.streaming import Buffers, Centre, LogSums
from distill_rl.losses.kernels import rows as kernels
from distill_rl.losses.kernels.labels import LabelWeights
from distill_rl.losses.kernels.launch import (
    FLOOR,
    PAIR_BLOCK,
    block_for,
    gathered,
    length,
    put_entries,
    row_gradient,
    row_sums,
    start,
)


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

    def collect(self, rows: slice, logits: Tensor, order: Tensor | None, buffers: Buffers) -> None:
        function = self.function
        columns = function.shard.columns(function.teacher.ids[rows])
        found = row_sums(logits, order, length(rows), columns, function.rest)
        _set_centre(function.centre, rows, found["largest"])
        function.rest.max[rows] = _centred(function.centre, rows, found["maximum"])
        _set_totals(function.rest, rows, found)
        function.top[rows] = gathered(logits, order, columns, function.centre, rows, absent=0.0)
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
        top = gathered(logits, order, columns, function.centre, rows, absent=FLOOR, common=True)
        kd = weight_of(grads, 0, top) * function.temperature
        label = LabelWeights(function.label, rows, top, given(grads, 1), given(grads, 2))
        rest_q = (function.rest_lse[rows] - function.lse[rows]).exp()
        factor = kd * function.rest_factor[rows] + label.shared * rest_q
        row_gradient(logits, order, function.centre, rows, factor, function.rest_lse[rows], label, out, counts)
        values = function.gradient_at_top(rows, top, kd, label.shared)
        values = label.at_entries(values, columns, top)
        put_entries(out, order, columns, values, counts)


class PairKernels(RowKernels):
    """Those of `DenseRows` with a plain KL. Logits of a teacher that sends hidden states are made a chunk at a time."""

    def __init__(self, function: DenseRows):
        self.function, self.by_chunk = function, type(function.teacher) is not LogitChunks

    def collect(self, rows: slice, logits: Tensor, order: Tensor | None, buffers: Buffers) -> None:
        function = self.function
        teacher, teacher_order = function.teacher.plain(rows, buffers)
        at_one = len(function.student_sums.powers) > 1
        n = length(rows)
        found = {
            name: logits.new_empty(n, dtype=torch.float32)
            for name in ("largest", "total", "total_at_one", "teacher_largest", "teacher_total", "weighted")
        }
        start(
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
            FLOOR,
            ORDERED=order is not None,
            TEACHER_ORDERED=teacher_order is not None,
            TEACHER_LEADS=function.divergence.leads == "teacher",
            AT_ONE=at_one,
            BLOCK=block_for(logits.shape[1], PAIR_BLOCK),
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
        label = LabelWeights(function.label, rows, lse[:, None], given(grads, 1), None)
        block = block_for(logits.shape[1], PAIR_BLOCK)
        start(
            kernels.pair_gradient,
            (length(rows), triton.cdiv(logits.shape[1], block)),
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
            FLOOR,
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
        found = row_sums(logits, order, length(rows), None, function.sums)
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
        label = LabelWeights(None, rows, lse[:, None], None, None)
        label.given, label.columns, label.weight = True, function.label.columns[rows], factor
        row_gradient(logits, order, function.centre, rows, factor, lse, label, out, counts)


def _collect_label(term: LabelTerm | None, rows: slice, logits: Tensor, order: Tensor | None, centre: Centre) -> None:
    """What `LabelTerm.collect` does."""
    if term is not None:
        term.logit[rows] = gathered(logits, order, term.columns[rows], centre, rows, absent=0.0)


def _set_centre(centre: Centre, rows: slice, largest: Tensor) -> None:
    """What `Centre.measure` does, from the largest logit [n]."""
    centre.local[rows] = largest.masked_fill(largest <= FLOOR, Centre.NOTHING)


def _centred(centre: Centre, rows: slice, z: Tensor) -> Tensor:
    """(z − c)/T [n], the floor where z is the floor."""
    u = ((z - centre.local[rows]) * centre.scale).clamp_min(FLOOR)
    return torch.where(z <= FLOOR, FLOOR, u)


def _set_totals(sums: LogSums, rows: slice, found: dict[str, Tensor]) -> None:
    """Sets the totals of these rows: that at the temperature, and where it is wanted that at temperature 1."""
    sums.totals[0][rows] = found["total"]
    if len(sums.powers) > 1:
        sums.totals[1][rows] = found["total_at_one"]
