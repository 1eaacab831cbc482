"""How much memory this process has held at most."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_gib(device: str = "cpu") -> float:
    """Returns the most GiB that this process has held at once so far; does not wait for a device.

    Args:
        device: of a CUDA device, such as "cuda:0": what torch has allocated on it. Otherwise the resident memory (VmHWM,
            on Linux; 0 elsewhere), which includes pages shared with other processes.
    """
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**30
    if not sys.platform.startswith("linux"):
        return 0.0
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("VmHWM:")), 0.0)
