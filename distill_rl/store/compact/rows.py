"""What a block codes, row by row, and in which context. Compiled by Numba and imported only if it is used.

A row's ids are guessed from an earlier row: the last one after the same token, or else the row above. Its list, in its
order, are the candidates. Each id is coded as its index among the candidates that are left, and taken out of them. As
neighbouring rows put ids in similar orders, most indices are 0 or small. An id that is no candidate is looked up among
those to which that happened before in the block, which are kept in the order of how often; a new one is written out.

Log-probabilities follow as differences of levels along the row. The rest's level is coded as its difference from the
mass that the row's levels leave, and the label's usually costs nothing: the next token is known, and so is its place in
the row.

The encoder and the decoder are two functions that do the same in the same order. Where one has `put`, the other has
`take`.
"""

from __future__ import annotations

import numpy as np

from distill_rl.store.compact.coder import compiled, put, put_bits, take, take_bits
from distill_rl.store.compact.levels import MASS_BITS, MINUS_INFINITY, NOT_A_NUMBER
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
    INDEX,
    KNOWN,
    LABEL,
    LABEL_LENGTH,
    NEW,
    NEW_LENGTH,
    REST,
    REST_FAR,
    REST_LENGTH,
    REST_NOTHING,
    ROW_FULL,
    SIZE_BASE,
    SIZE_BITS,
    SIZE_OF,
    SIZES,
    STEP,
    STEP_LENGTH,
)

_LENGTH = np.array([v.bit_length() for v in range(1024)], np.int64)
"""Bit lengths of small numbers."""


@compiled
def _length(value):  # type: ignore[no-untyped-def]
    """The bit length of a number from 0 on."""
    length = np.int64(0)
    while value > 1023:
        value >>= 10
        length += 10
    return length + _LENGTH[value]


@compiled
def _rank(r):  # type: ignore[no-untyped-def]
    """The class of the place r in a row: 0, 1, 2–3, 4–7, 8–15, 16–31, or 32 and more."""
    return _LENGTH[min(r, 32)]


@compiled
def _index_model(same, r, gap, recent):  # type: ignore[no-untyped-def]
    """The model of an index among the candidates.

    Args:
        same: 1 if the candidates follow the same token, else 0.
        r: place in the row.
        gap: levels between the next two candidates, -1 without two.
        recent: a running mean of the row's indices, times 4.
    """
    near = 0 if gap < 1 else 1 if gap < 3 else 2 if gap < 9 else 3
    return INDEX + ((same * 7 + _rank(r)) * 4 + near) * 6 + min(_LENGTH[min(recent, 1023)], 5)


@compiled
def _step_model(r, recent):  # type: ignore[no-untyped-def]
    """The model of the step from place r − 1 to place r; `recent` is a running mean of the row's steps."""
    return STEP + _rank(r) * 9 + min(_LENGTH[min(recent, 1023)], 8)


@compiled
def _rest_model(remainder):  # type: ignore[no-untyped-def]
    """The model of the rest, given the mass that the row leaves."""
    return REST + _length(max(remainder, 0)) // 2


@compiled
def _guessed_rest(remainder, masses):  # type: ignore[no-untyped-def]
    """The least level whose mass is at most `remainder`."""
    remainder = max(remainder, 0)
    low, high = 0, MINUS_INFINITY  # masses[high] is 0
    while low < high:
        middle = (low + high) // 2
        if masses[middle] <= remainder:
            high = middle
        else:
            low = middle + 1
    return np.int64(low)


@compiled
def _same_token(tokens):  # type: ignore[no-untyped-def]
    """int32 [n]: the last row before each with the same token, or -1."""
    n = len(tokens)
    size = 4
    while size < 2 * n:
        size *= 2
    slots = np.full(size, -1, np.int32)
    previous = np.full(n, -1, np.int32)
    for i in range(n):
        at = (np.int64(tokens[i]) * 40503 >> 3) & (size - 1)
        while slots[at] >= 0 and tokens[slots[at]] != tokens[i]:
            at = (at + 1) & (size - 1)
        previous[i] = slots[at]
        slots[at] = i
    return previous


