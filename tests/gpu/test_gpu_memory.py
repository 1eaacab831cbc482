"""PyTorch's own out-of-memory errors; tests/unit/system/test_gpu_memory.py covers how their text is used."""

from __future__ import annotations

import pytest
import torch

from distill_rl.errors import GpuMemoryError
from distill_rl.system.gpu_memory import gpu_phase
from distill_rl.workers.actors.rank import limit_gpu_memory
from tests.gpu.check.checks import environment

pytestmark = pytest.mark.gpu


def test_torch_oom_message_is_parsed() -> None:
    environment.check(torch.device("cuda", 0), tiny=True)


def test_oom_error_names_the_memory_fraction() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    limit_gpu_memory(0.5, 0)
    try:
        with pytest.raises(GpuMemoryError, match="allowed to this process"), gpu_phase("teacher forward"):
            torch.empty(int(0.6 * total), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
