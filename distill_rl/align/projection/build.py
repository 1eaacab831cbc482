"""The sparse vocabulary projection W [V_s, V_t]: each student token as a distribution over teacher tokens.

W is row-stochastic (X-Token, arXiv 2605.21699). Row s is the first of these that applies:

1. A single 1 at the teacher's token with the same bytes or role or, for special tokens, the same written form
   (`common_vocabulary`). All student ids with the same bytes get the teacher's one id. The roles are bos, eos and
   end_of_turn; a teacher with only one of the last two uses it for both.
2. The first four pieces p₀ … p₃ in which the teacher's tokenizer spells the token's bytes (`Retokenizer`):

       W[s, pᵢ] = 0.9·0.1ⁱ / Σⱼ 0.9·0.1ʲ

   where a piece that occurs more than once gets the sum of its weights.
3. Empty, for a token with neither bytes nor a role, for bytes that the teacher cannot spell, and for ids that only the
   model has (padding of the embedding).

W is built once per pair of tokenizers and kept in a file named after both, from which every worker reads it.
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

log = logging.getLogger(__name__)

MAX_PIECES = 4
FIRST_WEIGHT, DECAY = 0.9, 0.1
# Role of a student token → the teacher's roles that it maps to, in order of preference.
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
    """Computes W and the common vocabulary of two fast tokenizers, by the rules above; writes no file.

    Takes seconds.

    Args:
        student_columns, teacher_columns: V_s and V_t, the models' `config.vocab_size`.
        student_stops, teacher_stops: as for `TokenAligner`.
    Raises:
        ValueError: a slow tokenizer, one without tokens, or one with more ids than its model has columns.
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
    """Computes W and the common vocabulary from two vocabularies.

    Args:
        retokenizer: spells bytes in the teacher's ids.
        student_columns, teacher_columns: V_s and V_t.

    Raises:
        ValueError: a tokenizer with more ids than its model has columns.
    """
    _check_columns("student", student, student_columns)
    _check_columns("teacher", teacher, teacher_columns)
    student_common, teacher_common = common_vocabulary(student, teacher)
    stops = _stops(student, teacher)
    rows = _exact_rows(student, teacher, (student_common, teacher_common), retokenizer.ids)
    exact_rows = len(rows)
    split = [token for token in np.flatnonzero(student.lengths).tolist() if token not in rows]
    for token, pieces in zip(split, retokenizer.pieces([student.token_bytes(token) for token in split])):
        if pieces:
            rows[token] = _weights(pieces)
    indptr, indices, values = _to_csr(rows, student_columns)
    return Projection(
        indptr=indptr,
        indices=indices,
        values=values,
        num_teacher=teacher_columns,
        student_common=student_common,
        teacher_common=teacher_common,
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
    """The path of the file in `folder` with this pair's W, which is built if necessary.

    It is built if the file is missing, damaged (logged as a warning), or for other stop tokens. The folder is created
    if needed. Several processes may call this at once: each that finds no file writes the same bytes and renames them
    into place.

    Args:
        student_columns, teacher_columns, student_stops, teacher_stops: as for `build_projection`.

    Raises:
        ValueError: as for `build_projection`.
        OSError: the file cannot be written.
    """
    student = read_vocabulary(student_tokenizer, Encoder(student_tokenizer), student_stops)
    encoder = Encoder(teacher_tokenizer)
    teacher = read_vocabulary(teacher_tokenizer, encoder, teacher_stops)
    name = f"projection-{student.hash[:16]}-{teacher.hash[:16]}-{student_columns}x{teacher_columns}.safetensors"
    path = Path(folder) / name
    if not path.exists() or not _is_current(path, student, teacher, student_columns, teacher_columns):
        retokenizer = Retokenizer(teacher_tokenizer, teacher, encoder)
        save_projection(_project(student, teacher, retokenizer, student_columns, teacher_columns), path)
    return path


def _is_current(
    path: Path, student: Vocabulary, teacher: Vocabulary, student_columns: int, teacher_columns: int
) -> bool:
    """Whether an existing file holds this pair's W for both sides' present stop tokens.

    A file that is damaged or of another pair is False as well, and its problem is logged as a warning.
    """
    try:
        projection = load_projection(
            path,
            student_hash=student.hash,
            teacher_hash=teacher.hash,
            student_columns=student_columns,
            teacher_columns=teacher_columns,
        )
    except ValueError as error:
        log.warning("%s; building it again", error)
        return False
    return (tuple(projection.student_stops), tuple(projection.teacher_stops)) == _stops(student, teacher)


def _stops(student: Vocabulary, teacher: Vocabulary) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both sides' stop tokens; none for two copies of one tokenizer, in which every token is its own counterpart."""
    return ((), ()) if student.hash == teacher.hash else (student.stops, teacher.stops)


def _check_columns(side: str, vocabulary: Vocabulary, columns: int) -> None:
    """Raises ValueError if a model has fewer columns than its tokenizer has ids.

    Args:
        side: student | teacher, for the message.
    """
    if columns < vocabulary.size:
        raise ValueError(
            f"the {side} model must have a column for every id of its tokenizer: config.vocab_size is {columns}, "
            f"the tokenizer has {vocabulary.size}; use the tokenizer that came with the model, or resize its embeddings"
        )


def _exact_rows(
    student: Vocabulary, teacher: Vocabulary, common: tuple[np.ndarray, np.ndarray], teacher_ids: dict[bytes, int]
) -> dict[int, dict[int, float]]:
    """Student id → {teacher id: 1.0}, for student tokens that have exactly one counterpart.

    That is a pair of the common vocabulary, a teacher token of equal bytes or one of equal role.

    Args:
        common: (student ids, teacher ids) of the common vocabulary, which take precedence.
        teacher_ids: bytes → the teacher's id that spells them.
    """
    rows = {left: {right: 1.0} for left, right in zip(*(side.tolist() for side in common))}
    for token in np.flatnonzero(student.lengths).tolist():
        teacher_id = teacher_ids.get(student.token_bytes(token))
        if teacher_id is not None:
            rows.setdefault(token, {teacher_id: 1.0})
    for role, teacher_roles in PAIRED_ROLES.items():
        teacher_id = next((teacher.roles[name] for name in teacher_roles if name in teacher.roles), None)
        if role in student.roles and teacher_id is not None:
            rows.setdefault(student.roles[role], {teacher_id: 1.0})
    return rows


def _weights(pieces: list[int]) -> dict[int, float]:
    """Teacher id → weight, for a student token that the teacher spells in these pieces.

    The first `MAX_PIECES` get weights that decrease tenfold from piece to piece and sum to 1; repeated pieces add up.
    """
    weights = [FIRST_WEIGHT * DECAY**i for i in range(min(len(pieces), MAX_PIECES))]
    total = sum(weights)
    row: dict[int, float] = {}
    for piece, weight in zip(pieces, weights):
        row[piece] = row.get(piece, 0.0) + weight / total
    return row


def _to_csr(rows: dict[int, dict[int, float]], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The sparse matrix of these rows in CSR form, with ascending columns in every row.

    Args:
        rows: row → {column: value}; other rows are empty.
        count: number of rows of the matrix.
    Returns:
        indptr int64 [count + 1], indices int32 [nnz], values float32 [nnz].
    """
    lengths = np.zeros(count, np.int64)
    for token, row in rows.items():
        lengths[token] = len(row)
    ordered = [sorted(rows[token].items()) for token in sorted(rows)]
    entries = [entry for row in ordered for entry in row]
    indices = np.fromiter((column for column, _ in entries), np.int32, len(entries))
    values = np.fromiter((value for _, value in entries), np.float32, len(entries))
    return np.concatenate(([0], np.cumsum(lengths))), indices, values
