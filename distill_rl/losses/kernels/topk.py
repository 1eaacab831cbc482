"""The teacher's kernel: a row's top k, and the sum over all other columns, in one pass over the logits.

The columns are cut into groups of GROUP. A row's k largest logits lie in the k groups with the largest maxima, so:

1. `group_sums` reads the row once and keeps, per group, its maximum and Σ exp((z − maximum)/T).
2. `best_columns` selects k groups by their maxima, reads these again (k · GROUP logits), and selects the k columns.
   What is left of these groups and the sums of all others add up to the rest, which is never 1 − Σ.

Equal logits are ordered by their column, the lowest first: a logit and its column are one integer, which makes the k
columns, and with them every bit of the result, independent of blocks and of the number of programs.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
