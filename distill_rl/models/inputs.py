"""Turns numpy rows into the tensors that a model is called with, for student and teacher alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from distill_rl.types import RankBatch, TokenRows

PINNED_BYTES = 64 * 2**20
"""A top-k target with 64 entries takes 3 MiB per 8,192 tokens; whole logits take gigabytes, too much to page-lock."""


def micro_batches(batch: RankBatch, size: int, *, padding_apart: bool = False) -> Iterator[tuple[int, TokenRows]]:
    """Yields the batch in order, `size` rows at a time: the global index of the first row, and the rows.

    Each micro-batch is as wide as its rows need, so the widths differ. Rows that a teacher is not asked for are left out
    (`RankBatch.asked`), and so are micro-batches of such rows alone.

    Args:
        padding_apart: the padding of a row is a document of its own, for a model to which the lengths of documents matter
            (`rotary.use_own_lengths`).
    """
    for start in range(0, batch.rows.shape[0], size):
        rows = batch.rows[start : start + size]
        if batch.asked is not None:
            asked = batch.asked[start : start + size]
            if not asked.any():
                continue
            rows = rows[asked]
        cut = rows.cut()
        yield batch.first_row + start, with_padding_apart(cut) if padding_apart else cut


def with_padding_apart(rows: TokenRows) -> TokenRows:
    """The rows with positions that begin again at 0 where the padding begins."""
    if rows.used is None:
        return rows
    columns, used = np.arange(rows.shape[1], dtype=np.int32), rows.used[:, None]
    return replace(rows, position_ids=np.where(columns < used, rows.position_ids, columns - used))


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An int64 copy on `device`. The array may be a read-only view of shared memory.

    The host does not wait: a GPU copies from page-locked memory, after the work queued on its stream.
    """
    tensor = torch.tensor(array, dtype=torch.int64)  # torch cannot pin what it makes from NumPy in the same call
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def tensor_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns `tensor` on `device`: a copy, or `tensor` itself if it is there already.

    If it was copied from host memory to a GPU, the memory of `tensor` may be reused as soon as this returns. The host
    waits only for copies larger than PINNED_BYTES; smaller ones go through page-locked memory, which torch reuses once
    the device has read it.
    """
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.nbytes > PINNED_BYTES:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
