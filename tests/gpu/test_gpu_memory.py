"""The limit on a rank's GPU memory."""

from __future__ import annotations

import pytest
import torch

from distill_rl.errors import GpuMemoryError
from distill_rl.system.gpu_memory import gpu_phase
from distill_rl.workers.actors.rank import limit_gpu_memory

pytestmark = pytest.mark.gpu


def test_oom_error_names_the_memory_fraction() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    limit_gpu_memory(0.5, 0)
    try:
        with pytest.raises(GpuMemoryError, match="allowed to this process"), gpu_phase("teacher forward"):
            torch.empty(int(0.6 * total), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
