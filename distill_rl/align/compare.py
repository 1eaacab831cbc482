"""Compares what two sides' tokens spell, in compiled code and without a copy of either text.

Importing this module imports Numba, so it is imported when the first row is compared.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from distill_rl.align.side import Side


def same_bytes(left: Side, right: Side) -> bool:
    """Whether two sides with equal numbers of bytes spell the same bytes."""
    return _same(
        left.vocabulary.flat,
        left.vocabulary.starts,
        left.ids,
        left.lengths,
        right.vocabulary.flat,
        right.vocabulary.starts,
        right.ids,
        right.lengths,
    )


@njit(cache=True, nogil=True)
def _same(
    left: np.ndarray,
    left_starts: np.ndarray,
    left_ids: np.ndarray,
    left_lengths: np.ndarray,
    right: np.ndarray,
    right_starts: np.ndarray,
    right_ids: np.ndarray,
    right_lengths: np.ndarray,
) -> bool:
    """Takes the last `lengths[i]` bytes of each token, so a shorter length leaves out a leading dummy space."""
    other, place, stop = -1, 0, 0
    for token in range(len(left_ids)):
        end = left_starts[left_ids[token] + 1]
        for byte in range(end - left_lengths[token], end):
            while place == stop:
                other += 1
                stop = right_starts[right_ids[other] + 1]
                place = stop - right_lengths[other]
            if left[byte] != right[place]:
                return False
            place += 1
    return True