@compiled
def _promote(order, uses, first, p):  # type: ignore[no-untyped-def]
    """Counts one more use of what is at place p of `order`, and returns its new place.

    It changes places with the first of those that were used as often, which keeps `order` sorted.

    Args:
        order: what is sorted, most used first.
        uses: their numbers of uses, by place.
        first: by a number of uses, the first place that has it.
    """
    c = uses[p]
    f = first[c]
    order[p], order[f] = order[f], order[p]
    uses[f] = c + 1
    first[c] = f + 1
    if f == 0 or uses[f - 1] != c + 1:
        first[c + 1] = f
    return f


@compiled
def _append(order, uses, first, size, item):  # type: ignore[no-untyped-def]
    """Adds `item` with one use behind the `size` others."""
    order[size] = item
    uses[size] = 1
    if size == 0 or uses[size - 1] != 1:
        first[1] = size


@compiled
def _put_size(models, m, long, value, records, t):  # type: ignore[no-untyped-def]
    """Records a number below 2^15 in model m: in classes below `SIZES`, else an escape and its bit length in `long`."""
    if value < SIZES:
        symbol = SIZE_OF[value]
        t = put(models, m, symbol, records, t)
        return put_bits(value - SIZE_BASE[symbol], SIZE_BITS[symbol], records, t)
    t = put(models, m, ESCAPE, records, t)
    return _put_length(models, long, value, records, t)


@compiled
def _put_length(models, m, value, records, t):  # type: ignore[no-untyped-def]
    """Records a number below 2^15 as its bit length in model m, and the bits below its highest."""
    length = _length(value)
    t = put(models, m, length, records, t)
    return put_bits(value - (1 << length >> 1), length - 1, records, t)


@compiled
def _take_size(models, m, long, x0, x1, words, at):  # type: ignore[no-untyped-def]
    """(value, x0, x1, at): what `_put_size` recorded."""
    symbol, x0, x1, at = take(models, m, x0, x1, words, at)
    if symbol < ESCAPE:
        value, x0, x1, at = take_bits(SIZE_BITS[symbol], x0, x1, words, at)
        return SIZE_BASE[symbol] + value, x0, x1, at
    return _take_length(models, long, x0, x1, words, at)


@compiled
def _take_length(models, m, x0, x1, words, at):  # type: ignore[no-untyped-def]
    """(value, x0, x1, at): what `_put_length` recorded."""
    length, x0, x1, at = take(models, m, x0, x1, words, at)
    value, x0, x1, at = take_bits(length - 1, x0, x1, words, at)
    return (np.int64(1) << length >> 1) + value, x0, x1, at


@compiled
def _take_below(length, x0, x1, words, at):  # type: ignore[no-untyped-def]
    """(value, x0, x1, at): a number of `length` bits, 1 to 31, from the bits below its highest."""
    count = length - 1
    high = np.int64(0)
    if count > 15:
        high, x0, x1, at = take_bits(count - 15, x0, x1, words, at)
        count = np.int64(15)
    low, x0, x1, at = take_bits(count, x0, x1, words, at)
    return (np.int64(1) << (length - 1)) + (high << 15) + low, x0, x1, at


