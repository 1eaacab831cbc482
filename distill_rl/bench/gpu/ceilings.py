"""The two rates of a device that bound everything else: copying memory, and multiplying large matrices."""

from __future__ import annotations

import torch

from distill_rl.bench.gpu.cost_model import CARDS, Card
from distill_rl.bench.gpu.timing import median_seconds

_COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}
_SIZE = {"cuda": 8192, "cpu": 256}
_REPEATS = 20


def measure_card(device: torch.device) -> Card:
    """A card with this device's measured rates; attention's shares stay assumptions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    nominal = next((card.nominal for key, card in CARDS.items() if key.upper() in name.upper()), None)
    return Card(name, copy_bandwidth(device), matmul_rate(device), nominal, "measured just now")


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy that no cache holds."""
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
