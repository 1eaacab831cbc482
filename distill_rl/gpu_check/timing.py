"""Medians of repeated runs, measured by CUDA events on a GPU and by the clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

REPEATS, WARM_UPS = 10, 3


def median_ms(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """The median milliseconds of one call, after a warm-up.

    On a GPU all calls are submitted before waiting for any, so that launches overlap with kernels as in training.
    """
    for _ in range(WARM_UPS):
        run()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1000)
        return median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize(device)
    return median(first.elapsed_time(last) for first, last in pairwise(marks))


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of one call beyond what was allocated before, by torch's allocator; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
