"""Pairs the tokens that open a text or end a turn across the two sides, by role and position.

The id alone does not decide: a tokenizer may use one id for several roles, and for padding as well.
"""

from __future__ import annotations

import numpy as np

from distill_rl.align.side import TokenSide
from distill_rl.align.spans import TokenPositions
from distill_rl.align.vocabulary import Vocabulary

StopPairs = list[tuple[int, int]]


def pair_stops(student: TokenSide, teacher: TokenSide, student_ids: np.ndarray, teacher_ids: np.ndarray) -> StopPairs:
    """Pairs (student position, teacher position) from ids alone: bos with bos, and stop tokens after the same byte.

    bos is paired only before the first byte. Of several stop tokens after one byte, the first is paired; none before
    the first byte, unless a side spells nothing.

    Args:
        student_ids, teacher_ids: int32 [n], [m]: all ids, which `TokenSide` holds only in part.
    """
    if not len(student.textless) or not len(teacher.textless):
        return []
    (student_bos, left), (teacher_bos, right) = _stops(student, student_ids), _stops(teacher, teacher_ids)
    pairs = []
    if student_bos is not None and teacher_bos is not None:
        pairs.append((student_bos, teacher_bos))
    return [*pairs, *((left[place], right[place]) for place in sorted(left.keys() & right.keys()))]


def _stops(side: TokenSide, ids: np.ndarray) -> tuple[int | None, dict[int, int]]:
    """Position of the last bos before any byte, or None, and byte position → position of the first stop token there."""
    # The byte position is the number of bytes before the stop token. Stop tokens before the first byte count only if
    # the side spells nothing, and never those up to that bos.
    roles = side.vocabulary.roles
    places = side.bytes_before(side.textless)
    textless_ids = ids[side.textless]
    opening = ((textless_ids == roles.get("bos", -1)) & (places == 0)).nonzero()[0]
    bos = int(side.textless[opening[-1]]) if len(opening) else None
    stop = np.isin(textless_ids, side.vocabulary.stops)
    stop &= (places > 0) | (len(side.ids) == 0)
    if bos is not None:
        stop &= side.textless > bos
    places, tokens = places[stop], side.textless[stop]
    first = np.ones(len(places), bool)
    first[1:] = places[1:] != places[:-1]
    return bos, dict(zip(places[first].tolist(), tokens[first].tolist()))


def pair_stops_of_spans(
    vocabularies: tuple[Vocabulary, Vocabulary],
    ids: tuple[np.ndarray, np.ndarray],
    positions: tuple[TokenPositions, TokenPositions],
    spans: np.ndarray,
) -> StopPairs:
    """Pairs (student position, teacher position): bos with bos, and the first stop tokens behind the i-th spans.

    bos counts only at the start. A stop token belongs to a span if it stands before the text of the next one.

    Args:
        vocabularies, ids, positions: of the student and of the teacher.
        spans: int64 [k, 4]: student start and stop, teacher start and stop in bytes of each side's text.
    """
    sides = zip(vocabularies, ids, positions, (spans[:, :2], spans[:, 2:]))
    left, right = (_stops_of_spans(*side) for side in sides)
    return sorted((left[key], right[key]) for key in left.keys() & right.keys())


def _stops_of_spans(
    vocabulary: Vocabulary, ids: np.ndarray, positions: TokenPositions, spans: np.ndarray
) -> dict[int, int]:
    """Span index → position of the first stop token between this span's text and the next one's; −1 → position of bos."""
    # Entries that do not exist are left out. bos is the last one up to and including the first token that covers text;
    # no bos up to there counts as a stop token.
    stop_of_span = {}
    textual = (positions.ends > positions.starts).nonzero()[0]
    until_text = ids[: 1 + (textual[0] if len(textual) else len(ids))]
    opening = (until_text == vocabulary.roles.get("bos", -1)).nonzero()[0]
    if len(opening):
        stop_of_span[-1] = int(opening[-1])
    is_stop = np.isin(ids, vocabulary.stops)
    is_stop[opening] = False
    stops = is_stop.nonzero()[0]
    starts = positions.starts[textual]
    for i, end in enumerate(spans[:, 1].tolist()):
        inside = textual[: starts.searchsorted(end)]
        first = int(inside[-1]) + 1 if len(inside) else 0
        until = len(ids)
        if i + 1 < len(spans):
            later = textual[starts.searchsorted(spans[i + 1, 0]) :]
            until = int(later[0]) if len(later) else until
        candidates = stops[(stops >= first) & (stops < until)]
        if len(candidates):
            stop_of_span[i] = int(candidates[0])
    return stop_of_span
