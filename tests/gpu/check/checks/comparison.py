"""The losses beside plain torch and Liger-Kernel, at the shape at which Liger-Kernel publishes its figures.

The same measurement as `launch/bench.sh losses_cuda`, with fewer runs of each case. Whatever cannot be measured, for
lack of memory or time, has a row that says so.
"""

from __future__ import annotations

import time
import unittest
from collections.abc import Mapping
from typing import Any

import torch

from distill_rl.system.gpu_memory import amounts
from tests.bench.gpu.losses_cuda import NOT_INSTALLED, SIZES, Figures, compare_on, dtype_on

REPEATS = 3
TINY = {"rows": 16, "hidden": 16, "columns": 256}


def measure(device: torch.device, tiny: bool, budget_s: float) -> dict[str, Any]:
    """Measures all cases of the benchmark; sizes are small with `tiny` and on a CPU.

    Args:
        budget_s: seconds for all cases; those that would not end in time are left out, see `compare_on`.

    Returns:
        `shape`, `Triton`, `Liger-Kernel` and `losses`, a table with one row per case. `failed` lists the errors of cases
        that Liger-Kernel could not run here; without it there are no rows for it.

    Raises:
        unittest.SkipTest: the GPU has not enough memory for the inputs.
    """
    deadline = time.monotonic() + budget_s
    sizes = TINY if tiny or device.type != "cuda" else SIZES["cuda"]
    try:
        lines, versions = compare_on(device.type, sizes, REPEATS, deadline=deadline)
    except torch.OutOfMemoryError as error:
        raise unittest.SkipTest(f"not enough memory for inputs of {shape(sizes, device)}: {amounts(error)}") from error
    lines = [line for line in lines if line.status != NOT_INSTALLED]
    figures = {"shape": shape(sizes, device), "Triton": versions["triton"], "Liger-Kernel": versions["liger"]}
    failed = [f"{line.by}, {line.divergence}: {line.status}" for line in lines if line.status.startswith("failed")]
    return figures | {"losses": [row(line) for line in lines]} | ({"failed": failed} if failed else {})


def shape(sizes: Mapping[str, int], device: torch.device) -> str:
    """The sizes and the dtype in one line."""
    dtype = str(dtype_on(device.type)).removeprefix("torch.")
    return f"{sizes['rows']} rows, {sizes['hidden']} hidden, {sizes['columns']} columns, {dtype}"


def row(line: Figures) -> dict[str, Any]:
    """A row of the table; a case without figures has its status in place of the time."""
    ms, bound = line.milliseconds, line.bound_milliseconds
    return {
        "from": line.inputs,
        "divergence": line.divergence,
        "target": line.target,
        "by": line.by,
        "ms": line.status.partition(":")[0] if ms is None else ms,
        "× plain": line.ratio,
        "bound ms": bound,
        "of bound": bound / ms if ms and bound is not None else None,
        "peak GiB": None if line.peak_mib is None else line.peak_mib / 1024,
        "loss": line.value,
    }
