"""Starts the kernels of `rows` and `topk` on tensors.

Logits are read in their own dtype, [N, Vl]; the i-th row that is worked on is row order[i] of them, or row i without
`order`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from distill_rl.losses.core.streaming import Centre, LogSums, floor_of
from distill_rl.losses.kernels import rows as kernels
from distill_rl.losses.kernels import topk
from distill_rl.losses.kernels.labels import LabelWeights

_BLOCK = 4096
"""Columns that one program works on at a time."""
PAIR_BLOCK = 2048
"""The same where it holds two rows, of student and teacher: more would spill registers on sm_80."""
_GROUP = 64
"""Columns of which `topk.group_sums` keeps one maximum and one sum."""
_WARPS = 8
FLOOR = floor_of(torch.float32)


def try_out(device: torch.device) -> None:
    """Runs small kernels on a device; raises whatever keeps Triton from working there."""
    out = torch.zeros(1, 16, device=device, dtype=torch.bfloat16)
    put_entries(out, None, torch.tensor([[3]], device=device), torch.ones(1, 1, device=device), None)
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
    start(
        topk.group_sums,
        (n, triton.cdiv(num_groups, at_once)),
        logits,
        maxima,
        totals,
        logits.stride(0),
        num_columns,
        num_groups,
        1 / temperature,
        FLOOR,
        GROUP=_GROUP,
        GROUPS=at_once,
    )
    columns = torch.empty(n, k, dtype=torch.int64, device=logits.device)
    values, rest = like.new_empty(n, k), like.new_empty(n)
    start(
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
        FLOOR,
        GROUP=_GROUP,
        ALL_GROUPS=max(padded, triton.next_power_of_2(num_groups)),
        K=padded,
    )
    centre = values[:, 0].masked_fill(values[:, 0] <= FLOOR, Centre.NOTHING)
    masked = values <= FLOOR
    values = ((values - centre[:, None]) / temperature).clamp_min(FLOOR).masked_fill_(masked, FLOOR)
    return columns, values, rest.clamp_min(FLOOR), centre


def row_sums(logits: Tensor, order: Tensor | None, n: int, columns: Tensor | None, sums: LogSums) -> dict[str, Tensor]:
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
    start(
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
        FLOOR,
        ORDERED=order is not None,
        ENTRIES=columns is not None,
        AT_ONE=len(sums.powers) > 1,
        BLOCK=block_for(num_columns),
    )
    return found


def row_gradient(
    logits: Tensor,
    order: Tensor | None,
    centre: Centre,
    rows: slice,
    factor: Tensor,
    lse: Tensor,
    label: LabelWeights,
    out: Tensor,
    counts: Tensor | None,
) -> None:
    """Runs `rows.row_gradient` for these rows."""
    block = block_for(logits.shape[1])
    start(
        kernels.row_gradient,
        (length(rows), triton.cdiv(logits.shape[1], block)),
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


def put_entries(out: Tensor, order: Tensor | None, columns: Tensor, values: Tensor, counts: Tensor | None) -> None:
    """Runs `rows.put_entries`."""
    n, k = columns.shape
    block = min(1024, triton.next_power_of_2(k))
    start(
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


def gathered(
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
    numbers = torch.arange(length(rows), device=logits.device) if order is None else order
    numbers = numbers if columns.ndim == 1 else numbers[:, None]
    z = logits[numbers, torch.where(held, columns, 0)].float()
    c = (centre.value if common else centre.local)[rows]
    u = ((z - (c if columns.ndim == 1 else c[:, None])) * centre.scale).clamp_min(FLOOR)
    return torch.where(held, u, absent)


def block_for(num_columns: int, largest: int = _BLOCK) -> int:
    """Columns at a time for rows of this many: a power of two, at most `largest`."""
    return min(largest, max(16, triton.next_power_of_2(num_columns)))


def length(rows: slice) -> int:
    return rows.stop - rows.start


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Starts one program per point of the grid, on the device of the first argument; none for an empty grid."""
    if all(grid):
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, num_warps=_WARPS, **constants)
