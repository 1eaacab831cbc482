"""Cuts a batch's documents into parts for several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

LEAST_BYTES = 8192
"""Text worth a call of its own: it takes about ten milliseconds to tokenise on two sides and align, a call about two."""


def cut(documents: Sequence[Mapping[str, Any]], parts: int, least: int = LEAST_BYTES) -> list[slice]:
    """Cuts documents into contiguous parts with about the same amount of text; a pure function of its arguments.

    No part has more than its even share of all text by more than the largest document. Parts are fewer where some would
    have less text than `least` or no document.

    Args:
        parts: the most parts, at least 1.
        least: bytes of text that a part should have at least.

    Returns:
        The slices of `documents` in order; none of them is empty, unless there are no documents.
    """
    sizes = np.array([text_bytes(document) for document in documents], dtype=np.int64)
    ends = np.cumsum(sizes)  # bytes up to and with each document
    total = int(sizes.sum())
    parts = max(1, min(parts, total // least))
    stops = [0]
    for part in range(1, parts):
        # Part after part ends at the boundary of documents that is nearest to its share of the text.
        share = total * part / parts
        stop = int(np.searchsorted(ends, share))
        if ends[stop] - share < share - (ends[stop - 1] if stop else 0):
            stop += 1
        stops.append(max(stop, stops[-1]))
    stops.append(len(documents))
    slices = [slice(first, stop) for first, stop in pairwise(stops) if stop > first]
    return slices or [slice(0, 0)]


def text_bytes(value: object) -> int:
    """Bytes of UTF-8 of all strings in a document or in a part of one."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, Mapping):
        return sum(text_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(text_bytes(item) for item in value)
    return 0
