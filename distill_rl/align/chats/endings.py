"""How answers end: the stop tokens of both sides, and the number of rows that end in a pair of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distill_rl.align.aligner import TokenAligner
from distill_rl.align.alignment import Alignment
from distill_rl.align.chats.rendering import Chat
from distill_rl.align.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True)
class Endings:
    """Both sides' stop tokens, and how many of the aligned rows end in a pair of them."""

    student_stops: list[str]
    """The stop tokens' text"""
    teacher_stops: list[str]
    rows: int
    ending: int
    """Rows in which a pair of stop tokens follows the last chunk; only these teach a student to stop"""


def endings(aligner: TokenAligner, texts: Sequence[str], chats: Sequence[Chat] = ()) -> Endings:
    """Aligns rows as a run reads them, and reports both sides' stop tokens and how many rows end in a pair of them.

    Args:
        chats: if there are any, they are aligned in place of the texts.

    Raises:
        ValueError: chats, and a tokenizer without a chat template; a lone surrogate.
        jinja2.TemplateError: a chat that a template rejects.
    """
    rows = align_training_rows(aligner, texts, chats)
    return Endings(
        student_stops=[_literal(aligner.student, token) for token in aligner.student.stops],
        teacher_stops=[_literal(aligner.teacher, token) for token in aligner.teacher.stops],
        rows=len(rows),
        ending=sum(ends_in_stop(aligner, row) for row in rows),
    )


def align_training_rows(aligner: TokenAligner, texts: Sequence[str], chats: Sequence[Chat] = ()) -> list[Alignment]:
    """One alignment per row, as a run reads it, but not cut to a length.

    Rows are the chats, each rendered with both sides' own templates, or, if there are none, the texts, followed by eos.

    Raises:
        ValueError: chats, and a tokenizer without a chat template; a lone surrogate.
        jinja2.TemplateError: a chat that a template rejects.
    """
    if chats:
        return [aligner.align_messages(chat.messages, options=chat.options) for chat in chats]
    return [
        aligner.pair(aligner.tokenize_student(text, end=True), aligner.tokenize_teacher(text, end=True))
        for text in map(aligner.normalize, texts)
    ]


def ends_in_stop(aligner: TokenAligner, row: Alignment) -> bool:
    """Whether a pair of stop tokens follows the last chunk of an alignment; with no chunks, whether there is a pair."""
    last = int(np.flatnonzero(row.student_chunk >= 0).max(initial=-1))
    return any(
        student > last and int(row.student_ids[student]) in aligner.student.stops for student, _ in row.stop_pairs
    )


def _literal(vocabulary: Vocabulary, token: int) -> str:
    """The text that a special token is written as, for a message; "id N" if it has none."""
    return vocabulary.literal(token).decode(errors="replace") or f"id {token}"
