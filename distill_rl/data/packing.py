"""Packing: which documents share a row."""

from __future__ import annotations

from collections.abc import Sequence


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts each document, in order, into the first row that has room for it; opens a new row if none has.

    Needs at most 1.7 times as many rows as the best packing, plus one.

    Args:
        lengths: tokens of each document, none above `capacity`; an empty document takes no room, but opens a row if it
            is first.
        capacity: tokens per row.

    Returns:
        The indices of each row's documents, in the order of `lengths`; rows in the order in which they were opened.

    Raises:
        ValueError: a document longer than a row, or of negative length.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for document, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(f"document {document} has {length} tokens, a row holds {capacity}")
        for row, left in enumerate(room):
            if length <= left:
                rows[row].append(document)
                room[row] -= length
                break
        else:
            rows.append([document])
            room.append(capacity - length)
    return rows
