"""Copies through a small buffer equal their sources for any sizes; here on a CPU, with plain memory."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from distill_rl.parallel.mesh import close_world, open_world
from distill_rl.student.checkpoint import Staging

CPU = torch.device("cpu")
SIZES = [(), (1,), (0, 3), (7,), (16,), (5, 3), (33,), (64, 9)]


@pytest.mark.parametrize("buffer_bytes", [14, 64, 128, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_staged_copies_equal_their_sources(buffer_bytes: int, dtype: torch.dtype):
    staging = Staging(CPU, buffer_bytes)
    for seed in range(2):  # the next save uses the buffer again
        draw = torch.Generator().manual_seed(seed)
        tensors = {str(size): torch.randint(-9, 9, size, generator=draw).to(dtype) for size in SIZES}
        wanted = {name: tensor.clone() for name, tensor in tensors.items()}
        copies = staging.copied(tensors)
        for tensor in tensors.values():
            tensor.fill_(99)  # training continues
        assert copies.keys() == wanted.keys()
        for name, copy in copies.items():
            assert copy.dtype == dtype
            assert torch.equal(copy, wanted[name]), name


def test_staged_dtensor_stays_one_of_the_same_mesh():
    world = open_world(rank=0, dp=1, tp=1)
    try:
        source = DTensor.from_local(torch.randn(9, 3), world.mesh["dp"], [Shard(0)], run_check=False)
        copy = Staging(CPU, 32).copied({"x": source})["x"]
        assert isinstance(copy, DTensor)
        assert (copy.device_mesh, copy.placements, copy.shape) == (source.device_mesh, source.placements, source.shape)
        assert torch.equal(copy.to_local(), source.to_local())
        assert copy.to_local().data_ptr() != source.to_local().data_ptr()
    finally:
        close_world(world)
