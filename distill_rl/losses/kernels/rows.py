"""Kernels over rows of logits: the sums that the losses need, and the gradients that follow from them.

One program works on one row, a block of columns at a time. Two kernels per loss read the logits once each, and the
second writes the gradient: 6 bytes per bf16 logit. Between them the sums are a few numbers per row, on which torch
computes the loss, with the tensor-parallel collectives where ranks share a row (`RowFunction.complete`).

Arithmetic is fp32. Masked logits (−inf) are replaced by `floor`, a finite number, so that differences stay finite.
A row's sums are taken around its running maximum m, as in the online softmax (Milakov and Gimelshein, 2018,
arXiv 1805.02867): when a block raises m by d, what was summed before is multiplied by exp(−d/T).

Arguments that several kernels share:

    order        int64 [M]: row i of the results belongs to row order[i] of the logits; None: to row i
    stride       elements from one row to the next
    floor        the finite stand-in for −inf (`core.rows.floor_of`)
    centre       fp32 [M], what is subtracted from the logits
    BLOCK        columns at a time, a power of two

Triton compiles a kernel anew for an argument that is None.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_of(order, row):
    """The row of the logits that a row of the results belongs to, int64."""
    found = row
    if order is not None:
        found = tl.load(order + row)
    return found


@triton.jit
def _with_labels(gradient, u, row, columns, factor_at_one, lse_at_one, label, label_weight):
    """The gradient of a block of columns with what `row_gradient` adds for labels; u is z − c."""
    if factor_at_one is not None:
        gradient += tl.load(factor_at_one + row) * tl.exp(u - tl.load(lse_at_one + row))
    if label is not None:
        gradient -= tl.where(columns == tl.load(label + row), tl.load(label_weight + row), 0.0)
    return gradient


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
    BLOCK: tl.constexpr,
):
    """Per row: the largest logit; and of the columns that are not entries their maximum m and Σ exp((z − m)/T).

    Args:
        entries: int32 [M, num_entries + 1], columns in ascending order, then one beyond all blocks; or None.
        totals_at_one: receives Σ exp(z − m); or None.
    """
    row = tl.program_id(0).to(tl.int64)
    source = _row_of(order, row)
    base = logits + source * stride
    highest = floor
    m = floor
    total = 0.0
    total_at_one = 0.0
    if entries is not None:
        entry = entries + row * (num_entries + 1)
        left_out = tl.load(entry)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(base + columns, mask=columns < num_columns, other=-float("inf")).to(tl.float32)
        z = tl.maximum(z, floor, propagate_nan=tl.PropagateNan.ALL)
        highest = tl.maximum(highest, tl.max(z, axis=0))
        if entries is not None:
            while left_out < start + BLOCK:
                z = tl.where(columns == left_out, floor, z)
                entry += 1
                left_out = tl.load(entry)
        raised = tl.maximum(m, tl.max(z, axis=0))
        total = total * tl.exp((m - raised) * inverse_temperature)
        total += tl.sum(tl.where(z <= floor, 0.0, tl.exp((z - raised) * inverse_temperature)), axis=0)
        if totals_at_one is not None:
            at_one = tl.where(z <= floor, 0.0, tl.exp(z - raised))
            total_at_one = total_at_one * tl.exp(m - raised) + tl.sum(at_one, axis=0)
        m = raised
    tl.store(largest + row, highest)
    tl.store(maximum + row, m)
    tl.store(totals + row, total)
    if totals_at_one is not None:
        tl.store(totals_at_one + row, total_at_one)


@triton.jit
def row_gradient(
    logits,
    order,
    counts,
    out,
    centre,
    factor,
    lse,
    factor_at_one,
    lse_at_one,
    label,
    label_weight,
    stride,
    out_stride,
    num_columns,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    """Writes factor · exp((z − c)/T − lse) per column, and + factor_at_one · exp(z − c − lse_at_one) if that is given.

    Args:
        counts: bool [M]; rows at False receive 0. None: all count.
        out: its row order[i] receives the gradient; without `order` row i.
        factor, lse: fp32 [M].
        factor_at_one, lse_at_one: fp32 [M], or None.
        label, label_weight: a column per row (num_columns or more: none), int64 [M], and what is subtracted there,
            fp32 [M]; or None.
    """
    row = tl.program_id(0).to(tl.int64)
    source = _row_of(order, row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    z = tl.load(logits + source * stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    u = z - tl.load(centre + row)
    gradient = tl.load(factor + row) * tl.exp(u * inverse_temperature - tl.load(lse + row))
    gradient = _with_labels(gradient, u, row, columns, factor_at_one, lse_at_one, label, label_weight)
    if counts is not None:
        gradient = tl.where(tl.load(counts + row) != 0, gradient, 0.0)
    tl.store(out + source * out_stride + columns, gradient.to(out.dtype.element_ty), mask=inside)


@triton.jit
def put_entries(out, order, counts, columns, values, out_stride, num_columns, num_entries, BLOCK: tl.constexpr):
    """Writes values, fp32 [M, num_entries], to the columns, int64 of the same shape, of their rows of `out`.

    Columns of num_columns or more are left out, and so are rows whose `counts`, if given, is False.
    """
    row = tl.program_id(0).to(tl.int64)
    target = _row_of(order, row)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_entries
    column = tl.load(columns + row * num_entries + entry, mask=inside, other=num_columns)
    value = tl.load(values + row * num_entries + entry, mask=inside, other=0.0)
    inside = inside & (column < num_columns)
    if counts is not None:
        inside = inside & (tl.load(counts + row) != 0)
    tl.store(out + target * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def pair_sums(
    logits,
    teacher,
    order,
    teacher_order,
    largest,
    totals,
    totals_at_one,
    teacher_largest,
    teacher_totals,
    weighted,
    stride,
    teacher_stride,
    num_columns,
    inverse_temperature,
    floor,
    TEACHER_LEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per row: both sides' maximum m and Σ exp((z − m)/T), and Σ exp(x)·(x − y) with x the leading side's (z − m)/T.

    y is the other side's. With `totals_at_one` also the student's Σ exp(z − m). Masked columns add exp = 0, and are at
    the floor even where a side has nothing but masked columns so far: one that only the student masks must not go
    unnoticed.

    When maxima rise by d (of x) and e (of y), both over T, the weighted sum over columns already seen becomes
    Σ exp(x − d)·(x − d − y + e) = exp(−d)·(weighted − (d − e)·total).

    Args:
        teacher: the teacher's logits; its row is teacher_order[i], or i without `teacher_order`.
        weighted: fp32 [M], receives the last sum.
    """
    row = tl.program_id(0).to(tl.int64)
    source = _row_of(order, row)
    teacher_source = _row_of(teacher_order, row)
    base = logits + source * stride
    teacher_base = teacher + teacher_source * teacher_stride
    m = floor
    n = floor
    total = 0.0
    total_at_one = 0.0
    teacher_total = 0.0
    sum_of_products = 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        z = tl.load(base + columns, mask=inside, other=-float("inf")).to(tl.float32)
        w = tl.load(teacher_base + columns, mask=inside, other=-float("inf")).to(tl.float32)
        z = tl.maximum(z, floor, propagate_nan=tl.PropagateNan.ALL)
        w = tl.maximum(w, floor, propagate_nan=tl.PropagateNan.ALL)
        m_raised = tl.maximum(m, tl.max(z, axis=0))
        n_raised = tl.maximum(n, tl.max(w, axis=0))
        # A side that has been masked so far has nothing to move.
        d = tl.where(m > floor, (m_raised - m) * inverse_temperature, 0.0)
        e = tl.where(n > floor, (n_raised - n) * inverse_temperature, 0.0)
        u = tl.maximum((z - m_raised) * inverse_temperature, floor, propagate_nan=tl.PropagateNan.ALL)
        v = tl.maximum((w - n_raised) * inverse_temperature, floor, propagate_nan=tl.PropagateNan.ALL)
        u = tl.where(z <= floor, floor, u)
        v = tl.where(w <= floor, floor, v)
        exp_u = tl.where(z <= floor, 0.0, tl.exp(u))
        exp_v = tl.where(w <= floor, 0.0, tl.exp(v))
        if TEACHER_LEADS:
            sum_of_products = tl.exp(-e) * (sum_of_products - (e - d) * teacher_total) + tl.sum(exp_v * (v - u), axis=0)
        else:
            sum_of_products = tl.exp(-d) * (sum_of_products - (d - e) * total) + tl.sum(exp_u * (u - v), axis=0)
        if totals_at_one is not None:
            at_one = tl.where(z <= floor, 0.0, tl.exp(z - m_raised))
            total_at_one = total_at_one * tl.exp(m - m_raised) + tl.sum(at_one, axis=0)
        total = total * tl.exp(-d) + tl.sum(exp_u, axis=0)
        teacher_total = teacher_total * tl.exp(-e) + tl.sum(exp_v, axis=0)
        m = m_raised
        n = n_raised
    tl.store(largest + row, m)
    tl.store(totals + row, total)
    tl.store(teacher_largest + row, n)
    tl.store(teacher_totals + row, teacher_total)
    tl.store(weighted + row, sum_of_products)
    if totals_at_one is not None:
        tl.store(totals_at_one + row, total_at_one)


