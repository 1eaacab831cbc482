"""Sequence parallelism: the ranks of a group hold the same rows, each a contiguous part of their positions.

Everything in a decoder but attention works on each token alone, so a rank computes it for its own positions. Around
attention, two all-to-all exchanges change what is divided (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509):

    [R, H, S / sp, E]  own positions, all heads  ──►  [R, H / sp, S, E]  all positions, own heads  ──►  and back

so attention itself sees whole rows and is computed as without sequence parallelism. An exchange in which every rank sends
equally much to each of the others is its own transpose, so its backward pass is the same exchange of the gradients.

Shapes: R rows, S positions of the whole row, H query heads and K key-value heads of this tensor-parallel rank, E features
per head.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distill_rl.parallel.mesh import World


def own_positions(world: World, width: int) -> slice:
    """Which of the `width` positions of a row this rank holds: all of them if sp is 1.

    Raises:
        ValueError: `width` is no multiple of sp.
    """
    if width % world.sp:
        raise ValueError(f"rows of {width} positions cannot be divided over sp {world.sp}: pad them to a multiple")
    size = width // world.sp
    return slice(world.sp_rank * size, (world.sp_rank + 1) * size)


def part_of_rows(tensor: Tensor, num_rows: int, part: slice) -> Tensor:
    """Returns the positions `part` of every row, flattened again: a view if that is contiguous, otherwise a copy.

    Args:
        tensor: [R·S, …], row after row.
        num_rows: R.
    """
    return tensor.view(num_rows, -1, *tensor.shape[1:])[:, part].flatten(0, 1)


@torch.no_grad()
def gather_positions(tensor: Tensor, num_rows: int, world: World) -> Tensor | None:
    """Joins the ranks' positions to whole rows on the first rank of the group. Collective over the group.

    Args:
        tensor: [R·S / sp, …] of any dtype, this rank's positions, row after row.
        num_rows: R.

    Returns:
        [R·S, …] on the first rank, None on the others; `tensor` itself if sp is 1.
    """
    if world.sp_group is None:
        return tensor
    part = tensor.contiguous()
    # As bytes, because gloo does not know all dtypes.
    raw = part.view(-1).view(torch.uint8)
    parts = [torch.empty_like(raw) for _ in range(world.sp)] if world.sp_rank == 0 else None
    dist.gather(raw, parts, group=world.sp_group, group_dst=0)
    if parts is None:
        return None
    shape = (num_rows, -1, *part.shape[1:])
    return torch.cat([each.view(part.dtype).view(shape) for each in parts], dim=1).flatten(0, 1)


def heads_of_own_share(group: dist.ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    """Exchanges positions for heads: own positions of all heads become all positions of this rank's heads. Collective.

    Fewer key-value heads than ranks are repeated first, to the least number that the ranks can divide. As sp and K both
    divide H, that number does too, and a rank gets the key-value heads that belong to its query heads.

    Args:
        tensors: queries [R, H, S / sp, E], keys and values [R, K, S / sp, E], of one dtype; H a multiple of sp.

    Returns:
        [R, H / sp, S, E] or [R, K′ / sp, S, E] with K′ = lcm(K, sp), in the same order.

    Raises:
        ValueError: sp does not divide the query heads.
    """
    size, heads = group.size(), tensors[0].shape[1]
    if heads % size:
        raise ValueError(f"{heads} heads on a tensor-parallel rank cannot be divided over sp {size}")
    repeated = [_repeat_heads(tensor, size // gcd(tensor.shape[1], size)) for tensor in tensors]
    # [sp, R, heads / sp, S / sp, E]: what goes to each rank. All tensors travel in one exchange.
    outgoing = [tensor.unflatten(1, (size, -1)).transpose(0, 1) for tensor in repeated]
    arrived = _Exchange.apply(torch.cat([each.flatten(1) for each in outgoing], dim=1), group)
    parts = arrived.split([each[0].numel() for each in outgoing], dim=1)
    # [sp, R, heads / sp, S / sp, E] → [R, heads / sp, sp, S / sp, E]: part i holds the positions of rank i.
    sent = zip(parts, outgoing, strict=True)
    return [part.view(each.shape).permute(1, 2, 0, 3, 4).flatten(2, 3) for part, each in sent]


def positions_of_own_share(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    """Exchanges heads for positions, which undoes `heads_of_own_share`. Collective.

    Args:
        tensor: [R, S, H / sp, E], attention's output.

    Returns:
        [R, S / sp, H, E]
    """
    outgoing = tensor.unflatten(1, (group.size(), -1)).transpose(0, 1)
    arrived = _Exchange.apply(outgoing.flatten(1), group).view(outgoing.shape)
    return arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _repeat_heads(tensor: Tensor, times: int) -> Tensor:
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


class _Exchange(torch.autograd.Function):
    """Sends row j of a tensor [sp, n] to rank j, and returns what came from rank i as row i."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    tensor = tensor.contiguous()
    out = torch.empty_like(tensor)
    dist.all_to_all_single(out, tensor, group=group)
    return out
