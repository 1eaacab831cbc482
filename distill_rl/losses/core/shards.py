"""Which columns of the vocabulary this rank holds, and the collectives with the ranks that hold the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_EQUAL: set[tuple[str, int] | None] = set()
"""(group, shard size) known to be equal on all ranks."""


@dataclass(frozen=True)
class VocabularyShard:
    """Columns [offset, offset + size) of `total`.

    `group` are the ranks that hold all columns together; None if this one does.
    """

    offset: int
    size: int
    total: int
    group: ProcessGroup | None = None
    assumed: str = ""
    """The argument's name, for the error message, if all ranks' shards were assumed to have this size."""

    @property
    def widest(self) -> int:
        """Columns of the widest shard if they are as even as can be, the same on every rank."""
        return self.total if self.group is None else -(-self.total // dist.get_world_size(self.group))

    @property
    def rank(self) -> int:
        """This rank's position in the result of `gather`."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def columns(self, ids: Tensor) -> Tensor:
        """Local columns (int64) of global ids. Ids that this rank does not hold become `size`, a dummy column."""
        local = ids.long() - self.offset
        return torch.where((local >= 0) & (local < self.size), local, self.size)

    def max_(self, *tensors: Tensor) -> None:
        """Replaces the tensors by their maximum over the group, in one collective. Does nothing without a group.

        Raises:
            ValueError: on all ranks alike, if shards were assumed to be equally wide and are not.
        """
        if not self.assumed or self.group is None:
            return self._all_reduce(tensors, dist.ReduceOp.MAX)
        sizes = tensors[0].new_tensor([self.size, -self.size])
        self._all_reduce((*tensors, sizes), dist.ReduceOp.MAX)
        self.require_equal(sizes)

    def require_equal(self, sizes: Tensor) -> None:
        """Checks that all ranks' shards are equally wide.

        Waits for a GPU once per group and shard size; after a success later calls with GPU tensors return at once.

        Args:
            sizes: [2], the largest shard size of any rank, and minus the smallest.

        Raises:
            ValueError: they are not, on all ranks alike.
        """
        known = (self.group.group_name, self.size) if self.group is not None else None
        if sizes.device.type != "cpu" and known in _EQUAL:
            return
        largest, smallest = int(sizes[0]), -int(sizes[1])
        if largest != smallest:
            rule = "plain shards must be equally wide on all ranks of tp_group"
            found = f"{smallest} to {largest} columns"
            raise ValueError(f"{self.assumed}: {rule}; got {found}; pad them, or give a DTensor Shard")
        _EQUAL.add(known)

    def sum_(self, *tensors: Tensor) -> None:
        """Replaces the tensors by their sum over the group, in one collective. Does nothing without a group."""
        self._all_reduce(tensors, dist.ReduceOp.SUM)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks of the group, in rank order; without a group a list of this tensor itself.

        Shapes must be equal on all ranks.
        """
        if self.group is None:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts

    def _all_reduce(self, tensors: tuple[Tensor, ...], op: dist.ReduceOp.RedOpType) -> None:
        if self.group is None or not tensors:
            return
        # Packed into one buffer, of one dtype, for one collective.
        packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(packed, op=op, group=self.group)
        for tensor, part in zip(tensors, packed.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))


def split(tensor: Tensor, tp_group: ProcessGroup | None, *, dim: int, name: str) -> tuple[Tensor, VocabularyShard]:
    """The local part of a tensor whose dimension `dim` is the vocabulary, and which columns it holds.

    Args:
        tensor: a DTensor sharded over that dimension (the shards may be uneven or empty; the group is its mesh's), or a
            plain tensor: the whole vocabulary, or with `tp_group` this rank's shard of equal shards in rank order.
        tp_group: for plain tensors only; a group of one rank is as good as None.
        dim: −1 for logits, 0 for the weight of an output layer.
        name: of the argument, for error messages.

    Raises:
        ValueError: a Partial placement, the vocabulary sharded over two mesh dimensions, or a DTensor with a
            `tp_group`.
    """
    dim %= tensor.ndim
    if isinstance(tensor, DTensor):
        if tp_group is not None:
            raise ValueError(f"tp_group: a DTensor brings its own group, leave it out when {name} is one")
        return _OwnPart.apply(tensor), _dtensor_shard(tensor, dim, name)
    size = tensor.shape[dim]
    if tp_group is None or dist.get_world_size(tp_group) == 1:
        return tensor, VocabularyShard(0, size, size)
    ranks, rank = dist.get_world_size(tp_group), dist.get_rank(tp_group)
    return tensor, VocabularyShard(rank * size, size, ranks * size, tp_group, assumed=name)


class _OwnPart(torch.autograd.Function):
    """`DTensor.to_local` whose gradient has the placements and strides of the input."""

    # Before torch 2.12 the gradient's strides are computed as if all shards had equal sizes. With uneven shards a leaf
    # then receives a copy of its gradient, and the copy is replicated.

    @staticmethod
    def forward(ctx, tensor: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        ctx.shape, ctx.stride = tensor.shape, tensor.stride()
        return tensor.to_local().view_as(tensor.to_local())

    @staticmethod
    def backward(ctx, gradient: Tensor) -> DTensor:
        return DTensor.from_local(
            gradient, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )


def _dtensor_shard(tensor: DTensor, dim: int, name: str) -> VocabularyShard:
    """The part of the vocabulary, dimension `dim`, that this rank holds; all of it if it is sharded over no other rank."""
    placements, mesh = tensor.placements, tensor.device_mesh
    if any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(f"{name}: a Partial DTensor must be reduced first; got {placements}")
    sharding = [number for number, placement in enumerate(placements) if _shards(placement, dim, tensor.ndim)]
    if len(sharding) > 1:
        raise ValueError(f"{name}: the vocabulary may be sharded over one mesh dimension; got {placements}")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    group = mesh.get_group(sharding[0]) if sharding and mesh.size(sharding[0]) > 1 else None
    return VocabularyShard(offset[dim] if sharding else 0, shape[dim], tensor.shape[dim], group)


def _shards(placement: object, dim: int, ndim: int) -> bool:
    return isinstance(placement, Shard) and placement.dim % ndim == dim


def local_like(tensor: Tensor, shard: VocabularyShard, *, dim: int, name: str) -> Tensor:
    """The local part of the teacher's logits or output layer (or a bias) that matches the student's shard.

    Args:
        tensor: plain and of the shard's size, which is taken as it is; or a DTensor, sharded in the same way or
            replicated, of which a replicated one is cut.
        dim: the vocabulary's dimension.
        name: of the argument, for error messages.

    Raises:
        ValueError: it covers other columns, or is a DTensor that `_dtensor_shard` refuses.
    """
    dim %= tensor.ndim
    if not isinstance(tensor, DTensor):
        if tensor.shape[dim] != shard.size:
            rule = f"must have the columns of the student's shard, {shard.size} of {shard.total}"
            raise ValueError(f"{name}: {rule}; got {tensor.shape[dim]}")
        return tensor
    theirs = _dtensor_shard(tensor, dim, name)
    if theirs.total != shard.total:
        raise ValueError(f"{name}: must have the student's vocabulary of {shard.total}; got {theirs.total}")
    local = tensor.to_local()
    if theirs.size == theirs.total:
        return local.narrow(dim, shard.offset, shard.size)
    if (theirs.offset, theirs.size) != (shard.offset, shard.size):
        rule = f"must be sharded as the student is, columns {shard.offset} to {shard.offset + shard.size}"
        raise ValueError(f"{name}: {rule}; got {theirs.offset} to {theirs.offset + theirs.size}")
    return local
