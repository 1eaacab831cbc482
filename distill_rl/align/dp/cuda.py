"""The dynamic programme on a CUDA device: one block per window, one thread per cell of an anti-diagonal.

A cell on the anti-diagonal d = i + j depends only on the five anti-diagonals before it (a join of four with one). So a
block goes through d = 0 … n + m, its threads compute the cells of one diagonal in parallel and then synchronise, and
only six diagonals of scores are kept. This pays off for many windows at a time; a single one is faster on the CPU.

On a GPU, `numba.cuda` comes from the package numba-cuda (`device.missing_for_cuda`). The kernel also runs, slowly, in
Numba's simulator, with or without that package (`NUMBA_ENABLE_CUDASIM=1` before numba is imported).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numba
import numpy as np
from numba import cuda

from distill_rl.align.dp.compiled import choose
from distill_rl.align.dp.problem import (
    COLUMNS,
    EQUAL,
    JOIN_SCORE,
    MAX_JOIN,
    NEVER,
    NONE,
    ROWS,
    Solution,
    WindowProblem,
    trace_back,
)

SCRATCH_BYTES = 512 * 2**20
"""Device memory for the cells of one launch; if more windows are given, there are several launches"""
DIAGONALS = 6
MAX_THREADS = 128
# The simulator runs every thread of a block as a Python thread.
WARP = 4 if numba.config.ENABLE_CUDASIM else 32

if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack  # type: ignore[attr-defined]  # NumPy 2.5 dropped this alias; numba-cuda 0.30 compiles with it

_choose = cuda.jit(device=True)(choose)
_trace_back = cuda.jit(device=True)(trace_back)


@cuda.jit
def _align(  # type: ignore[no-untyped-def]
    row_ids,
    column_ids,
    row_joins,
    column_joins,
    low,
    high,
    offsets,
    row_starts,
    column_starts,
    cell_starts,
    width,
    scores,
    moves,
    row_marks,
    column_marks,
    counts,
):
    """The kernel: solves one window per block."""
    # Writes what `trace_back` gives into `row_marks`, `column_marks` and `counts`. All windows' arrays are
    # concatenated; r0, c0, m0 and b0 are where this window's rows, columns, cells and strip bounds begin. Rows `first`
    # to `last` have a cell on the current anti-diagonal d. These are at most `width` consecutive rows, so S[i, d − i]
    # is kept at scores[window, d % DIAGONALS, i % width] without collisions. `scores` and `moves` are scratch memory,
    # whatever they hold before.
    window = cuda.blockIdx.x
    r0, c0, m0 = row_starts[window], column_starts[window], cell_starts[window]
    n, m = row_starts[window + 1] - r0, column_starts[window + 1] - c0
    b0 = r0 + window  # `low`, `high` and `offsets` have n + 1 entries per window
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
            equal = False
            join, join_move = NEVER, EQUAL
            if i > 0 and j >= low[b0 + i - 1] and j <= high[b0 + i - 1]:
                above = scores[window, (d - 1) % DIAGONALS, (i - 1) % width]
            if j > low[b0 + i]:
                left = scores[window, (d - 1) % DIAGONALS, i % width]
            if i > 0 and j > 0:
                equal = row_ids[r0 + i - 1] != NONE and row_ids[r0 + i - 1] == column_ids[c0 + j - 1]
                if j - 1 >= low[b0 + i - 1] and j - 1 <= high[b0 + i - 1]:
                    diagonal = scores[window, (d - 2) % DIAGONALS, (i - 1) % width]
                row1, column1 = row_joins[r0 + i - 1, 0], column_joins[c0 + j - 1, 0]
                for size in range(2, MAX_JOIN + 1):
                    joined = row_joins[r0 + i - 1, size - 1] == column1 and column1 != 0
                    if joined and low[b0 + i - size] <= j - 1 <= high[b0 + i - size]:
                        score = scores[window, (d - 1 - size) % DIAGONALS, (i - size) % width] + JOIN_SCORE * size
                        if score > join:
                            join, join_move = score, ROWS + size - 2
                for size in range(2, MAX_JOIN + 1):
                    joined = column_joins[c0 + j - 1, size - 1] == row1 and row1 != 0
                    if joined and low[b0 + i - 1] <= j - size <= high[b0 + i - 1]:
                        score = scores[window, (d - 1 - size) % DIAGONALS, (i - 1) % width] + JOIN_SCORE * size
                        if score > join:
                            join, join_move = score, COLUMNS + size - 2
            best, move = _choose(equal, diagonal, above, left, join, join_move)
            scores[window, d % DIAGONALS, i % width] = best
            moves[m0 + offsets[b0 + i] + j - low[b0 + i]] = move
        cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        counts[window] = _trace_back(
            moves[m0:], low[b0:], offsets[b0:], row_marks[r0 : r0 + n], column_marks[c0 : c0 + m]
        )


def solve(problems: list[WindowProblem]) -> list[Solution]:
    """The best alignment of each problem within its strip, in order: (row marks, column marks, number of chunks).

    Marks, int32 [n] and int32 [m], are those of `trace_back`. Every backend returns the same ones.
    """
    return [result for group in _groups(problems) for result in _launch(group)]


def _groups(problems: list[WindowProblem]) -> Iterator[list[WindowProblem]]:
    """Yields the problems in groups of consecutive ones, each for one launch, whose cells fit into SCRATCH_BYTES."""
    group: list[WindowProblem] = []
    cells = 0
    for problem in problems:
        if group and cells + int(problem.offsets[-1]) > SCRATCH_BYTES:
            yield group
            group, cells = [], 0
        group.append(problem)
        cells += int(problem.offsets[-1])
    if group:
        yield group


def _launch(problems: list[WindowProblem]) -> list[Solution]:
    """Solves the problems in one launch of the kernel, waits for it, and returns the solutions as `solve` does."""

    def joined(name: str) -> np.ndarray:
        """One field of all problems, concatenated, on the device."""
        return cuda.to_device(np.concatenate([getattr(problem, name) for problem in problems]))

    def starts(lengths: list[int]) -> np.ndarray:
        """int64 [n + 1]: 0 and the cumulative sums of the lengths."""
        return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)

    rows = starts([len(problem.row_ids) for problem in problems])
    columns = starts([len(problem.column_ids) for problem in problems])
    cells = starts([int(problem.offsets[-1]) for problem in problems])
    offsets = cuda.to_device(np.concatenate([problem.offsets[:-1] for problem in problems]))
    width = max(_widest_diagonal(problem) for problem in problems)
    threads = min(MAX_THREADS, -(-width // WARP) * WARP)
    row_marks, column_marks = (cuda.device_array(int(ends[-1]), np.int32) for ends in (rows, columns))
    counts = cuda.device_array(len(problems), np.int32)
    with warnings.catch_warnings():
        # Few windows leave most of the device idle, as expected. Filtered by message because numba-cuda has its own class.
        warnings.filterwarnings("ignore", message="Grid size .* low occupancy")
        _align[len(problems), threads](
            *(joined(name) for name in ("row_ids", "column_ids", "row_joins", "column_joins", "low", "high")),
            offsets,
            *(cuda.to_device(ends) for ends in (rows, columns, cells)),
            width,
            cuda.device_array((len(problems), DIAGONALS, width), np.int32),
            cuda.device_array(int(cells[-1]), np.uint8),
            row_marks,
            column_marks,
            counts,
        )
    row_parts = np.split(row_marks.copy_to_host(), rows[1:-1])
    column_parts = np.split(column_marks.copy_to_host(), columns[1:-1])
    return list(zip(row_parts, column_parts, counts.copy_to_host().tolist()))


def _widest_diagonal(problem: WindowProblem) -> int:
    """The largest number of cells on an anti-diagonal of the strip."""
    rows = np.arange(len(problem.low), dtype=np.int64)
    begins, ends = rows + problem.low, rows + problem.high
    return int((np.searchsorted(begins, ends, side="right") - rows).max())