@compiled
def encode_rows(tokens, ids, levels, counts, rests, labels, has_counts, masses, models, records):  # type: ignore[no-untyped-def]
    """Records a block's symbols; returns their number.

    Args:
        tokens: int32 [n].
        ids, levels: int32 [n, k]; read up to `counts` [n], of which each is at least 1.
        rests, labels: levels, int32 [n], or empty: not part of the block.
        has_counts: whether rows may have fewer than k entries.
        masses: `mass_table`.
        models: int64 [M, 6], as `fresh_models` makes them.
        records: int64, `records_needed` of them.
    """
    n, k = ids.shape
    previous = _same_token(tokens)
    candidates, depths = np.empty(k, np.int32), np.empty(k, np.int32)
    # Ids outside the candidates: numbered by first occurrence, found by a hash table.
    size = 4
    while size < 2 * n * k:
        size *= 2
    slots = np.full(size, -1, np.int32)
    names, places = np.empty(n * k, np.int32), np.empty(n * k, np.int32)
    order, uses, first = np.empty(n * k, np.int32), np.empty(n * k, np.int32), np.empty(n * k + 2, np.int32)
    known = np.int64(0)
    t = np.int64(0)
    for i in range(n):
        count = np.int64(counts[i])
        if has_counts:
            t = put(models, ROW_FULL, ALL if count == k else FEWER, records, t)
            if count < k:
                t = _put_size(models, COUNT_SIZE, COUNT_LENGTH, count - 1, records, t)
        same = 1 if previous[i] >= 0 else 0
        source = np.int64(previous[i]) if same else np.int64(i - 1)
        head, end = np.int64(0), np.int64(0)
        if source >= 0:
            end = np.int64(counts[source])
            for r in range(end):
                candidates[r], depths[r] = ids[source, r], levels[source, r]
        remainder = np.int64(1) << MASS_BITS
        following = tokens[i + 1] if i + 1 < n else -1
        hit = np.int64(-1)
        level, recent_index, recent_step = np.int64(0), np.int64(0), np.int64(0)
        for r in range(count):
            x = ids[i, r]
            gap = np.int64(depths[head + 1]) - depths[head] if end - head > 1 else np.int64(-1)
            m = _index_model(same, r, gap, recent_index)
            index = np.int64(-1)
            for q in range(head, min(end, head + SIZES)):
                if candidates[q] == x:
                    index = q - head
                    break
            if index >= 0:
                symbol = SIZE_OF[index]
                t = put(models, m, symbol, records, t)
                t = put_bits(index - SIZE_BASE[symbol], SIZE_BITS[symbol], records, t)
                for q in range(head + index, head, -1):
                    candidates[q] = candidates[q - 1]
                    depths[q] = depths[q - 1]
                head += 1
            else:
                index = 16
                t = put(models, m, ESCAPE, records, t)
                at = (np.int64(x) * 40503 >> 3) & (size - 1)
                while slots[at] >= 0 and names[slots[at]] != x:
                    at = (at + 1) & (size - 1)
                if slots[at] < 0:
                    t = put(models, KNOWN + same, NEW, records, t)
                    length = _length(np.int64(x))
                    t = put(models, NEW_LENGTH, min(max(length - 3, 0), 15), records, t)
                    if length <= 3:
                        t = put_bits(np.int64(x), 3, records, t)
                    else:
                        if length >= 18:
                            t = put_bits(length - 18, 4, records, t)
                        t = put_bits(np.int64(x) - (np.int64(1) << length >> 1), length - 1, records, t)
                    slots[at] = known
                    names[known] = x
                    places[known] = known
                    _append(order, uses, first, known, np.int32(known))
                    known += 1
                else:
                    p = np.int64(places[slots[at]])
                    # Place p as the bit length of p + 1 and the bits below the highest.
                    length = _length(p + 1)
                    short = min(length - 1, NEW - 1)
                    t = put(models, KNOWN + same, short, records, t)
                    if short == NEW - 1:
                        t = put_bits(length - NEW, 4, records, t)
                    t = put_bits(p + 1 - (np.int64(1) << (length - 1)), length - 1, records, t)
                    f = _promote(order, uses, first, p)
                    places[order[p]] = p
                    places[order[f]] = f
            recent_index = (recent_index * 3 + index * 4 + 3) >> 2
            step = levels[i, r] - level
            level += step
            if r == 0:
                t = put(models, FIRST, min(level >> 6, 15), records, t)
                if level < 960:
                    t = put(models, FIRST_FINE + (level >> 6), (level >> 2) & 15, records, t)
                    t = put_bits(level & 3, 2, records, t)
                else:
                    t = _put_length(models, FIRST_LENGTH, level - 960, records, t)
                recent_step = level >> 3
            else:
                t = _put_size(models, _step_model(r, recent_step), STEP_LENGTH, step, records, t)
                recent_step = (recent_step + step + 1) >> 1
            remainder -= masses[level]
            if x == following:
                hit = level
        if len(rests) > 0:
            t = _put_rest(models, np.int64(rests[i]), remainder, masses, records, t)
        if len(labels) > 0:
            label = np.int64(labels[i])
            m = LABEL + (1 if hit >= 0 else 0)
            if label == hit:
                t = put(models, m, EQUAL, records, t)
            elif label >= level:
                t = put(models, m, BELOW, records, t)
                t = _put_length(models, LABEL_LENGTH, label - level, records, t)
            else:
                t = put(models, m, ANY, records, t)
                t = put_bits(label, 15, records, t)
    return t


