"""The check of free GPU memory before vLLM's engine starts; needs neither vLLM nor a GPU."""

from __future__ import annotations

import pytest
import torch

from distill_rl.errors import ConfigError, GpuMemoryError
from distill_rl.models.vllm import free_memory, require_room

GIB = 2**30


def test_share_that_is_free_on_every_gpu_is_accepted() -> None:
    require_room(0.25, [(20 * GIB, 80 * GIB), (79 * GIB, 80 * GIB)], "lower it")
    with pytest.raises(GpuMemoryError):
        require_room(0.25, [(20 * GIB - 1, 80 * GIB), (79 * GIB, 80 * GIB)], "lower it")


def test_gpu_with_too_little_free_memory_is_reported() -> None:
    with pytest.raises(GpuMemoryError) as caught:
        require_room(0.25, [(30 * GIB, 80 * GIB), (19 * GIB, 80 * GIB)], "lower it")
    assert str(caught.value).startswith(
        "backend vllm, GPU 1: 20.00 GiB of its 80.00 GiB must be free; got 19.00 GiB free; lower it, end other processes"
    )


def test_free_memory_is_queried_in_a_child_process() -> None:
    if torch.cuda.is_available():
        ((free, total),) = free_memory(1)
        assert 0 < free <= total
        return
    with pytest.raises(ConfigError, match=r"^backend vllm: the free memory of 1 GPUs must be readable; got \w+"):
        free_memory(1)
