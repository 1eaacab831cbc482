"""The two rates of a device that bound everything else: copying memory, and multiplying large matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from distill_rl.bench.gpu.cost_model import CARDS, Card

_COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}
_SIZE = {"cuda": 8192, "cpu": 256}


def measure_card(device: torch.device) -> Card:
    """A card with this device's measured rates; attention's shares stay assumptions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    known = next((card for key, card in CARDS.items() if key.upper() in name.upper()), None)
    return Card(
        name,
        copy_bandwidth(device),
        matmul_rate(device, _SIZE[device.type]),
        known.nominal if known else None,
        "measured just now",
    )


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy that no cache holds."""
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, size: int) -> float:
    """FLOP/s of a product of two square matrices: bf16 on a GPU, fp32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _seconds(lambda: torch.mm(a, b, out=out), device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median over five timings of ten calls, after three calls."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        work()
    times = []
    for _ in range(5):
        wait()
        start = time.perf_counter()
        for _ in range(10):
            work()
        wait()
        times.append((time.perf_counter() - start) / 10)
    return median(times)