@compiled
def _put_rest(models, rest, remainder, masses, records, t):  # type: ignore[no-untyped-def]
    """Records the rest's level as its difference from the guess: 0, −1, 1, −2, … become 0, 1, 2, 3, …"""
    m = _rest_model(remainder)
    if rest == MINUS_INFINITY:
        return put(models, m, REST_NOTHING, records, t)
    off = rest - _guessed_rest(remainder, masses)
    folded = 2 * off if off >= 0 else -2 * off - 1
    if folded < REST_FAR:
        return put(models, m, folded, records, t)
    t = put(models, m, REST_FAR, records, t)
    # Up to 16 bits: the sign apart, so that the size has 15.
    t = put_bits(folded & 1, 1, records, t)
    return _put_length(models, REST_LENGTH, folded >> 1, records, t)


@compiled
def _take_rest(models, remainder, masses, x0, x1, words, at):  # type: ignore[no-untyped-def]
    """(level, x0, x1, at): what `_put_rest` recorded. The level may be impossible."""
    folded, x0, x1, at = take(models, _rest_model(remainder), x0, x1, words, at)
    if folded == REST_NOTHING:
        return np.int64(MINUS_INFINITY), x0, x1, at
    if folded == REST_FAR:
        sign, x0, x1, at = take_bits(1, x0, x1, words, at)
        size, x0, x1, at = _take_length(models, REST_LENGTH, x0, x1, words, at)
        folded = 2 * size + sign
    off = -((folded + 1) >> 1) if folded & 1 else folded >> 1
    return _guessed_rest(remainder, masses) + off, x0, x1, at


