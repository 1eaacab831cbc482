"""The sparse vocabulary projection W: what each token of the student is in the teacher's tokens.

W is row-stochastic and [V_s, V_t]: a row of one 1 where both vocabularies have a token of the same bytes, otherwise
the first pieces in which the teacher spells the token's bytes, weighted 0.9·0.1^i (X-Token, arXiv 2605.21699). It is
made once per pair, kept in a file named by both tokenizers, and read from there by every worker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distill_rl.align.projection.file import Projection, load_projection, save_projection
from distill_rl.align.tokenizer.encoder import Encoder
from distill_rl.align.tokenizer.retokenize import Retokenizer
from distill_rl.align.tokenizer.vocabulary import Vocabulary, common_vocabulary, read_vocabulary

__all__ = ["Projection", "build_projection", "cached_projection", "load_projection", "save_projection"]

log = logging.getLogger(__name__)

MAX_PIECES = 4
FIRST_WEIGHT, DECAY = 0.9, 0.1
# Role of a student's token → the teacher's roles that it may stand for. Where a side has one stop token, it is both.
PAIRED_ROLES = {"eos": ("eos", "end_of_turn"), "end_of_turn": ("end_of_turn", "eos"), "bos": ("bos",)}


def build_projection(
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    *,
    student_columns: int,
    teacher_columns: int,
    student_stops: Sequence[int] = (),
    teacher_stops: Sequence[int] = (),
) -> Projection:
    """W and the common vocabulary of two fast tokenizers.

    A row is, in this order: the teacher's token of equal bytes, or of equal role (bos, eos, end_of_turn; a teacher
    with only one of the last two stops by that), with weight 1; the first four pieces that `Retokenizer` gives, weighted 0.9·0.1^i, divided by their sum, a piece that comes
    again taking the sum of its weights; empty for a token without bytes and role, for bytes that the teacher cannot
    spell, and for ids that only the model has (padding of the embedding).

    Args:
        student_columns, teacher_columns: V_s and V_t, the models' `config.vocab_size`.
        student_stops, teacher_stops: as of `TokenAligner`.
    Raises:
        ValueError: a tokenizer that is slow or has more ids than its model has columns.
    """
    student = read_vocabulary(student_tokenizer, Encoder(student_tokenizer), student_stops)
    encoder = Encoder(teacher_tokenizer)
    teacher = read_vocabulary(teacher_tokenizer, encoder, teacher_stops)
    return _project(
        student, teacher, Retokenizer(teacher_tokenizer, teacher, encoder), student_columns, teacher_columns
    )


def _project(
    student: Vocabulary, teacher: Vocabulary, retokenizer: Retokenizer, student_columns: int, teacher_columns: int
) -> Projection:
    _fits("student", student, student_columns)
    _fits("teacher", teacher, teacher_columns)
    common = common_vocabulary(student, teacher)
    stops = _stops(student, teacher)
    rows = _exact_rows(student, teacher, common, retokenizer.ids)
    exact_rows = len(rows)
    split = [number for number in np.flatnonzero(student.lengths).tolist() if number not in rows]
    for number, pieces in zip(split, retokenizer.pieces([student.token_bytes(number) for number in split])):
        if pieces:
            rows[number] = _weights(pieces)
    return Projection(
        *_compressed(rows, student_columns),
        num_teacher=teacher_columns,
        student_common=common[0],
        teacher_common=common[1],
        student_hash=student.hash,
        teacher_hash=teacher.hash,
        exact_rows=exact_rows,
        student_stops=np.array(stops[0], np.int32),
        teacher_stops=np.array(stops[1], np.int32),
    )


def cached_projection(
    folder: str | Path,
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    *,
    student_columns: int,
    teacher_columns: int,
    student_stops: Sequence[int] = (),
    teacher_stops: Sequence[int] = (),
) -> Path:
    """The file in `folder` that holds this pair's W, built if it is not there, damaged, or made for other stop tokens.

    Several processes may ask at once: each that finds no file builds the same bytes and renames them into place.

    Raises:
        ValueError: as `build_projection`.
    """
    student = read_vocabulary(student_tokenizer, Encoder(student_tokenizer), student_stops)
    encoder = Encoder(teacher_tokenizer)
    teacher = read_vocabulary(teacher_tokenizer, encoder, teacher_stops)
    name = f"projection-{student.hash[:16]}-{teacher.hash[:16]}-{student_columns}x{teacher_columns}.safetensors"
    path = Path(folder) / name
    if not path.exists() or not _holds(path, student, teacher, student_columns, teacher_columns):
        retokenizer = Retokenizer(teacher_tokenizer, teacher, encoder)
        save_projection(_project(student, teacher, retokenizer, student_columns, teacher_columns), path)
    return path


def _holds(path: Path, student: Vocabulary, teacher: Vocabulary, student_columns: int, teacher_columns: int) -> bool:
    try:
        found = load_projection(
            path,
            student_hash=student.hash,
            teacher_hash=teacher.hash,
            student_columns=student_columns,
            teacher_columns=teacher_columns,
        )
    except ValueError as error:
        log.warning("%s; it is built anew", error)
        return False
    return (tuple(found.student_stops), tuple(found.teacher_stops)) == _stops(student, teacher)


def _stops(student: Vocabulary, teacher: Vocabulary) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both sides' stop tokens; none of two copies of one tokenizer, where every token has its own counterpart."""
    return ((), ()) if student.hash == teacher.hash else (student.stops, teacher.stops)


def _fits(side: str, vocabulary: Vocabulary, columns: int) -> None:
    if columns < vocabulary.size:
        raise ValueError(
            f"the {side} model must have a column for every id of its tokenizer: config.vocab_size is {columns}, "
            f"the tokenizer has {vocabulary.size}; use the tokenizer that came with the model, or resize its embeddings"
        )


def _exact_rows(
    student: Vocabulary, teacher: Vocabulary, common: tuple[np.ndarray, np.ndarray], teacher_ids: dict[bytes, int]
) -> dict[int, dict[int, float]]:
    """Rows of one 1. Several student ids of the same bytes, or role, all get the teacher's one id."""
    rows = {left: {right: 1.0} for left, right in zip(*(side.tolist() for side in common))}
    for number in np.flatnonzero(student.lengths).tolist():
        found = teacher_ids.get(student.token_bytes(number))
        if found is not None:
            rows.setdefault(number, {found: 1.0})
    for role, partners in PAIRED_ROLES.items():
        found = next((teacher.roles[partner] for partner in partners if partner in teacher.roles), None)
        if role in student.roles and found is not None:
            rows.setdefault(student.roles[role], {found: 1.0})
    return rows


def _weights(pieces: list[int]) -> dict[int, float]:
    weights = [FIRST_WEIGHT * DECAY**place for place in range(min(len(pieces), MAX_PIECES))]
    total = sum(weights)
    row: dict[int, float] = {}
    for piece, weight in zip(pieces, weights):
        row[piece] = row.get(piece, 0.0) + weight / total
    return row


def _compressed(rows: dict[int, dict[int, float]], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CSR (indptr int64 [count + 1], indices int32, values float32), columns ascending in every row."""
    lengths = np.zeros(count, np.int64)
    for number, row in rows.items():
        lengths[number] = len(row)
    ordered = [sorted(rows[number].items()) for number in sorted(rows)]
    entries = [entry for row in ordered for entry in row]
    indices = np.fromiter((column for column, _ in entries), np.int32, len(entries))
    values = np.fromiter((value for _, value in entries), np.float32, len(entries))
    return np.concatenate(([0], np.cumsum(lengths))), indices, values
