"""Which documents share a row, and in which order rows follow each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

_BLOCK = 256


def first_fit(lengths: ArrayLike, capacity: ArrayLike) -> list[list[int]]:
    """Puts each document, in order, into the first row that has room for it; opens a new row if none has.

    A document may have several lengths, one for each tokenizer that reads it. It then needs room on every side, and the
    rows of all sides hold the same documents in the same order. With one side, this takes at most 1.7 times as many
    rows as the best packing, plus one.

    Args:
        lengths: int [n] or [n, sides]: tokens of each document, none above `capacity`; an empty document takes no room,
            but opens a row if it is first.
        capacity: tokens per row, the same for all sides or one number per side.

    Returns:
        The indices of each row's documents, in the order of `lengths`; rows in the order in which they were opened.

    Raises:
        ValueError: a document longer than a row, or of negative length.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.ndim == 1:
        sizes = sizes[:, None]
    if not len(sizes):
        return []
    limits = np.broadcast_to(np.asarray(capacity, dtype=np.int64), sizes.shape[1:])
    wrong = np.argwhere((sizes < 0) | (sizes > limits))
    if len(wrong):
        document, side = wrong[0].tolist()
        raise ValueError(f"document {document} has {sizes[document, side]} tokens, a row holds {limits[side]}")
    rows: list[list[int]] = []
    # Of every row that may be opened, on each side; below 0 for those that are not open. `most` is the largest of every
    # block of rows: blocks that are full are passed over at once.
    room = np.full((len(limits), -(-len(sizes) // _BLOCK), _BLOCK), -1, dtype=np.int64)
    most = room.max(axis=2)
    for i, size in enumerate(sizes):
        row = len(rows)
        for candidate in np.flatnonzero((most >= size[:, None]).all(axis=0)).tolist():
            fits = (room[:, candidate] >= size[:, None]).all(axis=0)
            if fits.any():
                row = candidate * _BLOCK + int(fits.argmax())
                break
        block, place = divmod(row, _BLOCK)
        if row == len(rows):
            rows.append([])
            room[:, block, place] = limits
        rows[row].append(i)
        room[:, block, place] -= size
        most[:, block] = room[:, block].max(axis=1)
    return rows


def deal_by_length(lengths: Sequence[float], group: int, ranks: int, per_sub_batch: int | None = None) -> list[int]:
    """An order of documents, longest first, in which groups of like length alternate between the ranks.

    Of every sub-batch, rank r of `ranks` gets the r-th of as many equal parts. Its groups, of `group` documents each,
    have about the lengths of the other ranks' groups at the same place, so no rank waits for another. The longest come
    first, so that a lack of memory shows at once. Documents of equal length keep their order.

    Args:
        lengths: in any unit.
        group: documents of a group. A sub-batch that does not consist of `ranks` times as many whole groups is not
            dealt out, only sorted.
        per_sub_batch: documents of a sub-batch; None: all.

    Returns:
        The indices of the documents.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    step, dealt = per_sub_batch or max(len(order), 1), []
    for first in range(0, len(order), step):
        part = order[first : first + step]
        if len(part) % (group * ranks) == 0:
            groups = [part[start : start + group] for start in range(0, len(part), group)]
            part = [i for rank in range(ranks) for each in groups[rank::ranks] for i in each]
        dealt += part
    return dealt
