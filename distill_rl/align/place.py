"""Positions of tokens in a text that is known: from the tokens' bytes if these spell it, otherwise from offsets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import numpy as np

from distill_rl.align.alignment import TokenChunks, Tokenized, TokenPositions, gather_bytes, keep_chunks, writable
from distill_rl.align.vocabulary import WHITE_SPACE, Vocabulary, encode, words_of

_WHITE_SPACE = re.compile(b"(?:%b)*" % b"|".join(re.escape(letter.encode()) for letter in WHITE_SPACE))


def place_in_chat(vocabulary: Vocabulary, ids: np.ndarray, text: bytes) -> TokenPositions | None:
    """Positions of a rendered chat's tokens whose bytes spell the beginning of its text; None if they do not.

    The positions are `exact` if the bytes spell the whole text. The ids are read in sections that end at special
    tokens, whose bytes are not in the vocabulary's table:

    1. A section's bytes must be the text's next bytes. If they are not, but begin with a dummy space that the tokenizer
       may have put there (before the text or behind a special token), they must be so without that space.
    2. A special token that the text contains literally at this point moves the cursor past it, together with the white
       space that it strips.
    3. The dummy spaces taken off and the literals put in are then applied to the tokens' lengths, and the positions are
       the cumulative sums.

    The unknown token needs care: nothing is known about the text that it stands for, but its id may also be that of eos
    or bos. It is accepted as one of those only if the other tokens spell the whole text and if it is written literally
    itself.

    Args:
        ids: int32 [n].
        text: UTF-8.
    """
    wide = ids.astype(np.intp)
    lengths = vocabulary.lengths.take(wide).astype(np.int64)
    special = np.flatnonzero(vocabulary.special.take(wide)) if not lengths.all() else wide[:0]
    unknown = special[ids[special] == vocabulary.unknown] if vocabulary.unknown is not None else special[:0]
    ends = lengths.cumsum()
    spelled = gather_bytes(vocabulary.flat, vocabulary.starts.take(wide), lengths, ends).tobytes()
    text_cursor = spelled_cursor = section = 0
    length_changes = []  # (token, bytes to add to its length)
    for stop in [*special.tolist(), len(ids)]:
        if stop > section:
            section_end = int(ends[stop - 1])
            size = section_end - spelled_cursor
            if spelled[spelled_cursor:section_end] != text[text_cursor : text_cursor + size]:
                may_have_dummy = vocabulary.dummy or (section > 0 and vocabulary.dummy_after_special)
                if not may_have_dummy or spelled[spelled_cursor : spelled_cursor + 1] != b" ":
                    return None
                if spelled[spelled_cursor + 1 : section_end] != text[text_cursor : text_cursor + size - 1]:
                    return None
                length_changes.append((section + int(np.flatnonzero(lengths[section:stop])[0]), -1))
                size -= 1
            text_cursor, spelled_cursor = text_cursor + size, section_end
        if stop < len(ids):
            size = _written_length(vocabulary, int(ids[stop]), text, text_cursor)
            if not size and ids[stop] == vocabulary.unknown:
                return None
            if size:
                text_cursor += size
                length_changes.append((stop, size))
        section = stop + 1
    if len(unknown) and text_cursor != len(text):
        return None
    for token, change in length_changes:
        lengths[token] += change
    ends = lengths.cumsum() if length_changes else ends
    return TokenPositions(ends - lengths, ends, None, text_cursor == len(text))


def _written_length(vocabulary: Vocabulary, token: int, text: bytes, cursor: int) -> int:
    """Returns how many bytes of `text` a special token takes up at `cursor`; 0 if it is not written there."""
    # They include the white space that the token strips.
    strips_before, strips_behind = vocabulary.strips.get(token, (False, False))
    literal = vocabulary.literal(token)
    start = _skip_white_space(text, cursor) if strips_before else cursor
    if not literal or not text.startswith(literal, start):
        return 0
    stop = start + len(literal)
    return (_skip_white_space(text, stop) if strips_behind else stop) - cursor


def _skip_white_space(text: bytes, start: int) -> int:
    """Where the white space that begins at `start` ends; `start` if there is none."""
    match = _WHITE_SPACE.match(text, start)
    return match.end() if match else start


def strips_spans(vocabulary: Vocabulary, ids: np.ndarray, positions: TokenPositions, spans: np.ndarray) -> bool:
    """Whether a special token of the template has stripped white space at the beginning or end of one of the spans.

    It has if the text that it covers reaches into the span.

    Args:
        ids: int32 [n]: the tokens that `positions` belongs to.
        spans: int64 [k, 2], ascending: start and stop in bytes.
    """
    special = vocabulary.special.take(ids.astype(np.intp)) & (positions.ends > positions.starts)
    starts, ends = positions.starts[special], positions.ends[special]
    span = spans[:, 1].searchsorted(starts, "right")  # the first span that ends behind the token's start
    has_span = span < len(spans)
    return bool((spans[span[has_span], 0] < ends[has_span]).any())


def _only(chunks: TokenChunks, keep: np.ndarray) -> TokenChunks:
    """The chunks for which `keep` [count] is True, renumbered; the same object if it is for all."""
    if keep.all():
        return chunks
    kept = keep_chunks(keep, chunks.student, chunks.teacher)
    return TokenChunks(kept[0], kept[1], int(np.count_nonzero(keep)), chunks.lossy_ends)


def keep_equal_specials(
    chunks: TokenChunks, vocabularies: tuple[Vocabulary, Vocabulary], ids: tuple[np.ndarray, np.ndarray]
) -> TokenChunks:
    """Chunks without those in which a special token of one side is text on the other, renumbered; often the same object.

    A side that spells a token's name letter by letter says nothing of how probable the token is.

    Args:
        vocabularies, ids: of student and teacher; ids int32 [n], int32 [m].
    """
    counts = []
    for vocabulary, side, chunk in zip(vocabularies, ids, (chunks.student, chunks.teacher)):
        written = chunk[vocabulary.special.take(side.astype(np.intp)) & (chunk >= 0)]
        counts.append(np.bincount(written, minlength=chunks.count))
    keep = counts[0] == counts[1]
    return _only(chunks, keep)


def positions_by_offsets(vocabulary: Vocabulary, ids: np.ndarray, text: str, offsets: np.ndarray) -> TokenPositions:
    """Positions of the tokens in bytes, according to the tokenizer's offsets and checked against the text.

    1. Tokens whose offsets end at the same character (the bytes of one character, T5's ▁ before a word) form a group,
       because no boundary inside of it is known. Tokens before anything is covered join the first group.
    2. A group covers the text from the end of the group before it to its own end.
    3. A group is faithful if its bytes are those that it covers, give or take one leading space that the tokenizer adds
       itself or drops between words. A group with a special token, such as the unknown token, never is.

    The result is never `exact`. Tokens that cover no text are placed at the end of the token before them.

    Args:
        ids: int32 [n].
        offsets: int64 [n, 2]: in characters of `text`.
    """
    from distill_rl.align.compiled import place_by_offsets  # imports Numba

    n, bytes_before = len(ids), byte_positions(text)
    starts, ends, reported = np.empty(n, np.int64), np.empty(n, np.int64), np.empty((n, 2), np.int64)
    faithful = np.empty(n, bool)
    written = starts, ends, faithful, reported
    place_by_offsets(vocabulary.table, writable(ids), words_of(encode(text)), bytes_before, writable(offsets), *written)
    return TokenPositions(starts, ends, faithful, False, reported)


def keep_same_place(chunks: TokenChunks, student: TokenPositions, teacher: TokenPositions) -> TokenChunks:
    """Chunks without those whose two sides lie at different places of the text, renumbered.

    The same object if no chunk is removed. Two tokens that spell the same may still be different occurrences. They are
    taken to be the same occurrence if the stretch that one side's chunk covers contains the other's: where a tokenizer
    drops letters that no token spells, it may count them as covered by a neighbouring token, so equality would be too
    strict. A chunk that covers no text on one of the sides is removed as well.

    Args:
        student, teacher: the tokens' positions in one and the same text.
    """
    firsts, lasts = [], []
    for positions, chunk in ((student, chunks.student), (teacher, chunks.teacher)):
        covered = positions.reported
        if covered is None:
            covered = np.stack([positions.starts, positions.ends], axis=1)
        tokens = np.flatnonzero((chunk >= 0) & (covered[:, 1] > covered[:, 0]))
        starts = np.full(chunks.count, np.iinfo(np.int64).max)
        ends = np.full(chunks.count, -1, np.int64)
        np.minimum.at(starts, chunk[tokens], covered[tokens, 0])
        np.maximum.at(ends, chunk[tokens], covered[tokens, 1])
        firsts.append(starts)
        lasts.append(ends)
    starts, ends = np.stack(firsts), np.stack(lasts)
    # One stretch contains the other if their intersection is as long as the shorter one.
    common = np.minimum(*ends) - np.maximum(*starts)
    keep = (common > 0) & (common == np.min(ends - starts, axis=0))
    return _only(chunks, keep)


def byte_positions(text: str) -> np.ndarray:
    """int64 [characters + 1]: number of bytes in UTF-8 before each character and, last, of the whole text."""
    if text.isascii():
        return np.arange(len(text) + 1)
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return np.r_[0, widths.cumsum()]


def equal_spans(sides: tuple[Tokenized, Tokenized], texts: tuple[bytes, bytes]) -> tuple[np.ndarray, np.ndarray, bool]:
    """The parts of both sides' spans that read the same, and all pairs of spans that are not both empty.

    Spans that differ are compared again without leading and trailing ASCII white space, which one template may have
    stripped. Where the templates write texts in different orders, only pairs that are in order on both sides are left.

    Args:
        texts: both sides' texts in UTF-8.

    Returns:
        int64 [k, 4], [l, 4]: student start and stop, teacher start and stop in bytes, ascending. The two arrays are equal
            if all spans read the same.
        Whether these are all texts that the templates write.
    """
    byte_of_char = [byte_positions(side.text) for side in sides]
    bounds = [
        [(int(position[start]), int(position[stop])) for start, stop in side.spans or ()]
        for position, side in zip(byte_of_char, sides)
    ]
    pairs = [(*left, *right) for left, right in zip(*bounds) if left[1] > left[0] or right[1] > right[0]]
    spans = np.array(pairs, np.int64).reshape(-1, 4)
    kept = _in_order(spans)
    complete = len(kept) == len(spans) and all(side.complete for side in sides)
    equal = [pair for pair in map(partial(_equal_part, texts), kept.tolist()) if pair]
    return np.array(equal, np.int64).reshape(-1, 4), kept, complete


def _equal_part(texts: tuple[bytes, bytes], pair: Sequence[int]) -> tuple[int, ...] | None:
    """The bounds of what two spans have in common: both, or both without the white space around them; None for nothing."""
    bounds = [(pair[0], pair[1]), (pair[2], pair[3])]
    parts = [text[start:stop] for text, (start, stop) in zip(texts, bounds)]
    if parts[0] != parts[1]:
        bounds = [_strip(part, start) for part, (start, _) in zip(parts, bounds)]
        parts = [text[start:stop] for text, (start, stop) in zip(texts, bounds)]
    return (*bounds[0], *bounds[1]) if parts[0] == parts[1] and parts[0] else None


def _in_order(spans: np.ndarray) -> np.ndarray:
    """Pairs of spans that ascend on both sides: all, or of those with text on both sides the ones that hold most of it.

    Args:
        spans: int64 [k, 4]: student start and stop, teacher start and stop.
    """
    if (spans[1:, ::2] >= spans[:-1, 1::2]).all():
        return spans
    spans = spans[(spans[:, 1::2] > spans[:, ::2]).all(axis=1)]
    spans = spans[spans[:, 0].argsort()]
    # The most text of a row of pairs that ends with each one, and the pair before it in that row.
    most, before = spans[:, 3] - spans[:, 2], np.full(len(spans), -1)
    for i, start in enumerate(spans[:, 2]):
        earlier = np.where(spans[:i, 3] <= start, most[:i], 0)
        if earlier.any():
            before[i] = earlier.argmax()
            most[i] += earlier.max()
    row, i = [], int(most.argmax()) if len(spans) else -1
    while i >= 0:
        row.append(i)
        i = int(before[i])
    return spans[row[::-1]]


def join_spans(spans: np.ndarray) -> np.ndarray:
    """Spans of which those that touch on both sides are one, because tokens reach across the pieces of a text.

    Args:
        spans: int64 [k, 4], ascending: student start and stop, teacher start and stop.
    """
    begins = np.ones(len(spans), bool)
    begins[1:] = (spans[1:, ::2] != spans[:-1, 1::2]).any(axis=1)
    ends = np.append(begins[1:], True)[: len(spans)]
    joined = spans[begins]
    joined[:, 1::2] = spans[ends, 1::2]
    return joined


def _strip(part: bytes, start: int) -> tuple[int, int]:
    """Start and stop of a part that begins at `start`, without the white space around it."""
    lead = len(part) - len(part.lstrip())
    return start + lead, start + max(lead, len(part.rstrip()))
