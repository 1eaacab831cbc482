"""The chunks of a micro-batch, from rows to flattened tokens."""

from __future__ import annotations

import numpy as np
import torch

from distill_rl.losses import Chunks
from distill_rl.models.inputs import to_device
from distill_rl.types import ChunkRows


def flat_chunks(rows: ChunkRows, device: torch.device) -> Chunks:
    """Converts the chunks of a micro-batch from rows to flattened tokens on `device`, numbered over all rows."""
    student, teacher, count = _flattened(rows)
    return Chunks(to_device(student, device), to_device(teacher, device), count)


def one_to_one_rows(rows: ChunkRows) -> tuple[np.ndarray, np.ndarray]:
    """The positions of both sides in chunks of one token on either side: int64 [n], numbers of flattened tokens.

    Position i of either array is of the same chunk.
    """
    student, teacher, count = _flattened(rows)
    sizes = [np.bincount(side[side >= 0], minlength=count) for side in (student, teacher)]
    single = np.append((sizes[0] == 1) & (sizes[1] == 1), False)  # the last entry is that of −1, no chunk
    positions = [np.flatnonzero(single[side]) for side in (student, teacher)]
    ours, theirs = (place[np.argsort(side[place])] for side, place in zip((student, teacher), positions))
    return ours, theirs


def _flattened(rows: ChunkRows) -> tuple[np.ndarray, np.ndarray, int]:
    """The chunk of every flattened token of student and teacher, and the number of chunks.

    Every row numbers its chunks from 0, and −1 stands for no chunk; in the result they are numbered consecutively over
    all rows.
    """
    counts = rows.student.max(axis=1, initial=-1) + 1
    first = np.cumsum(counts) - counts
    student, teacher = (np.where(side >= 0, side + first[:, None], -1).ravel() for side in (rows.student, rows.teacher))
    return student, teacher, int(counts.sum())
