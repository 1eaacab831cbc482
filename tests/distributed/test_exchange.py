"""Attention with exchanged heads equals attention over whole rows, in value and gradient, for every number of heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from distill_rl.models.varlen import Documents, Scoring, attend_spread, per_document
from distill_rl.parallel.mesh import open_world
from distill_rl.parallel.sequence import gather_positions, own_positions, part_of_rows
from tests.helpers import ranks

pytestmark = pytest.mark.ranks

ROWS, WIDTH, SIZE = 2, 12, 4
HEADS = [(2, 1), (6, 3), (4, 2), (8, 8)]
"""Query and key-value heads: fewer than ranks, not divisible by them, divisible, and one each."""
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0], list(range(12))], dtype=np.int32)
"""Documents that cross the border between the ranks, and a row of one."""


def inputs(heads: int, key_value_heads: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(heads)
    counts = (heads, key_value_heads, key_value_heads, heads)
    return [torch.randn(ROWS, n, WIDTH, SIZE, generator=draw, dtype=torch.float64) for n in counts]


def divided() -> list[list[Tensor]]:
    """Runs on a rank. Per pair of HEADS the outputs and gradients of its positions; then both ways of joining bytes."""
    world = open_world(rank=ranks.rank(), dp=1, tp=1, sp=2)
    part = own_positions(world, WIDTH)
    documents = Documents.of(POSITIONS, torch.device("cpu"), world.sp_group)
    found = []
    for heads, key_value_heads in HEADS:
        *tensors, gradient = inputs(heads, key_value_heads)
        own = [tensor[:, :, part].clone().requires_grad_() for tensor in tensors]
        module = torch.nn.Module()
        arguments = documents.arguments() | {"sequence_group": world.sp_group, "package": "sdpa"}
        out, _ = attend_spread(module, *own, None, **arguments)
        out.backward(gradient[:, :, part].transpose(1, 2))
        assert all(tensor.grad is not None for tensor in own)
        found.append([out.transpose(1, 2).detach(), *(tensor.grad for tensor in own)])
        whole, _ = attend_spread(module, *own, None, sequence_group=world.sp_group, package="sdpa")
        found.append([whole.transpose(1, 2).detach()])
    counts = torch.arange(ROWS * WIDTH * 3, dtype=torch.int16).view(ROWS * WIDTH, 3)
    joined = gather_positions(part_of_rows(counts, ROWS, part), ROWS, world)
    assert (joined is None) == (world.sp_rank == 1)
    assert joined is None or torch.equal(joined, counts)
    with pytest.raises(ValueError, match="rows of 11 positions cannot be divided over sp 2"):
        own_positions(world, 11)
    with pytest.raises(ValueError, match="does not pass on over which ranks rows are divided"):
        attend_spread(module, *own, None, package="sdpa")
    return found


def reference(heads: int, key_value_heads: int, starts: list[int]) -> list[Tensor]:
    """Output [R, H, S, E] and gradients of attention over whole rows on one rank."""
    *tensors, gradient = inputs(heads, key_value_heads)
    whole = [tensor.requires_grad_() for tensor in tensors]
    flat = [tensor.transpose(1, 2).reshape(ROWS * WIDTH, -1, SIZE) for tensor in whole]
    out = per_document(*flat, torch.tensor(starts), WIDTH, Scoring(SIZE**-0.5))
    out = out.view(ROWS, WIDTH, heads, SIZE).transpose(1, 2)
    out.backward(gradient)
    return [out.detach(), *(tensor.grad for tensor in whole)]


def test_exchanged_heads_attend_as_whole_rows_do():
    one, other = ranks.run_ranks(2, divided)
    joined = [[torch.cat(pair, dim=2) for pair in zip(*both, strict=True)] for both in zip(one, other, strict=True)]
    starts = [*np.flatnonzero(POSITIONS == 0).tolist(), POSITIONS.size]
    for i, (heads, key_value_heads) in enumerate(HEADS):
        wanted = reference(heads, key_value_heads, starts)
        torch.testing.assert_close(joined[2 * i], wanted, rtol=1e-12, atol=1e-12)
        one_document_per_row = reference(heads, key_value_heads, [0, WIDTH, 2 * WIDTH])[0]
        torch.testing.assert_close(joined[2 * i + 1][0], one_document_per_row, rtol=1e-12, atol=1e-12)
