"""Kernels over rows of logits: the sums that the losses need, and the gradients that follow from them.

One program works on one row, a block of columns at a time. Two kernels per loss read the logits once each, and the
second writes the gradient: 6 bytes per bf16 logit. Between them the sums are a few numbers per row, on which torch
computes the loss, with the tensor-parallel collectives where ranks share a row (`RowFunction.complete`).

Arithmetic is fp32. Masked logits (−inf) are replaced by `floor`, a finite number, so that differences stay finite.
A row's sums are taken around its running maximum m, as in the online softmax (Milakov and Gimelshein, 2018): when a
block raises m by d, what was summed before is multiplied by exp(−d/T).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_sums(
    logits,
    order,
    entries,
    largest,
    maximum,
    totals,
    totals_at_one,
    stride,
    num_columns,
    num_entries,
    inverse_temperature,
    floor,
    ORDERED: tl.constexpr,
    ENTRIES: tl.constexpr,
    AT_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per row: the largest logit; and of the columns that are not entries their maximum m and Σ exp((z − m)/T).

    Args:
        order: with ORDERED the int64 row numbers [M]; row i of the results is row order[i] of the logits.
        entries: with ENTRIES int32 [M, num_entries + 1], columns in ascending order, then one beyond all blocks.
        totals_at_one: with AT_ONE receives Σ exp(z − m).
        stride: elements from one row of the logits to the next.
    """
    row = tl.program_id(0).to(tl.int64)
    source = row
    if ORDERED:
        source = tl.load(order + row)
    base = logits + source * stride
    highest = floor
    m = floor
    total = 0.0
    total_at_one = 0.0
    entry = entries + row * (num_entries + 1)
    left_out = num_columns
    if ENTRIES:
        left_out = tl.load(entry)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(base + columns, mask=columns < num_columns, other=-float("inf")).to(tl.float32)
        z = tl.maximum(z, floor, propagate_nan=tl.PropagateNan.ALL)
        highest = tl.maximum(highest, tl.max(z, axis=0))
        if ENTRIES:
            while left_out < start + BLOCK:
                z = tl.where(columns == left_out, floor, z)
                entry += 1
                left_out = tl.load(entry)
        raised = tl.maximum(m, tl.max(z, axis=0))
        total = total * tl.exp((m - raised) * inverse_temperature)
        total += tl.sum(tl.exp((z - raised) * inverse_temperature), axis=0)
        if AT_ONE:
            total_at_one = total_at_one * tl.exp(m - raised) + tl.sum(tl.exp(z - raised), axis=0)
        m = raised
    tl.store(largest + row, highest)
    tl.store(maximum + row, m)
    tl.store(totals + row, total)
    if AT_ONE:
        tl.store(totals_at_one + row, total_at_one)


@triton.jit
def row_gradient(
    logits,
    order,
    out,
    centre,
    factor,
    lse,
    factor_at_one,
    lse_at_one,
    stride,
    out_stride,
    num_columns,
    inverse_temperature,
    ORDERED: tl.constexpr,
    AT_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes factor · exp((z − c)/T − lse) and, with AT_ONE, + factor_at_one · exp(z − c − lse_at_one), per column.

    Args:
        out: row order[i] receives the gradient, where ORDERED; else row i.
        centre, factor, lse, factor_at_one, lse_at_one: fp32 [M].
    """
    row = tl.program_id(0).to(tl.int64)
    source = row
    if ORDERED:
        source = tl.load(order + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    z = tl.load(logits + source * stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = z - tl.load(centre + row)
    gradient = tl.load(factor + row) * tl.exp(u * inverse_temperature - tl.load(lse + row))
    if AT_ONE:
        gradient += tl.load(factor_at_one + row) * tl.exp(u - tl.load(lse_at_one + row))
    tl.store(out + source * out_stride + columns, gradient.to(out.dtype.element_ty), mask=inside)
