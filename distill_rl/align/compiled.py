"""Alignment by bytes and by positions, compiled by Numba: one pass over both sides' tokens. Imported only if it is used.

Legend: `places` int64 [n + 1] holds the byte positions between a side's tokens, the i-th of which covers
`places[i]:places[i + 1]`; `words` uint64 [bytes] holds the eight bytes from each byte on; `chunk` int32 [n] gets each
token's chunk, −1 for none.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from distill_rl.align.vocabulary import SPACE


def compiled(function: Any) -> Any:
    """The function compiled by Numba, on its first call and without the GIL."""
    # The result is cached on disk if Numba finds a writable folder for that.
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)


@compiled
def _equal(words, start, other_words, other_start, size):  # type: ignore[no-untyped-def]
    """Whether `size` bytes are equal, at least one."""
    if size < 8:  # the first byte is a word's lowest, so a shift to the left leaves the first bytes
        return (words[start] ^ other_words[other_start]) << np.uint64(64 - 8 * size) == 0
    for i in range(0, size - 8, 8):
        if words[start + i] != other_words[other_start + i]:
            return False
    return words[start + size - 8] == other_words[other_start + size - 8]


@compiled
def _opens_with_space(table, token):  # type: ignore[no-untyped-def]
    """Whether the bytes of a token, which has some, begin with a space."""
    return table.words[table.starts[token]] & np.uint64(0xFF) == SPACE


@compiled
def _is_stop(table, token):  # type: ignore[no-untyped-def]
    """Whether a token may end an answer."""
    for stop in table.stops:  # noqa: SIM110 - an expression of arrays takes a second to compile
        if stop == token:
            return True
    return False


@compiled
def _merge(left, left_ids, left_places, right, right_ids, right_places, compare, left_chunk, right_chunk):  # type: ignore[no-untyped-def]
    """Writes the chunks of two sides that begin at one byte; returns their number, −1 if bytes differ that it compares."""
    j = count = left_closed = right_closed = 0
    for i in range(len(left_ids)):
        place, left_end = left_places[i], left_places[i + 1]
        left_chunk[i] = count if left_end > place else -1
        while place < left_end and j < len(right_ids):
            # From `place` on the two tokens overlap. One of which a dummy space is taken off spells its last bytes.
            right_end = right_places[j + 1]
            stop = min(left_end, right_end)
            if compare and stop > place:
                start = left.starts[left_ids[i] + 1] - left_end + place
                other_start = right.starts[right_ids[j] + 1] - right_end + place
                if not _equal(left.words, start, right.words, other_start, stop - place):
                    return -1
            if right_end > left_end:
                break
            right_chunk[j] = count if right_end > right_places[j] else -1
            j, place = j + 1, stop
            if right_end == left_end:  # both sides end a token here, and so the chunk
                left_closed, right_closed, count = i + 1, j, count + 1
    for i in range(left_closed, len(left_chunk)):
        left_chunk[i] = -1
    for j in range(right_closed, len(right_chunk)):
        right_chunk[j] = -1
    return count


# Ids without their text: both sides must spell the same bytes.


@compiled
def _lay_out(table, ids, keep, drop, places):  # type: ignore[no-untyped-def]
    """Writes `places`; returns the number of kept tokens without bytes, −1 if an id lies outside of the vocabulary."""
    # `drop` says which dummy spaces are taken off: 1 that of the first token with bytes, 2 those behind a token without
    # bytes, 3 both.
    place, textless, first, behind = 0, 0, True, False
    places[0] = 0
    for i in range(len(ids)):
        if len(keep) == 0 or keep[i]:
            token = ids[i]
            if token < 0 or token >= len(table.lengths):
                return -1
            length = table.lengths[token]
            if length == 0:
                textless += 1
                behind = behind or token != table.unknown
            else:
                if drop and drop & (1 if first else 2 * behind) and _opens_with_space(table, token):
                    length -= 1
                first, behind = False, False
                place += length
        places[i + 1] = place
    return textless


@compiled
def _stops(table, ids, keep, places, found):  # type: ignore[no-untyped-def]
    """(Position of the last bos before any byte or −1, number of rows that are written to `found`)."""
    # Writes (byte position, token position) of the first stop token after each byte; none before the first byte, unless
    # the side spells nothing, and none up to that bos.
    n, text, bos, count = len(ids), -1, -1, 0
    for i in range(n):
        if (len(keep) == 0 or keep[i]) and table.lengths[ids[i]] > 0:
            text = i
    for i in range(n):
        token, place = ids[i], places[i]
        if (len(keep) > 0 and not keep[i]) or table.lengths[token] > 0:
            continue
        # If the unknown token shares its id with a stop token, it is one only behind the last token with bytes.
        if token == table.unknown and (i < text or not _is_stop(table, token)):
            continue
        if token == table.bos and place == 0:
            bos, count = i, 0
        elif (place > 0 or places[n] == 0) and (count == 0 or found[count - 1, 0] != place) and _is_stop(table, token):
            found[count, 0], found[count, 1] = place, i
            count += 1
    return bos, count


@compiled
def stop_pairs_of_ids(left, left_ids, left_keep, left_places, right, right_ids, right_keep, right_places):  # type: ignore[no-untyped-def]
    """int64 [k, 2]: bos with bos before the first byte, and the first stop tokens of both sides after the same byte.

    Args:
        left, right: `Table`s.
        left_ids, right_ids: int32 [n], [m].
        left_keep, right_keep: bool [n], [m], False at padding; empty: there is none.
        left_places, right_places: int64 [n + 1], [m + 1].
    """
    left_found, right_found = np.empty((len(left_ids), 2), np.int64), np.empty((len(right_ids), 2), np.int64)
    left_bos, n = _stops(left, left_ids, left_keep, left_places, left_found)
    right_bos, m = _stops(right, right_ids, right_keep, right_places, right_found)
    pairs = np.empty((1 + min(n, m), 2), np.int64)
    i = j = count = 0
    if left_bos >= 0 and right_bos >= 0:
        pairs[0, 0], pairs[0, 1] = left_bos, right_bos
        count = 1
    while i < n and j < m:
        ahead = left_found[i, 0] - right_found[j, 0]
        if ahead == 0:
            pairs[count, 0], pairs[count, 1] = left_found[i, 1], right_found[j, 1]
            count += 1
        i += ahead <= 0
        j += ahead >= 0
    return pairs[:count]


@compiled
def align_same_bytes(left, left_ids, left_keep, right, right_ids, right_keep, left_chunk, right_chunk):  # type: ignore[no-untyped-def]
    """(Number of chunks, stop pairs int64 [k, 2]) of two sides that spell the same bytes; −1 if they do not.

    Spaces that may be dummies are taken off in the order of `TokenSide.readings`. The number is −2 if an id that is
    kept lies outside of its vocabulary. The arguments are those of `stop_pairs_of_ids`; the chunks are written to the
    last two.
    """
    n, m = len(left_ids), len(right_ids)
    left_places, right_places = np.empty(n + 1, np.int64), np.empty(m + 1, np.int64)
    left_may, right_may = left.dummy + 2 * left.dummy_after_special, right.dummy + 2 * right.dummy_after_special
    for left_drop in range(left_may, -1, -1):
        left_textless = _lay_out(left, left_ids, left_keep, left_drop & left_may, left_places)
        for right_drop in range(right_may, -1, -1):
            right_textless = _lay_out(right, right_ids, right_keep, right_drop & right_may, right_places)
            if left_textless < 0 or right_textless < 0:
                return -2, np.empty((0, 2), np.int64)
            if left_places[n] != right_places[m]:
                continue
            count = _merge(left, left_ids, left_places, right, right_ids, right_places, True, left_chunk, right_chunk)
            if count >= 0 and (left_textless == 0 or right_textless == 0):
                return count, np.empty((0, 2), np.int64)
            if count >= 0:
                sides = left_ids, left_keep, left_places, right, right_ids, right_keep, right_places
                return count, stop_pairs_of_ids(left, *sides)
    return -1, np.empty((0, 2), np.int64)


# A text that is known: tokens that spell it, and tokens whose offsets in it are known.


@compiled
def _place(table, ids, text, places):  # type: ignore[no-untyped-def]
    """Writes `places`; returns how many bytes the tokens spell, −1 if these are not the beginning of the text."""
    # A section ends at a special token. If its bytes are not the text's next ones, it is read again without the space
    # that it begins with, if that may be a dummy.
    i = section = section_place = place = 0
    may_drop, dropped, drop, unknown = table.dummy, False, False, False
    places[0] = 0
    while i < len(ids):
        token = ids[i]
        if token < 0 or token >= len(table.lengths):
            return -1
        length = int(table.lengths[token])
        if length == 0 and table.special[token]:
            unknown = unknown or token == table.unknown
            section, section_place, dropped = i + 1, place, False
            may_drop = table.dummy or table.dummy_after_special
        elif length > 0:
            length -= drop
            fits = place + length <= len(text)
            if not fits or (length and not _equal(table.words, table.starts[token] + drop, text, place, length)):
                first = section
                while table.lengths[ids[first]] == 0:
                    first += 1
                if dropped or not may_drop or not _opens_with_space(table, ids[first]):
                    return -1
                i, place, dropped, drop = section, section_place, True, True
                continue
            place, drop = place + length, False
        i += 1
        places[i] = place
    # Nothing is known about the text of an unknown token: it is eos or bos only if the others spell the whole text.
    return -1 if unknown and place != len(text) else place


@compiled
def _stops_of_spans(table, ids, starts, ends, spans):  # type: ignore[no-untyped-def]
    """int64 [k + 1]: the bos, and the first stop token between each span's text and the next one's; −1 for none."""
    n = len(ids)
    stops = np.empty(len(spans) + 1, np.int64)
    for i in range(len(stops)):
        stops[i] = -1
    opening = 0
    while opening < n and (opening == 0 or ends[opening - 1] == starts[opening - 1]):
        if ids[opening] == table.bos:
            stops[0] = opening
        opening += 1
    first = place = 0
    for i in range(len(spans)):
        until = n
        if i + 1 < len(spans):
            while place < n and (ends[place] == starts[place] or starts[place] < spans[i, 1]):
                place += 1
                if ends[place - 1] > starts[place - 1]:
                    first = place
            until = place
            while until < n and (ends[until] == starts[until] or starts[until] < spans[i + 1, 0]):
                until += 1
        else:
            first = n
            while first > 0 and (ends[first - 1] == starts[first - 1] or starts[first - 1] >= spans[i, 1]):
                first -= 1
        for token in range(first, until):
            if _is_stop(table, ids[token]) and not (token < opening and ids[token] == table.bos):
                stops[i + 1] = token
                break
    return stops


@compiled
def stop_pairs_of_spans(left, left_ids, left_starts, left_ends, right, right_ids, right_starts, right_ends, spans):  # type: ignore[no-untyped-def]
    """int64 [k, 2]: bos with bos, and the first stop tokens of both sides behind the i-th spans.

    bos is the last one up to and including the first token that covers text; no bos up to there counts as a stop token.
    A stop token belongs to a span if it stands before the text of the next one.

    Args:
        left, right: `Table`s.
        left_ids, right_ids: int32 [n], [m].
        left_starts, left_ends, right_starts, right_ends: those of `TokenPositions`.
        spans: int64 [k, 4]: student start and stop, teacher start and stop in bytes of each side's text.
    """
    left_stops = _stops_of_spans(left, left_ids, left_starts, left_ends, spans[:, :2])
    right_stops = _stops_of_spans(right, right_ids, right_starts, right_ends, spans[:, 2:])
    pairs = np.empty((len(left_stops), 2), np.int64)
    count = 0
    for i in range(len(left_stops)):
        if left_stops[i] >= 0 and right_stops[i] >= 0:
            pairs[count, 0], pairs[count, 1] = left_stops[i], right_stops[i]
            count += 1
    return pairs[:count]


@compiled
def align_text(left, left_ids, right, right_ids, text, left_places, right_places, left_chunk, right_chunk):  # type: ignore[no-untyped-def]
    """(Student's bytes, teacher's bytes, number of chunks, stop pairs int64 [k, 2]) of two sides that spell one text.

    If a side does not spell the beginning of the text, its bytes are −1, and there are no chunks. Special tokens stand
    beside the text; dummy spaces before it, and behind special tokens, are taken off where the text lacks them.

    Args:
        left, right: `Table`s.
        left_ids, right_ids: int32 [n], [m].
        text: its `words_of`.
        left_places, right_places, left_chunk, right_chunk: written here.
    """
    left_size, right_size = _place(left, left_ids, text, left_places), _place(right, right_ids, text, right_places)
    if left_size < 0 or right_size < 0:
        return left_size, right_size, -1, np.empty((0, 2), np.int64)
    count = _merge(left, left_ids, left_places, right, right_ids, right_places, False, left_chunk, right_chunk)
    spans = np.zeros((1, 4), np.int64)
    spans[0, 1] = spans[0, 3] = len(text)
    left_positions, right_positions = (left_places[:-1], left_places[1:]), (right_places[:-1], right_places[1:])
    pairs = stop_pairs_of_spans(left, left_ids, *left_positions, right, right_ids, *right_positions, spans)
    return left_size, right_size, count, pairs


@compiled
def place_by_offsets(table, ids, text, bytes_before, offsets, starts, ends, faithful, reported):  # type: ignore[no-untyped-def]
    """Writes the positions of tokens according to the tokenizer's offsets; the rules are those of `positions_by_offsets`.

    Args:
        table: the side's `Table`.
        ids: int32 [n].
        text: its `words_of`.
        bytes_before: int64 [characters + 1]: number of bytes before each character.
        offsets: int64 [n, 2]: in characters.
        starts, ends, faithful, reported: the fields of `TokenPositions`, written here.

    Raises:
        IndexError: an id or an offset outside of the vocabulary or the text.
    """
    n, words, token_starts, lengths, special = len(ids), table.words, table.starts, table.lengths, table.special
    placed = np.empty(n, np.bool_)
    for i in range(n):
        token, opening, closing = ids[i], offsets[i, 0], offsets[i, 1]
        if not (0 <= token < len(lengths) and 0 <= opening < len(bytes_before) and 0 <= closing < len(bytes_before)):
            raise IndexError("a token or an offset lies outside of the vocabulary or the text")
        placed[i] = lengths[token] > 0 or (special[token] and closing > opening)
        reported[i, 0], reported[i, 1] = bytes_before[opening], bytes_before[closing]
        starts[i] = ends[i] = 0
        faithful[i] = True
    first = begin = 0
    while first < n and not placed[first]:
        first += 1
    while first < n:
        # A group goes on until a token ends behind the tokens of the group, if these cover anything.
        stop, size, opener, spells, until = begin, 0, -1, True, first
        while until < n and not (placed[until] and reported[until, 1] > stop > begin):
            if placed[until]:
                stop = max(stop, reported[until, 1])
                size += lengths[ids[until]]
                spells = spells and not special[ids[until]]
                if opener < 0 and lengths[ids[until]] > 0:
                    opener = until
            until += 1
        # It spells what it covers, give or take one leading space where the tokenizer adds or drops one.
        surplus = size - (stop - begin)
        dummy = surplus == 1 and table.dummy and opener >= 0 and _opens_with_space(table, ids[opener])
        lacks = surplus == -1 and table.drops_spaces and text[begin] & np.uint64(0xFF) == SPACE
        equal = surplus == 0 or dummy or lacks
        place = begin + lacks
        for i in range(first, until):
            skipped = int(dummy and i == opener)
            length = lengths[ids[i]] - skipped
            if length > 0:
                equal = equal and _equal(words, token_starts[ids[i]] + skipped, text, place, length)
            place += length
        for i in range(first, until):
            starts[i] = begin if placed[i] else stop
            ends[i] = stop
            faithful[i] = (equal and spells) or not placed[i]
        if dummy and equal and opener == first and lengths[ids[first]] == 1:
            ends[first] = begin  # the token is only the dummy space
        first, begin = until, stop


@compiled
def _skip(starts, ends, i, base):  # type: ignore[no-untyped-def]
    """The first token from the i-th on that covers text and does not begin before `base`."""
    while i < len(starts) and (ends[i] == starts[i] or starts[i] < base):
        i += 1
    return i


@compiled
def _pass(starts, ends, faithful, i):  # type: ignore[no-untyped-def]
    """(Where the next token that covers text is, one past the i-th and all that end there, whether these are faithful)."""
    end, last, all_faithful = ends[i], i, True
    while i < len(ends) and (ends[i] == end or ends[i] == starts[i]):
        if ends[i] > starts[i]:
            last = i + 1
            all_faithful = all_faithful and (len(faithful) == 0 or faithful[i])
        i += 1
    return i, last, all_faithful


@compiled
def chunk_spans(
    left_starts,
    left_ends,
    left_faithful,
    right_starts,
    right_ends,
    right_faithful,
    spans,
    left_chunk,
    right_chunk,
    lossy_ends,
):  # type: ignore[no-untyped-def]
    """(Number of chunks, number of lossy stretches); the rules are those of `alignment.chunks_by_spans`.

    Args:
        left_starts, left_ends, left_faithful, right_starts, right_ends, right_faithful: those of `TokenPositions`; all
            tokens are faithful if that array is empty.
        spans: int64 [k, 4].
        left_chunk, right_chunk: written here.
        lossy_ends: int64 [min(n, m), 2]: as in `TokenChunks`, written here.
    """
    n, m = len(left_starts), len(right_starts)
    for i in range(n):
        left_chunk[i] = -1
    for j in range(m):
        right_chunk[j] = -1
    i = j = count = stretches = 0
    for span in range(len(spans)):
        left_base, left_stop, right_base, right_stop = spans[span]
        i, j = _skip(left_starts, left_ends, i, left_base), _skip(right_starts, right_ends, j, right_base)
        if i == n or j == m:
            break
        # `left` and `right` are each side's last boundary, counted from the span's start. Where they are equal, a
        # candidate ends and the next one begins; tokens before the first such place, or behind the last, are in none.
        left, right, is_open = left_starts[i] - left_base, right_starts[j] - right_base, False
        first, other_first, last, other_last, faithful = i, j, i, j, True
        while True:
            shared = left == right
            if shared:
                if is_open and faithful:
                    for token in range(first, last):
                        left_chunk[token] = count if left_ends[token] > left_starts[token] else -1
                    for token in range(other_first, other_last):
                        right_chunk[token] = count if right_ends[token] > right_starts[token] else -1
                    count += 1
                elif is_open:
                    lossy_ends[stretches, 0], lossy_ends[stretches, 1] = last, other_last
                    stretches += 1
                is_open, first, other_first, faithful = True, i, j, True
            behind = left < right
            if shared or behind:
                if i == n or left_ends[i] > left_stop:
                    break
                left = left_ends[i] - left_base
                i, last, is_faithful = _pass(left_starts, left_ends, left_faithful, i)
                faithful = faithful and is_faithful
            if shared or not behind:
                if j == m or right_ends[j] > right_stop:
                    break
                right = right_ends[j] - right_base
                j, other_last, is_faithful = _pass(right_starts, right_ends, right_faithful, j)
                faithful = faithful and is_faithful
    return count, stretches
