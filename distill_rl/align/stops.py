"""Tokens that open a text or end a turn, paired across two sides by role and place.

A role is found by its id and its place, since a tokenizer may use one id for several roles and for padding, too.
"""

from __future__ import annotations

import numpy as np

from distill_rl.align.side import Side
from distill_rl.align.spans import Placed
from distill_rl.align.tokenizer.vocabulary import Vocabulary

StopPairs = list[tuple[int, int]]


def pair_stops(student: Side, teacher: Side, student_ids: np.ndarray, teacher_ids: np.ndarray) -> StopPairs:
    """Of ids alone: bos with bos before the first byte, a stop token with the other side's behind the same byte."""
    if not len(student.silent) or not len(teacher.silent):
        return []
    (left_bos, left), (right_bos, right) = _stops(student, student_ids), _stops(teacher, teacher_ids)
    pairs = [(left_bos, right_bos)] if left_bos is not None and right_bos is not None else []
    return [*pairs, *((left[place], right[place]) for place in sorted(left.keys() & right.keys()))]


def _stops(side: Side, ids: np.ndarray) -> tuple[int | None, dict[int, int]]:
    """(the last bos before any byte, the first stop token behind each byte position)."""
    roles = side.vocabulary.roles
    positions = side.positions(side.silent)
    found = ids[side.silent]
    opening = ((found == roles.get("bos", -1)) & (positions == 0)).nonzero()[0]
    bos = int(side.silent[opening[-1]]) if len(opening) else None
    stop = np.isin(found, side.vocabulary.stops)
    stop &= (positions > 0) | (len(side.ids) == 0)
    if bos is not None:
        stop &= side.silent > bos
    places, tokens = positions[stop], side.silent[stop]
    first = np.ones(len(places), bool)
    first[1:] = places[1:] != places[:-1]
    return bos, dict(zip(places[first].tolist(), tokens[first].tolist()))


def pair_stops_of_spans(
    vocabularies: tuple[Vocabulary, Vocabulary],
    ids: tuple[np.ndarray, np.ndarray],
    places: tuple[Placed, Placed],
    spans: np.ndarray,
) -> StopPairs:
    """bos with bos at the start; the stop token that follows the i-th span with the other side's.

    Args:
        spans: int64 [k, 4]: student start and stop, teacher start and stop in bytes of each side's text.
    """
    sides = zip(vocabularies, ids, places, (spans[:, :2], spans[:, 2:]))
    left, right = (_stops_of_spans(*side) for side in sides)
    return sorted((left[key], right[key]) for key in left.keys() & right.keys())


def _stops_of_spans(vocabulary: Vocabulary, ids: np.ndarray, place: Placed, spans: np.ndarray) -> dict[int, int]:
    """Span number → the first stop token between it and the next one; −1 → bos."""
    roles = vocabulary.roles
    found = {}
    speaks = (place.ends > place.starts).nonzero()[0]
    opening = (ids[: 1 + (speaks[0] if len(speaks) else len(ids))] == roles.get("bos", -1)).nonzero()[0]
    if len(opening):
        found[-1] = int(opening[-1])
    stop = np.isin(ids, vocabulary.stops)
    stop[opening] = False
    stops = stop.nonzero()[0]
    starts = place.starts[speaks]
    for number, end in enumerate(spans[:, 1].tolist()):
        inside = speaks[: starts.searchsorted(end)]
        first = int(inside[-1]) + 1 if len(inside) else 0
        until = len(ids)
        if number + 1 < len(spans):
            later = speaks[starts.searchsorted(spans[number + 1, 0]) :]
            until = int(later[0]) if len(later) else until
        candidates = stops[(stops >= first) & (stops < until)]
        if len(candidates):
            found[number] = int(candidates[0])
    return found
