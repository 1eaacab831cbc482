"""The part of the vocabulary that a rank holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def own_columns(columns: int, tp_mesh: DeviceMesh) -> slice:
    """Which of the `columns` of the logits this rank holds if the model is split over `tp_mesh`. May be an empty slice."""
    (size,), (start,) = compute_local_shape_and_global_offset((columns,), tp_mesh, [Shard(0)])
    return slice(start, start + size)


@torch.no_grad()
def mask_padded_columns(logits: Tensor, vocabulary_size: int) -> Tensor:
    """Sets the columns that stand for no token to −inf, in place, and returns the same logits.

    Embedding tables are often padded, differently even within one family. If teacher and student both mask the columns that
    the tokenizer cannot produce, they have the same vocabulary.

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
