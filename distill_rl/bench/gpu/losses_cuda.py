"""Time and memory of the losses on a CUDA device, beside plain torch and Liger-Kernel, in one run.

Forward and backward of mean KD at temperature 1, once from hidden states (gradients of the hidden states and of the output
layer) and once from logits. Times are medians by CUDA events after a warm-up, memory is the allocator's peak above what
was there before, gradients included. Ratios are to plain torch, dense, on the same inputs and divergence; top-k targets
are compared with that as well. Every loss's value is kept beside its figures: who computes something else is seen by it.

Liger-Kernel is measured where it is installed. Its chunked losses compute a cross-entropy even at weight 0.
`--device cpu` is the same at small sizes in fp32, to see that it works; its figures say nothing and are kept only where --out says.
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from distill_rl.bench import harness
from distill_rl.bench.gpu.contenders import LIGER, PLAIN, Case, Sides, cases, failure

SIZES = {
    "cuda": {"rows": 8192, "hidden": 4096, "columns": 128_256},
    "cpu": {"rows": 256, "hidden": 64, "columns": 2048},
}
WARM_UPS = 3


@dataclass(frozen=True)
class Figures:
    """Of one case; None where it could not be had."""

    inputs: str
    divergence: str
    by: str
    target: str
    status: str
    value: float | None = None
    milliseconds: float | None = None
    peak_mib: float | None = None
    ratio: float | None = None
    """time over plain torch's"""


def measure(case: Case, inputs: Sequence[Tensor], repeats: int) -> Figures:
    """Out of memory is a result; so is whatever Liger raises. Anything else that goes wrong is ours, and is raised."""
    figures = partial(Figures, case.inputs, case.divergence, case.by, case.target)
    if case.step is None:
        return figures(case.status)
    step, cuda = case.step, inputs[0].is_cuda

    def run() -> Tensor:
        # held until the end: their gradients are part of the peak
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        loss = step(*leaves)
        loss.backward()
        return loss.detach()

    status = ""
    try:
        for _ in range(WARM_UPS):
            value = run().item()
        peak = _peak_mib(run) if cuda else None
        times = [_milliseconds(run, cuda) for _ in range(repeats)]
    except torch.OutOfMemoryError:
        status = "out of memory"
    except Exception as error:
        if not case.by.startswith(LIGER):
            raise
        status = failure(error)
    if cuda:  # here, where the exception and its frames no longer hold tensors
        torch.cuda.empty_cache()
    return figures(status) if status else figures("ok", value, round(median(times), 3), peak)


def _peak_mib(run: Callable[[], Tensor]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def _milliseconds(run: Callable[[], Tensor], cuda: bool) -> float:
    if not cuda:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1000
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


def compare(sizes: Sequence[int], device: str, repeats: int) -> list[Figures]:
    """All cases on the same draw."""
    measured: list[Figures] = []
    for inputs, group in cases(Sides.draw(sizes, device)):
        measured += (measure(case, inputs, repeats) for case in group)
    base = {(line.inputs, line.divergence): line.milliseconds for line in measured if line.by == PLAIN}
    return [with_ratio(line, base[line.inputs, line.divergence]) for line in measured]


def with_ratio(line: Figures, base: float | None) -> Figures:
    return replace(line, ratio=round(line.milliseconds / base, 3)) if line.milliseconds and base else line


def show(figures: Sequence[Figures], title: str, base: str = "plain") -> None:
    table = Table("from", "loss", "by", "target", "ms", f"over {base}", "peak MiB", "value", title=title)
    for line in figures:
        times = ((line.milliseconds, ".2f"), (line.ratio, ".2f"))
        numbers = (*times, (line.peak_mib, ".1f"), (line.value, ".5f"))
        cells = ["–" if number is None else format(number, digits) for number, digits in numbers]
        if line.status != "ok":
            cells[0] = line.status
        table.add_row(line.inputs, line.divergence, line.by, line.target, *cells)
    Console(width=140).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    return harness.run_on_device(
        "losses_cuda",
        __doc__,
        SIZES,
        repeats=7,
        compare=compare,
        show=show,
        settings={"liger": _liger_version()},
        argv=argv,
    )


def _liger_version() -> str:
    try:
        return importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
