"""Times and peak memory of work on a device, and the two rates that bound them: copying memory, multiplying matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch

WARM_UPS = 3
_COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}
_SIZE = {"cuda": 8192, "cpu": 256}
_REPEATS = 20


class Clock:
    """Marks points in a sequence of work; the time between two marks is charged to the name of the later one.

    On a GPU a mark is an event in the current stream, and only `intervals` waits for it; on a CPU it is the wall-clock
    time.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    @property
    def last(self) -> str:
        """The name of the latest mark; empty before the first."""
        return self._marks[-1][0] if self._marks else ""

    def mark(self, name: str = "") -> None:
        """Ends the interval called `name` and starts the next; the first mark only starts. Does not wait for a GPU."""
        if not self._cuda:
            self._marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((name, event))

    def intervals(self) -> list[tuple[str, float]]:
        """(name, seconds) of each interval, in order. Waits for a GPU first."""
        if self._cuda:
            torch.cuda.synchronize()
        return [
            (name, start.elapsed_time(end) / 1000 if self._cuda else end - start)
            for (_, start), (name, end) in pairwise(self._marks)
        ]


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of one call over `repeats` calls, after `WARM_UPS` calls that are not timed.

    On a GPU all calls are submitted before waiting for any, so that launches overlap with kernels as in training.
    """
    for _ in range(WARM_UPS):
        run()
    synchronize(device)
    clock = Clock(device)
    clock.mark()
    for _ in range(repeats):
        run()
        clock.mark()
    return median(seconds for _, seconds in clock.intervals())


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of one call beyond what torch's allocator held before; None on a CPU, where `run` is not called."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def synchronize(device: torch.device) -> None:
    """Waits for all work on a CUDA device; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written bytes both counted, of copying a tensor that no cache holds."""
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source), device, _REPEATS)


def matmul_rate(device: torch.device) -> float:
    """FLOP/s of a product of two large square matrices: bf16 on a GPU, fp32 on a CPU."""
    size = _SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), device, _REPEATS)
