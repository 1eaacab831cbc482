"""CUDA out of memory as PyTorch itself tells it; what follows from the text: tests/unit/system/test_gpu_memory.py."""

from __future__ import annotations

import pytest
import torch

from distill_rl.errors import GpuMemoryError
from distill_rl.gpu_check.checks import environment
from distill_rl.system.gpu_memory import gpu_phase
from distill_rl.workers.actors.rank import limit_gpu_memory

pytestmark = pytest.mark.gpu


def test_torchs_own_words_are_understood() -> None:
    environment.check(torch.device("cuda", 0), tiny=True)


def test_a_rank_that_is_held_to_a_share_is_told_the_share() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    limit_gpu_memory(0.5, 0)
    try:
        with pytest.raises(GpuMemoryError, match="allowed to this process"), gpu_phase("teacher forward"):
            torch.empty(int(0.6 * total), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
