"""In which context an entry is coded, and the lists that ids are looked up in. Compiled by Numba.

Entries of rows, and so candidates, are int64: level · 2^32 + id.
"""

from __future__ import annotations

import numpy as np

from distill_rl.store.compact.coder import compiled, inlined
from distill_rl.store.compact.levels import MINUS_INFINITY
from distill_rl.store.compact.models import INDEX, REST, STEP
from distill_rl.store.compact.numbers import bit_length, short_length


@inlined
def index_model(same, r, candidates, head, end, recent):  # type: ignore[no-untyped-def]
    """The model of an id's index among the candidates.

    Args:
        same: 1 if the candidates followed the same token, else 0.
        r: place in the row.
        candidates: those from `head` to `end` are left. How far apart the levels of the first two are is a context.
        recent: a running mean of the row's indices, times 4.
    """
    near = np.int64(0)
    if end - head > 1:
        gap = (candidates[head + 1] >> 32) - (candidates[head] >> 32)
        near = np.int64(gap >= 1) + np.int64(gap >= 3) + np.int64(gap >= 9)
    return INDEX + ((same * 7 + short_length(r, 6)) * 4 + near) * 6 + short_length(recent, 5)


@inlined
def step_model(r, recent):  # type: ignore[no-untyped-def]
    """The model of the step from place r − 1 to place r; `recent` is a running mean of the row's steps."""
    return STEP + short_length(r, 6) * 9 + short_length(recent, 8)


@compiled
def rest_model(left):  # type: ignore[no-untyped-def]
    """The model of the rest, given the mass that the row leaves."""
    return REST + (bit_length(max(left, 0)) >> 1)


@compiled
def guessed_rest(left, masses):  # type: ignore[no-untyped-def]
    """The least level whose mass is at most that which the row leaves."""
    low, high = np.int64(0), np.int64(MINUS_INFINITY)  # masses[high] is 0
    while low < high:
        middle = (low + high) >> 1
        if masses[middle] <= max(left, 0):
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def same_token(tokens):  # type: ignore[no-untyped-def]
    """int32 [n]: the last row before each with the same token, or -1."""
    n = len(tokens)
    size = 4
    while size < 2 * n:
        size *= 2
    slots, previous = np.full(size, -1, np.int32), np.full(n, -1, np.int32)
    for i in range(n):
        at = slot_of(tokens[i], size)
        while slots[at] >= 0 and tokens[slots[at]] != tokens[i]:
            at = (at + 1) & (size - 1)
        previous[i] = slots[at]
        slots[at] = i
    return previous


@inlined
def slot_of(item, size):  # type: ignore[no-untyped-def]
    """Where to look first for an item in a hash table of `size` slots, a power of two."""
    return (np.int64(item) * 40503 >> 3) & (size - 1)


@compiled
def fill(candidates, i, previous, counts, entries):  # type: ignore[no-untyped-def]
    """Fills in row i's candidates; returns their number, and 1 if they followed the same token, else 0.

    They are the entries of the last row with the same token, or else of the row above.
    """
    same = np.int64(previous[i] >= 0)
    source = np.int64(previous[i]) if same else np.int64(i - 1)
    if source < 0:
        return np.int64(0), same
    end = np.int64(counts[source])
    for r in range(end):
        candidates[r] = entries[source, r]
    return end, same


@inlined
def remove(candidates, head, index):  # type: ignore[no-untyped-def]
    """Takes the candidate at `head` + `index` out and returns it; the others are those from `head` + 1 on.

    The array has room for four more than there are.
    """
    # Most indices are below 4. For these there is no loop, whose end a processor could not predict.
    a, b, c, d = candidates[head], candidates[head + 1], candidates[head + 2], candidates[head + 3]
    candidates[head + 1] = a if index > 0 else b
    candidates[head + 2] = b if index > 1 else c
    candidates[head + 3] = c if index > 2 else d
    taken = (a if index < 1 else b) if index < 2 else (c if index < 3 else d)
    for q in range(head + 4, head + index + 1):
        taken, candidates[q] = candidates[q], taken
    return taken


@inlined
def promote(order, p):  # type: ignore[no-untyped-def]
    """Moves what is at place p of `order` forward by a quarter, and returns its new place.

    It changes places with what was there. What is promoted often comes to the front.
    """
    f = 3 * p >> 2
    order[p], order[f] = order[f], order[p]
    return f
