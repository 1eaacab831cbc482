"""Compares what two sides' tokens spell, in compiled code and without a copy of either text.

Importing this module imports Numba, so it is imported when the first row is compared.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from distill_rl.align.side import Side


def same_bytes(left: Side, right: Side) -> bool:
    """Whether two sides spell the same bytes; the caller makes sure that they spell equally many."""
    return _same(_arrays(left), _arrays(right))


def _arrays(side: Side) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What `_same` needs of a side: its vocabulary's bytes and their starts, the ids, and the bytes to take of each."""
    return side.vocabulary.flat, side.vocabulary.starts, side.ids, side.lengths


@njit(cache=True, nogil=True)
def _same(left, right):  # type: ignore[no-untyped-def]
    """Whether two sides spell the same bytes; both must spell equally many.

    Takes the last `lengths[i]` bytes of each token, so a shorter length leaves out a leading dummy space.

    Args:
        left, right: `_arrays` of both sides.
    """
    flat, starts, ids, lengths = left
    other_flat, other_starts, other_ids, other_lengths = right
    other, place, stop = -1, 0, 0
    for token in range(len(ids)):
        end = starts[ids[token] + 1]
        for byte in range(end - lengths[token], end):
            while place == stop:
                other += 1
                stop = other_starts[other_ids[other] + 1]
                place = stop - other_lengths[other]
            if flat[byte] != other_flat[place]:
                return False
            place += 1
    return True
