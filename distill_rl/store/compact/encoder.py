"""The encoder of a block's rows: what is coded, and in which order. Compiled by Numba and imported only if it is used.

A row's ids are guessed from an earlier row: the last one after the same token, or else the row above. Its list, in its
order, are the candidates. Each id is coded as its index among the candidates that are left, and taken out of them. As
related rows put ids in similar orders, most indices are small. An id that is no candidate is looked up among those to
which that happened before in the block, in a list in which the frequent ones come forward; a new one is written out.

Log-probabilities are coded as steps from level to level along the row. The rest's level is coded as its difference from
the mass that the row's levels leave. The label's usually costs nothing: the next token is known, and so is its place in
the row.

Ids are independent of levels but for the candidates' levels, which are those of earlier rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distill_rl.store.compact.coder import IDS, SOURCES, VALUES, cached, compiled, finish, put, put_bits
from distill_rl.store.compact.context import (
    fill,
    guessed_rest,
    index_model,
    promote,
    remove,
    rest_model,
    same_token,
    slot_of,
    step_model,
)
from distill_rl.store.compact.levels import MASS_BITS, MINUS_INFINITY
from distill_rl.store.compact.models import (
    ALL,
    ANY,
    BELOW,
    COUNT_LENGTH,
    COUNT_SIZE,
    EQUAL,
    ESCAPE,
    FEWER,
    FIRST,
    FIRST_FINE,
    FIRST_LENGTH,
    KNOWN,
    LABEL,
    LABEL_LENGTH,
    LONG_FIRST,
    MISSED_INDEX,
    NEW,
    NEW_LENGTH,
    REST_FAR,
    REST_LENGTH,
    REST_NOTHING,
    ROW_FULL,
    SIZE_BASE,
    SIZE_BITS,
    SIZE_OF,
    SIZES,
    STEP_LENGTH,
)
from distill_rl.store.compact.numbers import bit_length, put_below, put_length, put_size


@compiled
def _encode_rows(tokens, ids, levels, counts, rests, labels, has_counts, masses, models, records):  # type: ignore[no-untyped-def]
    """Records a block's symbols; returns their number. The arguments are those of `encode_rows`."""
    n, k = ids.shape
    previous, candidates, entries = same_token(tokens), np.empty(k + 4, np.int64), np.empty((n, k), np.int64)
    size = 4
    while size < 2 * n * k:
        size *= 2
    missed = (
        np.full(size, -1, np.int32),  # a hash table of the numbers that ids have by their first occurrence
        np.empty(n * k, np.int32),  # the ids, by number
        np.empty(n * k, np.int32),  # their places in the order, by number
        np.empty(n * k, np.int32),  # the order, of numbers
    )
    known, t = np.int64(0), np.int64(0)
    for i in range(n):
        count = np.int64(counts[i])
        if has_counts:
            t = put(IDS, models, ROW_FULL, ALL if count == k else FEWER, records, t)
            if count < k:
                t = put_size(IDS, models, COUNT_SIZE, COUNT_LENGTH, count - 1, records, t)
        end, same = fill(candidates, i, previous, counts, entries)
        head, recent_index, recent_step = np.int64(0), np.int64(0), np.int64(0)
        level, hit, left = np.int64(0), np.int64(-1), np.int64(1) << MASS_BITS
        following = np.int64(tokens[i + 1]) if i + 1 < n else np.int64(-1)
        for r in range(count):
            x = np.int64(ids[i, r])
            m = index_model(same, r, candidates, head, end, recent_index)
            index = _index_of(x, candidates, head, end)
            if index >= 0:
                symbol = SIZE_OF[index]
                t = put(IDS, models, m, symbol, records, t)
                t = put_bits(IDS, index - SIZE_BASE[symbol], SIZE_BITS[symbol], records, t)
                remove(candidates, head, index)
                head += 1
            else:
                index = np.int64(MISSED_INDEX)
                t = put(IDS, models, m, ESCAPE, records, t)
                known, t = _put_missed(x, same, missed, known, models, records, t)
            recent_index = (recent_index * 3 + index * 4 + 3) >> 2
            step = np.int64(levels[i, r]) - level
            level += step
            if r == 0:
                t = _put_first(level, models, records, t)
                recent_step = level >> 2
            else:
                t = put_size(VALUES, models, step_model(r, recent_step), STEP_LENGTH, step, records, t)
                recent_step = (recent_step + step + 1) >> 1
            entries[i, r] = level << 32 | x
            left -= masses[level]
            if x == following:
                hit = level
        if len(rests) > 0:
            t = _put_rest(np.int64(rests[i]), left, masses, models, records, t)
        if len(labels) > 0:
            t = _put_label(np.int64(labels[i]), hit, level, models, records, t)
    return t