@compiled
def decode_rows(  # type: ignore[no-untyped-def]
    tokens,
    vocabulary_size,
    has_counts,
    has_rests,
    has_labels,
    masses,
    table,
    models,
    words,
    x0,
    x1,
    ids,
    logprobs,
    rests,
    labels,
):
    """Decodes a block into its arrays; returns (at, x0, x1), or `at` -1 if it is malformed.

    Args:
        tokens: int32 [n].
        masses, table: `mass_table` and `logprob_table`.
        models: int64 [M, 6], as `fresh_models` makes them.
        words: uint32, of the block; `at` is how many of them were read, more than there are if it is cut off.
        x0, x1: the block's two states.
        ids, logprobs: int32 and fp32 [n, k], filled with -1 and −inf; written.
        rests, labels: fp32 [n], written if the block has them.
    """
    n, k = ids.shape
    previous = _same_token(tokens)
    levels, counts = np.empty((n, k), np.int32), np.empty(n, np.int32)
    candidates, depths = np.empty(k, np.int32), np.empty(k, np.int32)
    order, uses, first = np.empty(n * k, np.int32), np.empty(n * k, np.int32), np.empty(n * k + 2, np.int32)
    known, at = np.int64(0), np.int64(0)
    for i in range(n):
        count = np.int64(k)
        if has_counts:
            symbol, x0, x1, at = take(models, ROW_FULL, x0, x1, words, at)
            if symbol != ALL:
                count, x0, x1, at = _take_size(models, COUNT_SIZE, COUNT_LENGTH, x0, x1, words, at)
                count += 1
                if symbol != FEWER or count >= k:
                    return np.int64(-1), x0, x1
        counts[i] = count
        same = 1 if previous[i] >= 0 else 0
        source = np.int64(previous[i]) if same else np.int64(i - 1)
        head, end = np.int64(0), np.int64(0)
        if source >= 0:
            end = np.int64(counts[source])
            for r in range(end):
                candidates[r], depths[r] = ids[source, r], levels[source, r]
        remainder = np.int64(1) << MASS_BITS
        following = tokens[i + 1] if i + 1 < n else -1
        hit = np.int64(-1)
        level, recent_index, recent_step = np.int64(0), np.int64(0), np.int64(0)
        for r in range(count):
            gap = np.int64(depths[head + 1]) - depths[head] if end - head > 1 else np.int64(-1)
            symbol, x0, x1, at = take(models, _index_model(same, r, gap, recent_index), x0, x1, words, at)
            if symbol < ESCAPE:
                index, x0, x1, at = take_bits(SIZE_BITS[symbol], x0, x1, words, at)
                index += SIZE_BASE[symbol]
                if head + index >= end:
                    return np.int64(-1), x0, x1
                x, depth = candidates[head + index], depths[head + index]
                for q in range(head + index, head, -1):
                    candidates[q] = candidates[q - 1]
                    depths[q] = depths[q - 1]
                candidates[head], depths[head] = x, depth
                head += 1
            else:
                index = np.int64(16)
                short, x0, x1, at = take(models, KNOWN + same, x0, x1, words, at)
                if short == NEW:
                    short, x0, x1, at = take(models, NEW_LENGTH, x0, x1, words, at)
                    if short == 0:
                        value, x0, x1, at = take_bits(3, x0, x1, words, at)
                    else:
                        length = short + 3
                        if short == 15:
                            more, x0, x1, at = take_bits(4, x0, x1, words, at)
                            length += more
                        value, x0, x1, at = _take_below(length, x0, x1, words, at)
                    if value >= vocabulary_size:
                        return np.int64(-1), x0, x1
                    x = np.int32(value)
                    if known >= len(order):
                        return np.int64(-1), x0, x1
                    _append(order, uses, first, known, x)
                    known += 1
                else:
                    length = short + 1
                    if short == NEW - 1:
                        more, x0, x1, at = take_bits(4, x0, x1, words, at)
                        length += more
                    value, x0, x1, at = _take_below(length, x0, x1, words, at)
                    if value > known:
                        return np.int64(-1), x0, x1
                    x = order[_promote(order, uses, first, value - 1)]
            recent_index = (recent_index * 3 + index * 4 + 3) >> 2
            if r == 0:
                coarse, x0, x1, at = take(models, FIRST, x0, x1, words, at)
                if coarse < 15:
                    fine, x0, x1, at = take(models, FIRST_FINE + coarse, x0, x1, words, at)
                    finest, x0, x1, at = take_bits(2, x0, x1, words, at)
                    level = (coarse << 6) + (fine << 2) + finest
                else:
                    level, x0, x1, at = _take_length(models, FIRST_LENGTH, x0, x1, words, at)
                    level += 960
                recent_step = level >> 3
            else:
                step, x0, x1, at = _take_size(models, _step_model(r, recent_step), STEP_LENGTH, x0, x1, words, at)
                level += step
                recent_step = (recent_step + step + 1) >> 1
            if level > MINUS_INFINITY:
                return np.int64(-1), x0, x1
            ids[i, r] = x
            levels[i, r] = level
            logprobs[i, r] = table[level]
            remainder -= masses[level]
            if x == following:
                hit = level
        if has_rests:
            rest, x0, x1, at = _take_rest(models, remainder, masses, x0, x1, words, at)
            if rest < 0 or rest > MINUS_INFINITY:
                return np.int64(-1), x0, x1
            rests[i] = table[rest]
        if has_labels:
            label = hit
            symbol, x0, x1, at = take(models, LABEL + (1 if hit >= 0 else 0), x0, x1, words, at)
            if symbol == BELOW:
                label, x0, x1, at = _take_length(models, LABEL_LENGTH, x0, x1, words, at)
                label += level
            elif symbol != EQUAL:
                label, x0, x1, at = take_bits(15, x0, x1, words, at)
            if label < 0 or label > NOT_A_NUMBER:
                return np.int64(-1), x0, x1
            labels[i] = table[label]
        if at > len(words):
            return np.int64(-1), x0, x1
    return at, x0, x1