@triton.jit
def pair_gradient(
    logits,
    teacher,
    order,
    teacher_order,
    counts,
    out,
    centre,
    lse,
    teacher_centre,
    teacher_lse,
    weight,
    factor,
    factor_at_one,
    lse_at_one,
    label,
    label_weight,
    stride,
    teacher_stride,
    out_stride,
    num_columns,
    inverse_temperature,
    floor,
    TEACHER_LEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes weight · slope + factor · q per column, with the slope of forward or reverse KL (`divergence`).

    The slope is −p if TEACHER_LEADS, otherwise q·(log q − log p + 1); log q = (z − c)/T − lse, and log p alike. The
    label adds what it does in `row_gradient`.

    Args:
        weight, factor: fp32 [M].
        counts, out, label and others: as in `row_gradient`.
    """
    row = tl.program_id(0).to(tl.int64)
    source = _row_of(order, row)
    teacher_source = _row_of(teacher_order, row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    z = tl.load(logits + source * stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    w = tl.load(teacher + teacher_source * teacher_stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    u = z - tl.load(centre + row)
    v = w - tl.load(teacher_centre + row)
    log_q = tl.maximum(u * inverse_temperature, floor, propagate_nan=tl.PropagateNan.ALL) - tl.load(lse + row)
    log_p = tl.maximum(v * inverse_temperature, floor, propagate_nan=tl.PropagateNan.ALL) - tl.load(teacher_lse + row)
    q = tl.exp(log_q)
    slope = -tl.exp(log_p) if TEACHER_LEADS else q * (log_q - log_p + 1.0)
    gradient = tl.load(weight + row) * slope + tl.load(factor + row) * q
    gradient = _with_labels(gradient, u, row, columns, factor_at_one, lse_at_one, label, label_weight)
    if counts is not None:
        gradient = tl.where(tl.load(counts + row) != 0, gradient, 0.0)
    tl.store(out + source * out_stride + columns, gradient.to(out.dtype.element_ty), mask=inside)


# The teacher's kernel: a row's top k, and the sum over all other columns, in one pass over the logits.
#
# The columns are cut into groups of GROUP. A row's k largest logits lie in the k groups with the largest maxima, so:
#
# 1. `group_sums` reads the row once and keeps, per group, its maximum and Σ exp((z − maximum)/T).
# 2. `best_columns` selects k groups by their maxima, reads these again (k · GROUP logits), and selects the k columns.
#    What is left of these groups and the sums of all others add up to the rest, which is never 1 − Σ.
#
# Equal logits are ordered by their column, the lowest first: a logit and its column are one integer, which makes the k
# columns, and with them every bit of the result, independent of blocks and of the number of programs.


@triton.jit
def group_sums(
    logits,
    maxima,
    totals,
    stride,
    num_columns,
    num_groups,
    inverse_temperature,
    floor,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Per row and group of GROUP columns: the maximum, and Σ exp((z − maximum)/T). GROUPS groups per program."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    z = tl.load(logits + row * stride + columns, mask=columns < num_columns, other=-float("inf")).to(tl.float32)
    z = tl.maximum(z, floor, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(z, axis=1)
    total = tl.sum(tl.exp((z - largest[:, None]) * inverse_temperature), axis=1)
    inside = groups < num_groups
    tl.store(maxima + row * num_groups + groups, largest, mask=inside)
    tl.store(totals + row * num_groups + groups, total, mask=inside)


@triton.jit
def _key(z, number):
    """One int64 that orders by z, then by the lower number. −0 counts as 0."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - number).to(tl.int64)


@triton.jit
def _number(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _value(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def best_columns(
    logits,
    maxima,
    totals,
    ids,
    values,
    rest,
    stride,
    num_columns,
    num_groups,
    k,
    inverse_temperature,
    floor,
    GROUP: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    K: tl.constexpr,
):
    """Per row: the k best columns with their logits, best first, and log Σ exp((z − c)/T) over the others.

    c is the row's largest logit, values[:, 0]. The others' sum is taken around their own maximum, so it is exact however
    small it is.

    Args:
        ids, values: int64 and fp32 [N, k].
        rest: fp32 [N]; −inf where there is no other column, or only masked ones.
        ALL_GROUPS, K: powers of two, at least num_groups and k.
    """
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, ALL_GROUPS)
    known = groups < num_groups
    maximum = tl.load(maxima + row * num_groups + groups, mask=known, other=-float("inf"))
    group_keys = _key(maximum, groups)
    best = tl.topk(group_keys, K)
    largest = tl.max(maximum, axis=0)
    others = known & (group_keys < tl.min(best, axis=0))

    columns = tl.reshape(_number(best)[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (K * GROUP,))
    inside = columns < num_columns
    z = tl.load(logits + row * stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    z = tl.maximum(z, floor, propagate_nan=tl.PropagateNan.ALL)
    keys = tl.where(inside, _key(z, columns), -0x7FFFFFFFFFFFFFFF)
    winners = tl.topk(keys, K)
    number = tl.arange(0, K)
    last = tl.min(tl.where(number < k, winners, 0x7FFFFFFFFFFFFFFF), axis=0)
    left = inside & (keys < last)

    outside = tl.max(tl.where(others, maximum, floor), axis=0)
    outside = tl.maximum(outside, tl.max(tl.where(left, z, floor), axis=0))
    total = tl.load(totals + row * num_groups + groups, mask=known, other=0.0)
    total = tl.sum(tl.where(others, total * tl.exp((maximum - outside) * inverse_temperature), 0.0), axis=0)
    total += tl.sum(tl.where(left, tl.exp((z - outside) * inverse_temperature), 0.0), axis=0)
    empty = outside <= floor
    tl.store(ids + row * k + number, _number(winners).to(tl.int64), mask=number < k)
    tl.store(values + row * k + number, _value(winners), mask=number < k)
    tl.store(rest + row, tl.where(empty, -float("inf"), (outside - largest) * inverse_temperature + tl.log(total)))