@compiled
def _index_of(x, candidates, head, end):  # type: ignore[no-untyped-def]
    """The index of id x among the candidates, or -1 if it is not among the first `SIZES`."""
    for q in range(head, min(end, head + SIZES)):
        if candidates[q] & 0xFFFFFFFF == x:
            return q - head
    return np.int64(-1)


@compiled
def _put_missed(x, same, missed, known, models, records, t):  # type: ignore[no-untyped-def]
    """(known, t): records an id that is no candidate, of which there were `known` before."""
    slots, names, places, order = missed
    at = slot_of(x, len(slots))
    while slots[at] >= 0 and names[slots[at]] != x:
        at = (at + 1) & (len(slots) - 1)
    if slots[at] >= 0:
        p = np.int64(places[slots[at]])
        length = bit_length(p + 1)
        short = min(length - 1, NEW - 1)
        t = put(IDS, models, KNOWN + same, short, records, t)
        if short == NEW - 1:
            t = put_bits(IDS, length - NEW, 4, records, t)
        t = put_below(IDS, p + 1, length, records, t)
        f = promote(order, p)
        places[order[p]] = p
        places[order[f]] = f
        return known, t
    t = put(IDS, models, KNOWN + same, NEW, records, t)
    length = bit_length(x)
    short = min(max(length - 3, 0), 15)
    t = put(IDS, models, NEW_LENGTH, short, records, t)
    if short == 0:
        t = put_bits(IDS, x, 3, records, t)
    else:
        if short == 15:
            t = put_bits(IDS, length - 18, 4, records, t)
        t = put_below(IDS, x, length, records, t)
    slots[at], names[known], places[known] = known, x, known
    order[known] = known
    return known + 1, t


@compiled
def _put_first(level, models, records, t):  # type: ignore[no-untyped-def]
    """Records the level of a row's first entry; returns the next t."""
    coarse = min(level >> 5, 15)
    t = put(VALUES, models, FIRST, coarse, records, t)
    if coarse == 15:
        return put_length(VALUES, models, FIRST_LENGTH, level - LONG_FIRST, records, t)
    t = put(VALUES, models, FIRST_FINE + coarse, (level >> 1) & 15, records, t)
    return put_bits(VALUES, level & 1, 1, records, t)


@compiled
def _put_rest(rest, left, masses, models, records, t):  # type: ignore[no-untyped-def]
    """Records the rest's level as its difference from the guess: 0, −1, 1, −2, … become 0, 1, 2, 3, …"""
    m = rest_model(left)
    if rest == MINUS_INFINITY:
        return put(VALUES, models, m, REST_NOTHING, records, t)
    off = rest - guessed_rest(left, masses)
    folded = 2 * off if off >= 0 else -2 * off - 1
    if folded < REST_FAR:
        return put(VALUES, models, m, folded, records, t)
    t = put(VALUES, models, m, REST_FAR, records, t)
    t = put_bits(VALUES, folded & 1, 1, records, t)
    return put_length(VALUES, models, REST_LENGTH, folded >> 1, records, t)


@compiled
def _put_label(label, hit, last, models, records, t):  # type: ignore[no-untyped-def]
    """Records the label's level, given that of the next token in the row, or -1, and that of the row's last entry."""
    m = LABEL + np.int64(hit >= 0)
    if label == hit:
        return put(VALUES, models, m, EQUAL, records, t)
    if label >= last:
        t = put(VALUES, models, m, BELOW, records, t)
        return put_length(VALUES, models, LABEL_LENGTH, label - last, records, t)
    t = put(VALUES, models, m, ANY, records, t)
    return put_bits(VALUES, label, 15, records, t)


def _entry(sources: str) -> Any:
    def encode_rows(tokens, ids, levels, counts, rests, labels, has_counts, masses, models, records, words):  # type: ignore[no-untyped-def]
        """Codes a block; returns (number of words, state 0, state 1).

        Args:
            tokens: int32 [n].
            ids, levels: int32 [n, k]; read up to `counts` [n], of which each is at least 1.
            rests, labels: levels, int32 [n], or empty: not part of the block.
            has_counts: whether rows may have fewer than k entries.
            masses: `mass_table`.
            models: int64 [M, 6], as `fresh_models` makes them.
            records: int64, with room for all symbols.
            words: uint32, with room for as many; filled from its end.
        """
        _ = sources
        total = _encode_rows(tokens, ids, levels, counts, rests, labels, has_counts, masses, models, records)
        return finish(records, total, words)

    return cached(encode_rows)


encode_rows = _entry(SOURCES)
