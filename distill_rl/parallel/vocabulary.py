"""The part of the vocabulary a rank holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def own_columns(columns: int, tp_mesh: DeviceMesh) -> slice:
    """Which of the `columns` of the logits of a model split over `tp_mesh` this rank holds; none is an empty slice."""
    (size,), (start,) = compute_local_shape_and_global_offset((columns,), tp_mesh, [Shard(0)])
    return slice(start, start + size)


@torch.no_grad()
def mask_padded_columns(logits: Tensor, vocabulary_size: int) -> Tensor:
    """Set the columns that stand for no token to -inf, in place, and return the same logits.

    Embedding tables are often padded, and not equally within one family. Where teacher and student both mask what
    the tokenizer cannot produce, they speak of the same vocabulary.

    The gradient passes through untouched: a column at -inf has probability zero, so softmax gives it gradient zero.

    Args:
        logits: [..., V], plain, or a DTensor sharded over its last dimension (shards may be uneven).
        vocabulary_size: tokens of the tokenizer; columns from here on are padding.
    """
    if vocabulary_size >= logits.shape[-1]:
        return logits
    local, first = logits, 0
    if isinstance(logits, DTensor):
        _, offset = compute_local_shape_and_global_offset(logits.shape, logits.device_mesh, logits.placements)
        local, first = logits.to_local(), offset[-1]
    # Detached: the padding is written without a node in the graph, which would copy the whole gradient.
    local.detach()[..., max(vocabulary_size - first, 0) :].fill_(-torch.inf)
    return logits
