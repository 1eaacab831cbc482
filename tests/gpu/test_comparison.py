"""The losses beside plain torch and Liger-Kernel, at the shape at which Liger-Kernel publishes its figures.

The same measurement as `launch/bench.sh losses_cuda`, with fewer runs of each case. Whatever cannot be measured, for
lack of memory or time, has a row that says so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from distill_rl.system.gpu_memory import amounts
from tests.bench.gpu import losses_cuda
from tests.bench.gpu.losses_cuda import EAGER, LIGER, NO_TIME, NOT_INSTALLED, OURS, PLAIN, SIZES, dtype_on
from tests.gpu import page
from tests.gpu.conftest import Figures

REPEATS = 3
TINY = {"rows": 16, "hidden": 16, "columns": 256}
CPU = torch.device("cpu")
SHAPE = {"inputs": "logits", "divergence": "jsd", "target": "dense"}


@pytest.mark.gpu
def test_all_cases_are_measured(device: torch.device, tiny: bool, budget_s: float, figures: Figures) -> None:
    figures |= measure(device, tiny, budget_s)


def measure(device: torch.device, tiny: bool, budget_s: float) -> dict[str, Any]:
    """Measures all cases of the benchmark; sizes are small with `tiny` and on a CPU.

    Args:
        budget_s: seconds for all cases; those that would not end in time are left out, see `compare_on`.

    Returns:
        `shape`, `Triton`, `Liger-Kernel` and `losses`, a table with one row per case. `failed` lists the errors of cases
        that Liger-Kernel could not run here; without it there are no rows for it.

    Raises:
        pytest.skip.Exception: the GPU has not enough memory for the inputs.
    """
    deadline = time.monotonic() + budget_s
    sizes = TINY if tiny or device.type != "cuda" else SIZES["cuda"]
    try:
        lines, versions = losses_cuda.compare_on(device.type, sizes, REPEATS, deadline=deadline)
    except torch.OutOfMemoryError as error:
        pytest.skip(f"not enough memory for inputs of {shape(sizes, device)}: {amounts(error)}")
    lines = [line for line in lines if line.status != NOT_INSTALLED]
    figures = {"shape": shape(sizes, device), "Triton": versions["triton"], "Liger-Kernel": versions["liger"]}
    failed = [f"{line.by}, {line.divergence}: {line.status}" for line in lines if line.status.startswith("failed")]
    return figures | {"losses": [row(line) for line in lines]} | ({"failed": failed} if failed else {})


def shape(sizes: Mapping[str, int], device: torch.device) -> str:
    """The sizes and the dtype in one line."""
    dtype = str(dtype_on(device.type)).removeprefix("torch.")
    return f"{sizes['rows']} rows, {sizes['hidden']} hidden, {sizes['columns']} columns, {dtype}"


def row(line: losses_cuda.Figures) -> dict[str, Any]:
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


def returns(monkeypatch: pytest.MonkeyPatch, *lines: losses_cuda.Figures) -> None:
    versions = {"triton": "3.6.0, used", "liger": "0.8.5"}
    monkeypatch.setattr(losses_cuda, "compare_on", lambda *_, **__: (list(lines), versions))


def test_every_case_has_a_row_with_its_time_and_bound() -> None:
    figures = measure(CPU, tiny=True, budget_s=60)
    assert figures["shape"] == "16 rows, 16 hidden, 256 columns, float32"
    cases = {(row["from"], row["divergence"], row["target"], row["by"]) for row in figures["losses"]}
    for divergence in ("forward_kl", "jsd"):
        for inputs in ("hidden", "logits"):
            wanted = {("dense", PLAIN), ("dense", OURS), ("top 64", OURS)}
            assert {(inputs, divergence, *case) for case in wanted} <= cases
    ours = [row for row in figures["losses"] if not row["by"].startswith(LIGER)]
    assert all(row["ms"] > 0 and row["of bound"] == row["bound ms"] / row["ms"] for row in ours)


def test_what_is_not_measured_has_its_reason_in_place_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = losses_cuda.Figures(by=f"{LIGER} A", status="failed: TypeError: too many arguments", **SHAPE)
    returns(
        monkeypatch,
        losses_cuda.Figures(by=PLAIN, status="out of memory", **SHAPE),
        losses_cuda.Figures(by=OURS, value=0.25, milliseconds=2.0, peak_mib=512.0, bound_milliseconds=1.0, **SHAPE),
        losses_cuda.Figures(by=EAGER, status=NO_TIME, bound_milliseconds=1.0, **SHAPE),
        failed,
        losses_cuda.Figures(by=f"{LIGER} B", status=NOT_INSTALLED, **SHAPE),
    )
    figures = measure(CPU, tiny=True, budget_s=60)
    assert [row["ms"] for row in figures["losses"]] == ["out of memory", 2.0, NO_TIME, "failed"]
    assert figures["failed"] == ["liger A, jsd: failed: TypeError: too many arguments"]
    part = {"name": "comparison", "title": "losses", "status": "ok", "figures": figures}
    record = {"state": "done", "seconds": 1, "started": "", "machine": {}, "call": {}, "failures": [], "parts": [part]}
    rows = [line.split()[:5] for line in page.render(record).splitlines()]
    assert ["logits", "jsd", "dense", "distill_rl", "2"] in rows


def test_a_gpu_too_small_for_the_inputs_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(losses_cuda, "compare_on", runs_out)
    with pytest.raises(pytest.skip.Exception, match="not enough memory for inputs of 16 rows"):
        measure(CPU, tiny=True, budget_s=60)
