"""The dynamic programme on a CUDA device: one block per window, a thread per cell of an anti-diagonal.

Cells of one anti-diagonal d = i + j depend only on the five before it, so a block walks through d with its threads in
step and keeps six diagonals of scores. For many windows at a time: one alone is faster on the CPU. On a GPU `numba.cuda` is
the package numba-cuda (`dp_device` says what is missing). Runs in Numba's simulator too, with or without that
package (`NUMBA_ENABLE_CUDASIM=1` before numba is imported), slowly.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numba
import numpy as np
from numba import cuda

from distill_rl.align.dp.canonical import NONE
from distill_rl.align.dp.compiled import choose
from distill_rl.align.dp.problem import NEVER, Problem, trace_back

SCRATCH_BYTES = 512 * 2**20
"""device memory for the cells of one launch; more windows than fit run in several launches"""
DIAGONALS = 6
MAX_THREADS = 128
# The simulator makes every thread of a block a thread of Python.
WARP = 4 if numba.config.ENABLE_CUDASIM else 32

_choose = cuda.jit(device=True)(choose)
_trace_back = cuda.jit(device=True)(trace_back)


@cuda.jit
def _align(  # type: ignore[no-untyped-def]
    row_ids, column_ids, row_joins, column_joins, low, high, offsets, row_starts, column_starts, cell_starts,
    lanes, scores, moves, row_marks, column_marks, counts,
):  # fmt: skip
    window = cuda.blockIdx.x
    r0, c0, m0 = row_starts[window], column_starts[window], cell_starts[window]
    n, m = row_starts[window + 1] - r0, column_starts[window + 1] - c0
    b0 = r0 + window  # each window before this one has a row 0 of its own in `low` and `high`
    first, last = 0, -1
    for d in range(n + m + 1):
        while first + high[b0 + first] < d:
            first += 1
        while last < n and last + 1 + low[b0 + last + 1] <= d:
            last += 1
        for i in range(first + cuda.threadIdx.x, last + 1, cuda.blockDim.x):
            j = d - i
            if d == 0:
                scores[window, 0, 0] = 0
                continue
            diagonal = above = left = NEVER
            rows2 = rows3 = rows4 = columns2 = columns3 = columns4 = NEVER
            equal = False
            if i > 0 and j >= low[b0 + i - 1] and j <= high[b0 + i - 1]:
                above = scores[window, (d - 1) % DIAGONALS, (i - 1) % lanes]
            if j > low[b0 + i]:
                left = scores[window, (d - 1) % DIAGONALS, i % lanes]
            if i > 0 and j > 0:
                equal = row_ids[r0 + i - 1] != NONE and row_ids[r0 + i - 1] == column_ids[c0 + j - 1]
                if j - 1 >= low[b0 + i - 1] and j - 1 <= high[b0 + i - 1]:
                    diagonal = scores[window, (d - 2) % DIAGONALS, (i - 1) % lanes]
                row1, column1 = row_joins[r0 + i - 1, 0], column_joins[c0 + j - 1, 0]
                for size in range(2, 5):
                    came = NEVER
                    if column1 != 0 and row_joins[r0 + i - 1, size - 1] == column1:
                        if j - 1 >= low[b0 + i - size] and j - 1 <= high[b0 + i - size]:
                            came = scores[window, (d - 1 - size) % DIAGONALS, (i - size) % lanes]
                        if size == 2:
                            rows2 = came
                        elif size == 3:
                            rows3 = came
                        else:
                            rows4 = came
                    came = NEVER
                    if row1 != 0 and column_joins[c0 + j - 1, size - 1] == row1:
                        if j - size >= low[b0 + i - 1] and j - size <= high[b0 + i - 1]:
                            came = scores[window, (d - 1 - size) % DIAGONALS, (i - 1) % lanes]
                        if size == 2:
                            columns2 = came
                        elif size == 3:
                            columns3 = came
                        else:
                            columns4 = came
            best, move = _choose(equal, diagonal, above, left, rows2, rows3, rows4, columns2, columns3, columns4)
            scores[window, d % DIAGONALS, i % lanes] = best
            moves[m0 + offsets[b0 + i] + j - low[b0 + i]] = move
        cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        counts[window] = _trace_back(
            moves[m0:], low[b0:], offsets[b0:], row_marks[r0 : r0 + n], column_marks[c0 : c0 + m]
        )


def solve(problems: list[Problem]) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """(row marks, column marks, how many) of each; see `trace_back`."""
    return [result for group in _groups(problems) for result in _launch(group)]


def _groups(problems: list[Problem]) -> Iterator[list[Problem]]:
    """In order, as many together as SCRATCH_BYTES hold the cells of; one window alone may need more."""
    group: list[Problem] = []
    cells = 0
    for problem in problems:
        if group and cells + int(problem.offsets[-1]) > SCRATCH_BYTES:
            yield group
            group, cells = [], 0
        group.append(problem)
        cells += int(problem.offsets[-1])
    if group:
        yield group


def _launch(problems: list[Problem]) -> list[tuple[np.ndarray, np.ndarray, int]]:
    def joined(name: str) -> np.ndarray:
        return cuda.to_device(np.concatenate([getattr(problem, name) for problem in problems]))

    def starts(lengths: list[int]) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)

    rows = starts([len(problem.row_ids) for problem in problems])
    columns = starts([len(problem.column_ids) for problem in problems])
    cells = starts([int(problem.offsets[-1]) for problem in problems])
    offsets = cuda.to_device(np.concatenate([problem.offsets[:-1] for problem in problems]))
    lanes = max(_widest_diagonal(problem) for problem in problems)
    threads = min(MAX_THREADS, -(-lanes // WARP) * WARP)
    row_marks, column_marks = (cuda.device_array(int(ends[-1]), np.int32) for ends in (rows, columns))
    counts = cuda.device_array(len(problems), np.int32)
    with warnings.catch_warnings():
        # A small batch leaves most of the device idle, which is known here. By message: numba-cuda has a class of its own.
        warnings.filterwarnings("ignore", message="Grid size .* low occupancy")
        _align[len(problems), threads](
            *(joined(name) for name in ("row_ids", "column_ids", "row_joins", "column_joins", "low", "high")),
            offsets, *(cuda.to_device(ends) for ends in (rows, columns, cells)), lanes,
            cuda.device_array((len(problems), DIAGONALS, lanes), np.int32),
            cuda.device_array(int(cells[-1]), np.uint8), row_marks, column_marks, counts,
        )  # fmt: skip
    row_parts = np.split(row_marks.copy_to_host(), rows[1:-1])
    column_parts = np.split(column_marks.copy_to_host(), columns[1:-1])
    return list(zip(row_parts, column_parts, counts.copy_to_host().tolist()))


def _widest_diagonal(problem: Problem) -> int:
    """How many cells an anti-diagonal of the strip has at most."""
    rows = np.arange(len(problem.low), dtype=np.int64)
    begins, ends = rows + problem.low, rows + problem.high
    return int((np.searchsorted(begins, ends, side="right") - rows).max())
