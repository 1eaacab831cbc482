"""How much memory this process has held at most."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path


def reset_peak(device: str = "cpu") -> None:
    """Lets `peak_gib` begin again with what this process holds now; elsewhere than on Linux and CUDA it does nothing."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform.startswith("linux"):
        with suppress(OSError):  # a container may forbid it; the peak is then that of the whole process
            Path("/proc/self/clear_refs").write_text("5")


def peak_gib(device: str = "cpu") -> float:
    """Returns the most GiB that this process has held at once so far, or since `reset_peak`; does not wait for a device.

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
