"""From numpy rows to what a model is called with; the same for student and teacher."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from distill_rl.types import RankBatch, TokenRows


def micro_batches(batch: RankBatch, size: int) -> Iterator[tuple[int, TokenRows]]:
    """The batch in order, `size` rows at a time, each with the number of its first row in the global batch."""
    for start in range(0, batch.rows.shape[0], size):
        yield batch.first_row + start, batch.rows[start : start + size]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """int64 copy on `device`; the array may be a read-only view of memory that others share."""
    return torch.tensor(array, dtype=torch.int64, device=device)
