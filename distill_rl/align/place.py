"""Where tokens lie in a text that is known: by their bytes if those spell it, by the tokenizer's offsets if not."""

from __future__ import annotations

import re

import numpy as np

from distill_rl.align.alignment import Tokenized
from distill_rl.align.spans import Chunks, Placed, gather
from distill_rl.align.tokenizer.families import WHITE_SPACE
from distill_rl.align.tokenizer.vocabulary import SPACE, Vocabulary

_WHITE_SPACE = re.compile(b"(?:%b)*" % b"|".join(re.escape(letter.encode()) for letter in WHITE_SPACE))


def encode(text: str) -> bytes:
    """UTF-8.

    Raises:
        ValueError: a lone surrogate, which no bytes stand for.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a text is made of Unicode characters, got a lone surrogate at character {error.start}; decode the data anew"
        ) from error


def place_by_bytes(vocabulary: Vocabulary, ids: np.ndarray, text: bytes, *, written_specials: bool) -> Placed | None:
    """Where tokens lie whose bytes are the text's beginning; None if they are not.

    A space that the tokenizer may have put before a text, or behind a special token, is taken off where the text has
    none. An unknown token has no bytes, so nothing is known of where it lies; but its id may also be the one of eos or
    bos. It is taken for those where it is written as such, or beside a text that the other tokens spell in full.

    Args:
        ids: int32 [n].
        written_specials: whether special tokens are written in `text` (a rendered chat), or stand beside it.
    """
    wide = ids.astype(np.intp)
    lengths = vocabulary.lengths.take(wide).astype(np.int64)
    special = np.flatnonzero(vocabulary.special.take(wide)) if not lengths.all() else wide[:0]
    unknown = special[ids[special] == vocabulary.unknown] if vocabulary.unknown is not None else special[:0]
    ends = lengths.cumsum()
    spelled = gather(vocabulary, vocabulary.starts.take(wide), lengths, ends).tobytes()
    cursor = section = done = 0
    gaps = []  # (token, bytes that are inserted before it or, if negative, taken off it)
    for stop in [*special.tolist(), len(ids)]:
        if stop > section:
            past = int(ends[stop - 1])
            size = past - done
            if spelled[done:past] != text[cursor : cursor + size]:
                if not _may_drop(vocabulary, section) or spelled[done : done + 1] != b" ":
                    return None
                if spelled[done + 1 : past] != text[cursor : cursor + size - 1]:
                    return None
                gaps.append((section + int(np.flatnonzero(lengths[section:stop])[0]), -1))
                size -= 1
            cursor, done = cursor + size, past
        if stop < len(ids) and written_specials:
            size = _written(vocabulary, int(ids[stop]), text, cursor)
            if not size and ids[stop] == vocabulary.unknown:
                return None
            if size:
                cursor += size
                gaps.append((stop, size))
        section = stop + 1
    if len(unknown) and cursor != len(text):
        return None
    for token, shift in gaps:
        lengths[token] += shift
    ends = lengths.cumsum() if gaps else ends
    return Placed(ends - lengths, ends, None, cursor == len(text))


def _written(vocabulary: Vocabulary, token: int, text: bytes, cursor: int) -> int:
    """Bytes of a special token that is written at `cursor`, with the white space that it swallows; 0 if it is not there."""
    before, behind = vocabulary.strips.get(token, (False, False))
    literal = vocabulary.literal(token)
    start = _white_space_until(text, cursor) if before else cursor
    if not literal or not text.startswith(literal, start):
        return 0
    stop = start + len(literal)
    return (_white_space_until(text, stop) if behind else stop) - cursor


def _white_space_until(text: bytes, start: int) -> int:
    found = _WHITE_SPACE.match(text, start)
    return found.end() if found else start


def strips_spans(vocabulary: Vocabulary, ids: np.ndarray, place: Placed, spans: np.ndarray) -> bool:
    """Whether a special token of the template has swallowed white space that one of the spans begins or ends with.

    Args:
        spans: int64 [k, 2], ascending: start and stop in bytes.
    """
    special = vocabulary.special.take(ids.astype(np.intp)) & (place.ends > place.starts)
    starts, ends = place.starts[special], place.ends[special]
    reached = spans[:, 1].searchsorted(starts, "right")  # the first span that ends behind the token's start
    some = reached < len(spans)
    return bool((spans[reached[some], 0] < ends[some]).any())


def _may_drop(vocabulary: Vocabulary, section: int) -> bool:
    return vocabulary.dummy or (section > 0 and vocabulary.dummy_after_special)


def place_by_offsets(vocabulary: Vocabulary, ids: np.ndarray, text: str, offsets: np.ndarray) -> Placed:
    """Where tokens lie by the tokenizer's own account, checked against the text.

    Tokens whose offsets end at the same character (bytes of one character, T5's ▁ before a word) are one group: no
    boundary is known inside. A group reaches back to the end of the one before it; it is faithful if its bytes are those
    that it covers, where a space that the tokenizer writes of its own, or drops between words, is allowed for.

    Args:
        ids: int32 [n]; offsets: int64 [n, 2] in characters of `text`.
    """
    wide = ids.astype(np.intp)
    lengths = vocabulary.lengths.take(wide).astype(np.int64)
    bytes_before = byte_positions(text)
    special = vocabulary.special.take(wide)
    # A special token that covers characters (the unknown token) has a place, but what it covers is lost.
    placed = np.flatnonzero((lengths > 0) | (special & (offsets[:, 1] > offsets[:, 0])))
    until = np.maximum.accumulate(bytes_before[offsets[placed, 1]]) if len(placed) else placed
    new = np.r_[until[:1] > 0, until[1:] > until[:-1]]
    group = new.cumsum() - 1
    # Tokens before anything is covered join the first group.
    group = np.maximum(group, 0)
    count = int(group[-1]) + 1 if len(group) else 0
    last = np.flatnonzero(np.r_[group[1:] != group[:-1], True]) if count else placed[:0]
    stops = until[last]
    starts = np.r_[0, stops[:-1]][:count]
    first = np.r_[0, last[:-1] + 1][:count]
    faithful, dummy = _check(vocabulary, wide[placed], encode(text), group, first, starts, stops)
    faithful[group[special[placed]]] = False
    ends = np.zeros(len(ids), np.int64)
    ends[placed] = stops[group]
    ends = np.maximum.accumulate(ends) if len(ends) else ends
    begins = ends.copy()
    begins[placed] = starts[group]
    lone = placed[first[dummy & (lengths[placed[first]] == 1)]] if count else placed
    ends[lone] = begins[lone]
    whole = np.ones(len(ids), bool)
    whole[placed] = faithful[group]
    return Placed(begins, ends, whole, False, bytes_before[offsets])


def _check(
    vocabulary: Vocabulary,
    ids: np.ndarray,
    text: bytes,
    group: np.ndarray,
    first: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """bool [groups] twice: whether a group's bytes are those it covers; whether its first one is a space of its own."""
    count = len(starts)
    lengths = vocabulary.lengths.take(ids).astype(np.int64)
    spelled = gather(vocabulary, vocabulary.starts.take(ids), lengths, lengths.cumsum())
    size = np.bincount(group, lengths, count).astype(np.int64)
    begin = size.cumsum() - size
    covered = stops - starts
    raw = np.frombuffer(text + b"\0", np.uint8)
    padded = np.r_[spelled, np.uint8(0)]
    opens_spelled = (padded[begin] == SPACE) & (size > 0)
    opens_text = raw[starts] == SPACE
    extra = size - covered  # +1: a space of its own; −1: it drops the one between words
    dummy = (extra == 1) & opens_spelled & vocabulary.dummy
    dropped = (extra == -1) & opens_text & vocabulary.drops_spaces
    usable = (extra == 0) | dummy | dropped
    of_byte = np.repeat(np.arange(count), size)
    place = np.arange(len(spelled)) - begin[of_byte] + starts[of_byte] - dummy[of_byte] + dropped[of_byte]
    differs = spelled != raw[np.clip(place, 0, len(text))]
    differs[begin[dummy]] = False
    wrong = np.bincount(of_byte, differs, count) > 0
    faithful = usable & ~wrong
    return faithful, dummy & faithful


def at_one_place(chunks: Chunks, student: Placed, teacher: Placed) -> Chunks:
    """Chunks without those whose two sides lie at different places of the one text, numbered anew.

    Of two tokens that spell the same, one side's stretch of the text holds the other's: where letters are dropped that no
    token spells, a tokenizer may count them to the token beside them.
    """
    firsts, lasts = [], []
    for place, numbers in ((student, chunks.student), (teacher, chunks.teacher)):
        covers = place.covers if place.covers is not None else np.stack([place.starts, place.ends], axis=1)
        held = np.flatnonzero((numbers >= 0) & (covers[:, 1] > covers[:, 0]))
        starts = np.full(chunks.count, np.iinfo(np.int64).max)
        ends = np.full(chunks.count, -1, np.int64)
        np.minimum.at(starts, numbers[held], covers[held, 0])
        np.maximum.at(ends, numbers[held], covers[held, 1])
        firsts.append(starts)
        lasts.append(ends)
    starts, ends = np.stack(firsts), np.stack(lasts)
    # The stretch that both have is one of the two, and not empty.
    common = np.minimum(*ends) - np.maximum(*starts)
    keep = (common > 0) & (common == np.min(ends - starts, axis=0))
    if keep.all():
        return chunks
    renumbered = np.append(np.where(keep, keep.cumsum() - 1, -1), -1).astype(np.int32)  # the last is what −1 reads
    count = int(np.count_nonzero(keep))
    return Chunks(renumbered[chunks.student], renumbered[chunks.teacher], count, chunks.lossy_ends)


def byte_positions(text: str) -> np.ndarray:
    """int64 [characters + 1]: bytes before each character, and all of them."""
    if text.isascii():
        return np.arange(len(text) + 1)
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return np.r_[0, widths.cumsum()]


def equal_spans(sides: tuple[Tokenized, Tokenized], texts: tuple[bytes, bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The parts of both sides' spans that read the same, and all spans that are not empty.

    A span that one template has stripped of white space is compared with the other's stripped.

    Returns:
        int64 [k, 4], [l, 4]: student start and stop, teacher start and stop in bytes. The two are equal if all spans
        read the same.
    """
    equal, spans = [], []
    places = [byte_positions(side.text) for side in sides]
    for pair in zip(sides[0].spans or (), sides[1].spans or ()):
        bounds = [(int(at[start]), int(at[stop])) for at, (start, stop) in zip(places, pair)]
        parts = [text[start:stop] for text, (start, stop) in zip(texts, bounds)]
        if not any(parts):
            continue
        spans.append([*bounds[0], *bounds[1]])
        if parts[0] != parts[1]:
            bounds = [_stripped(part, start) for part, (start, _) in zip(parts, bounds)]
            parts = [text[start:stop] for text, (start, stop) in zip(texts, bounds)]
        if parts[0] == parts[1] and parts[0]:
            equal.append([*bounds[0], *bounds[1]])
    return np.array(equal, np.int64).reshape(-1, 4), np.array(spans, np.int64).reshape(-1, 4)


def _stripped(part: bytes, start: int) -> tuple[int, int]:
    lead = len(part) - len(part.lstrip())
    return start + lead, start + max(lead, len(part.rstrip()))
