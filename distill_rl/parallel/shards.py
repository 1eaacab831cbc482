"""Which part of a tensor a rank holds, and how the whole comes together on one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a DTensor lies in the whole, one slice per dimension; all of a plain tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    where = _slices_at(tensor, coordinate)
    assert tuple(part.stop - part.start for part in where) == tuple(tensor.to_local().shape)
    return where


@torch.no_grad()
def gather_to_first(tensor: Tensor) -> Tensor | None:
    """The whole of a DTensor on the CPU of its mesh's first rank, None on the others; collective over the mesh.

    Parts travel one at a time, so that the other ranks need no memory and the first needs no second copy.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu()
    mesh = tensor.device_mesh
    ranks, own = mesh.mesh.flatten().tolist(), mesh.get_rank()
    first = own == ranks[0]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype) if first else None
    for number, rank in enumerate(ranks):
        coordinate = torch.unravel_index(torch.tensor(number), mesh.mesh.shape)
        where = _slices_at(tensor, [int(index) for index in coordinate])
        shape = [part.stop - part.start for part in where]
        replica = any(place.is_replicate() and int(index) for place, index in zip(tensor.placements, coordinate))
        if replica or 0 in shape or (own != rank and whole is None):
            continue
        part = (
            tensor.to_local().contiguous()
            if own == rank
            else torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        )
        if whole is None:
            dist.send(part, ranks[0])
            continue
        if own != rank:
            dist.recv(part, rank)
        whole[where] = part.cpu()
    return whole


def _slices_at(tensor: DTensor, coordinate: Sequence[int]) -> tuple[slice, ...]:
    """The part of the rank at `coordinate` of the mesh.

    FSDP2 cuts what tensor parallelism left to the rank, so a dimension that both split is cut by tp first although
    dp comes first in the mesh (`_StridedShard`). Parts are cut as `torch.chunk` does, the last ones short or empty.
    """
    where = [slice(0, size) for size in tensor.shape]
    cuts: list[tuple[bool, int, int, int]] = [
        (getattr(placement, "split_factor", 1) > 1, placement.dim, tensor.device_mesh.size(axis), coordinate[axis])  # type: ignore[attr-defined]
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    for _, dim, parts, index in sorted(cuts, key=lambda cut: cut[0]):
        where[dim] = _chunk(where[dim], parts, index)
    return tuple(where)


def _chunk(whole: slice, parts: int, index: int) -> slice:
    """Part `index` of a range that is cut into `parts` of equal size, rounded up."""
    size = -(-(whole.stop - whole.start) // parts)
    start = min(whole.start + index * size, whole.stop)
    return slice(start, min(start + size, whole.stop))
