"""Which part of a tensor, or of the vocabulary, a rank holds, and how the parts are gathered on one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which shares its memory; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Returns the position of this rank's part of a DTensor in the whole, one slice per dimension.

    This rank must belong to the tensor's mesh. Of a plain tensor, the part is the whole.
    """
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    where = _slices_at(tensor, coordinate)
    assert tuple(part.stop - part.start for part in where) == tuple(tensor.to_local().shape)
    return where


@torch.no_grad()
def gather_to_first(tensor: Tensor) -> Tensor | None:
    """Returns the whole of a DTensor on the CPU of its mesh's first rank, None on the others. Collective over the mesh.

    A plain tensor is copied to the CPU on every rank. Parts are sent one at a time, so the other ranks need no memory
    and the first needs no second copy.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu()
    mesh = tensor.device_mesh
    ranks, this_rank = mesh.mesh.flatten().tolist(), mesh.get_rank()
    whole = torch.empty(tensor.shape, dtype=tensor.dtype) if this_rank == ranks[0] else None
    for i, rank in enumerate(ranks):
        coordinate = [int(index) for index in torch.unravel_index(torch.tensor(i), mesh.mesh.shape)]
        where = _slices_at(tensor, coordinate)
        shape = [part.stop - part.start for part in where]
        is_copy = any(place.is_replicate() and index for place, index in zip(tensor.placements, coordinate))
        if is_copy or 0 in shape:
            continue
        if this_rank == rank:
            part = tensor.to_local().contiguous()
            if whole is None:
                dist.send(part, ranks[0])
        elif whole is not None:
            part = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            dist.recv(part, rank)
        if whole is not None:
            whole[where] = part.cpu()
    return whole


def _slices_at(tensor: DTensor, coordinate: Sequence[int]) -> tuple[slice, ...]:
    """Returns where in the whole tensor the part of the rank at mesh `coordinate` is, one slice per dimension."""
    # FSDP2 shards what tensor parallelism left on the rank, so a dimension that both split is cut by tp first,
    # although dp comes first in the mesh (FSDP2's placement is then a `_StridedShard`, with a split factor). Parts are
    # cut as by `torch.chunk`: of equal size, the last ones short or empty.
    where = [slice(0, size) for size in tensor.shape]
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    for axis in sorted(axes, key=lambda axis: getattr(tensor.placements[axis], "split_factor", 1) > 1):
        dim = tensor.placements[axis].dim  # type: ignore[attr-defined]
        where[dim] = _chunk(where[dim], tensor.device_mesh.size(axis), coordinate[axis])
    return tuple(where)


def _chunk(whole: slice, parts: int, index: int) -> slice:
    """Part `index` of a range cut into `parts` of equal size, rounded up."""
    size = -(-(whole.stop - whole.start) // parts)
    start = min(whole.start + index * size, whole.stop)
    return slice(start, min(start + size, whole.stop))


def own_columns(columns: int, tp_mesh: DeviceMesh) -> slice:
    """Returns which of the `columns` of the logits this rank holds if the model is split over `tp_mesh`.

    The slice is empty if no column is left for this rank.
    """
    (size,), (start,) = compute_local_shape_and_global_offset((columns,), tp_mesh, [Shard(0)])
    return slice(start, start + size)


@torch.no_grad()
def mask_padded_columns(logits: Tensor, vocabulary_size: int) -> Tensor:
    """Sets the columns that stand for no token to −inf, in place, and returns the same logits.

    Embedding tables are often padded, differently even within one family. If teacher and student both mask the columns
    that the tokenizer cannot produce, they have the same vocabulary.

    The gradient is not changed: a column at −inf has probability zero, so softmax gives it gradient zero.

    Args:
        logits: [..., V], plain or a DTensor sharded over its last dimension (shards may be uneven).
        vocabulary_size: number of tokens of the tokenizer; columns from here on are padding.
    """
    if vocabulary_size >= logits.shape[-1]:
        return logits
    local, first = logits, 0
    if isinstance(logits, DTensor):
        _, offset = compute_local_shape_and_global_offset(logits.shape, logits.device_mesh, logits.placements)
        local, first = logits.to_local(), offset[-1]
    # Detached, because a node in the graph would copy the whole gradient.
    local.detach()[..., max(vocabulary_size - first, 0) :].fill_(-torch.inf)
    return logits
