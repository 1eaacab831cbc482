"""How answers end on either side: which tokens are stops, and how many rows end in a pair of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distill_rl.align.aligner import TokenAligner
from distill_rl.align.alignment import Alignment
from distill_rl.align.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True)
class Endings:
    student_stops: list[str]
    """as they are written"""
    teacher_stops: list[str]
    rows: int
    ending: int
    """rows whose last token in common is a stop on both sides: only of these a student learns to stop"""


def endings(aligner: TokenAligner, texts: Sequence[str], chats: Sequence[Sequence[Mapping[str, str]]] = ()) -> Endings:
    """
    Raises:
        ValueError: chats, and a tokenizer without a chat template.
    """
    found = as_in_a_run(aligner, texts, chats)
    ours, theirs = ([_written(side, number) for number in side.stops] for side in (aligner.student, aligner.teacher))
    return Endings(ours, theirs, len(found), sum(ends_in_stop(aligner, each) for each in found))


def as_in_a_run(
    aligner: TokenAligner, texts: Sequence[str], chats: Sequence[Sequence[Mapping[str, str]]] = ()
) -> list[Alignment]:
    """Rows as a run reads them: chats by either side's template; where there are none, texts with eos behind them."""
    if chats:
        return [aligner.align_messages(chat) for chat in chats]
    return [
        aligner.pair(aligner.tokenize_student(text, end=True), aligner.tokenize_teacher(text, end=True))
        for text in map(aligner.normalize, texts)
    ]


def ends_in_stop(aligner: TokenAligner, found: Alignment) -> bool:
    """Whether a pair of stop tokens stands behind the last chunk."""
    last = int(np.flatnonzero(found.student_chunk >= 0).max(initial=-1))
    return any(
        student > last and int(found.student_ids[student]) in aligner.student.stops for student, _ in found.stop_pairs
    )


def _written(vocabulary: Vocabulary, number: int) -> str:
    return vocabulary.literal(number).decode(errors="replace") or f"id {number}"
