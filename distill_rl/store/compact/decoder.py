"""The decoder of a block's rows, which does what `encoder` does in the same order. Compiled by Numba.

Nothing is assumed about the block: whatever it holds, no index leaves its array, and every loop ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distill_rl.store.compact.coder import SOURCES, cached, compiled, inlined, take, take_bits
from distill_rl.store.compact.context import (
    fill,
    guessed_rest,
    index_model,
    promote,
    remove,
    rest_model,
    same_token,
    step_model,
)
from distill_rl.store.compact.levels import MASS_BITS, MINUS_INFINITY, NOT_A_NUMBER
from distill_rl.store.compact.models import (
    ALL,
    BELOW,
    COUNT_LENGTH,
    COUNT_SIZE,
    EQUAL,
    ESCAPE,
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
    STEP_LENGTH,
)
from distill_rl.store.compact.numbers import take_below, take_length, take_size

_MALFORMED = -1


@compiled
def _decode_rows(tokens, vocabulary_size, parts, tables, models, words, states, ids, logprobs, rests, labels):  # type: ignore[no-untyped-def]
    """The arguments and the result are those of `decode_rows`."""
    has_counts, has_rests, has_labels = parts
    masses, table = tables
    n, k = ids.shape
    previous, candidates = same_token(tokens), np.empty(k + 4, np.int64)
    entries, counts = np.empty((n, k), np.int64), np.empty(n, np.int32)
    order = np.empty(n * k, np.int32)
    known, at, x0, x1 = np.int64(0), np.int64(0), states[0], states[1]
    for i in range(n):
        count = np.int64(k)
        if has_counts:
            count, x0, at = _take_count(k, models, x0, words, at)
            if count > k:
                return np.int64(_MALFORMED)
        counts[i] = count
        end, same = fill(candidates, i, previous, counts, entries)
        head, recent_index, recent_step = np.int64(0), np.int64(0), np.int64(0)
        level, hit, left = np.int64(0), np.int64(-1), np.int64(1) << MASS_BITS
        following = np.int64(tokens[i + 1]) if i + 1 < n else np.int64(-1)
        for r in range(count):
            symbol, x0, at = take(models, index_model(same, r, candidates, head, end, recent_index), x0, words, at)
            if symbol == ESCAPE:
                index = np.int64(MISSED_INDEX)
                x, known, x0, at = _take_missed(same, order, known, models, x0, words, at)
                if x < 0 or x >= vocabulary_size:
                    return np.int64(_MALFORMED)
            else:
                index = SIZE_BASE[symbol]
                if SIZE_BITS[symbol] > 0:
                    more, x0, at = take_bits(SIZE_BITS[symbol], x0, words, at)
                    index += more
                if head + index >= end:
                    return np.int64(_MALFORMED)
                x = remove(candidates, head, index) & 0xFFFFFFFF
                head += 1
            recent_index = (recent_index * 3 + index * 4 + 3) >> 2
            if r == 0:
                level, x1, at = _take_first(models, x1, words, at)
                recent_step = level >> 2
            else:
                step, x1, at = take_size(models, step_model(r, recent_step), STEP_LENGTH, x1, words, at)
                level += step
                recent_step = (recent_step + step + 1) >> 1
            if level > MINUS_INFINITY:
                return np.int64(_MALFORMED)
            ids[i, r], entries[i, r], logprobs[i, r] = x, level << 32 | x, table[level]
            left -= masses[level]
            if x == following:
                hit = level
        for r in range(count, k):
            ids[i, r], logprobs[i, r] = -1, -np.inf
        if has_rests:
            rest, x1, at = _take_rest(left, masses, models, x1, words, at)
            if rest < 0 or rest > MINUS_INFINITY:
                return np.int64(_MALFORMED)
            rests[i] = table[rest]
        if has_labels:
            label, x1, at = _take_label(hit, level, models, x1, words, at)
            if label < 0 or label > NOT_A_NUMBER:
                return np.int64(_MALFORMED)
            labels[i] = table[label]
        if at > len(words):
            return np.int64(_MALFORMED)
    states[0], states[1] = x0, x1
    return at


@compiled
def _take_count(k, models, x, words, at):  # type: ignore[no-untyped-def]
    """(count, x, at): a row's number of entries, above k if it is impossible."""
    symbol, x, at = take(models, ROW_FULL, x, words, at)
    if symbol == ALL:
        return np.int64(k), x, at
    count, x, at = take_size(models, COUNT_SIZE, COUNT_LENGTH, x, words, at)
    return count + 1, x, at


@inlined
def _take_missed(same, order, known, models, x, words, at):  # type: ignore[no-untyped-def]
    """(id, known, x, at): an id that is no candidate, of which there were `known` before. An impossible place gives -1."""
    short, x, at = take(models, KNOWN + same, x, words, at)
    if short < NEW:
        length = short + 1
        if short == NEW - 1:
            more, x, at = take_bits(np.int64(4), x, words, at)
            length += more
        place, x, at = take_below(length, x, words, at)
        if place > known:
            return np.int64(-1), known, x, at
        return np.int64(order[promote(order, place - 1)]), known, x, at
    short, x, at = take(models, NEW_LENGTH, x, words, at)
    if short == 0:
        value, x, at = take_bits(np.int64(3), x, words, at)
    else:
        length = short + 3
        if short == 15:
            more, x, at = take_bits(np.int64(4), x, words, at)
            length += more
        value, x, at = take_below(min(length, 31), x, words, at)
    order[known] = value
    return value, known + 1, x, at


@compiled
def _take_first(models, x, words, at):  # type: ignore[no-untyped-def]
    """(level, x, at) of a row's first entry."""
    coarse, x, at = take(models, FIRST, x, words, at)
    if coarse == 15:
        level, x, at = take_length(models, FIRST_LENGTH, x, words, at)
        return LONG_FIRST + level, x, at
    fine, x, at = take(models, FIRST_FINE + coarse, x, words, at)
    finest, x, at = take_bits(np.int64(1), x, words, at)
    return (coarse << 5) + (fine << 1) + finest, x, at


@compiled
def _take_rest(left, masses, models, x, words, at):  # type: ignore[no-untyped-def]
    """(level, x, at) of the rest; the level may be impossible."""
    folded, x, at = take(models, rest_model(left), x, words, at)
    if folded == REST_NOTHING:
        return np.int64(MINUS_INFINITY), x, at
    if folded == REST_FAR:
        sign, x, at = take_bits(np.int64(1), x, words, at)
        size, x, at = take_length(models, REST_LENGTH, x, words, at)
        folded = 2 * size + sign
    off = -((folded + 1) >> 1) if folded & 1 else folded >> 1
    return guessed_rest(left, masses) + off, x, at


@compiled
def _take_label(hit, last, models, x, words, at):  # type: ignore[no-untyped-def]
    """(level, x, at) of the label; the level may be impossible. See `encoder._put_label` for `hit` and `last`."""
    symbol, x, at = take(models, LABEL + np.int64(hit >= 0), x, words, at)
    if symbol == EQUAL:
        return hit, x, at
    if symbol == BELOW:
        below, x, at = take_length(models, LABEL_LENGTH, x, words, at)
        return last + below, x, at
    return take_bits(np.int64(15), x, words, at)


def _entry(sources: str) -> Any:
    def decode_rows(tokens, vocabulary_size, parts, tables, models, words, states, ids, logprobs, rests, labels):  # type: ignore[no-untyped-def]
        """Decodes a block into its arrays; returns how many words it read, or -1 if the block is malformed.

        Args:
            tokens: int32 [n].
            parts: whether rows may have fewer than k entries, whether there are rests, and labels.
            tables: `mass_table` and `logprob_table`.
            models: int64 [M, 6], as `fresh_models` makes them.
            words: uint32, of the block.
            states: int64 [2], the block's states; the states at its end are written to it.
            ids, logprobs: int32 and fp32 [n, k], written.
            rests, labels: fp32 [n], written if the block has them.
        """
        _ = sources
        return _decode_rows(tokens, vocabulary_size, parts, tables, models, words, states, ids, logprobs, rests, labels)

    return cached(decode_rows)


decode_rows = _entry(SOURCES)
