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

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from distill_rl.align.dp.problem import fold_of
from distill_rl.align.vocabulary import TextEncoder, Vocabulary, byte_of_letter, common_vocabulary, read_vocabulary
from distill_rl.system.files import write_atomic

# The file format of W: safetensors with a JSON header, written atomically and fully checked when read.

FORMAT = 1
HEADER = "distill_rl.projection"
_ARRAYS = {
    "indptr": np.int64,
    "indices": np.int32,
    "values": np.float32,
    "student_common": np.int32,
    "teacher_common": np.int32,
}
_OPTIONAL = {"student_stops": np.int32, "teacher_stops": np.int32}
"""Arrays that files of earlier versions do not have"""
_REMEDY = "delete the file, it is then built again"


@dataclass(frozen=True, eq=False)
class Projection:
    """The sparse row-stochastic W, student → teacher, and the ids that the two vocabularies have in common.

    V_s = len(indptr) − 1 and V_t = num_teacher are the models' `config.vocab_size`. Ids without a token are empty rows
    and columns.
    """

    indptr: np.ndarray
    """int64 [V_s + 1]: row i has the entries indptr[i] to indptr[i + 1]"""
    indices: np.ndarray
    """int32 [nnz]: teacher ids, ascending within a row"""
    values: np.ndarray
    """float32 [nnz]: positive; every row that is not empty sums to 1"""
    num_teacher: int
    student_common: np.ndarray
    """int32 [n]: the common vocabulary; the i-th id corresponds to the i-th of `teacher_common`"""
    teacher_common: np.ndarray
    """int32 [n]"""
    student_hash: str
    teacher_hash: str
    exact_rows: int = 0
    """Number of rows with a teacher token of equal bytes or equal role"""
    student_stops: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [m]: tokens that may end the student's answers. If a side has none, stop tokens are compared like other tokens"""
    teacher_stops: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [m]"""

    @property
    def num_student(self) -> int:
        return len(self.indptr) - 1

    @property
    def empty_rows(self) -> int:
        return int((np.diff(self.indptr) == 0).sum())

    @property
    def split_rows(self) -> int:
        """Number of rows that are neither exact nor empty: tokens spelled in pieces of the teacher's tokenizer."""
        return self.num_student - self.exact_rows - self.empty_rows


def save_projection(projection: Projection, path: str | Path) -> None:
    """Writes W to a safetensors file, atomically and durably; creates its folder, and replaces an existing file.

    Equal W gives equal bytes. Nothing is checked.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors.numpy import save

    header = {
        "format": FORMAT,
        "student_hash": projection.student_hash,
        "teacher_hash": projection.teacher_hash,
        "student_columns": projection.num_student,
        "teacher_columns": projection.num_teacher,
        "exact_rows": projection.exact_rows,
        "split_rows": projection.split_rows,
        "empty_rows": projection.empty_rows,
    }
    types = _ARRAYS | _OPTIONAL
    arrays = {name: np.ascontiguousarray(getattr(projection, name), dtype) for name, dtype in types.items()}
    # A single metadata entry: the order of several differs between processes.
    write_atomic(path, save(arrays, {HEADER: json.dumps(header, sort_keys=True)}))


def load_projection(
    path: str | Path,
    *,
    student_hash: str | None = None,
    teacher_hash: str | None = None,
    student_columns: int | None = None,
    teacher_columns: int | None = None,
) -> Projection:
    """Reads and checks a file written by `save_projection`.

    Args:
        student_hash, teacher_hash: `Vocabulary.hash` of the tokenizers that W must be for; None: any.
        student_columns, teacher_columns: the models' `config.vocab_size`; None: any.
    Raises:
        ValueError: a missing file or one of another kind; a projection for another pair or other sizes; an array of the
            wrong dtype or length; an id out of range; a weight that is not positive and finite; a row that does not sum
            to 1; a common vocabulary that is not one to one.
    """
    header, arrays = _read(Path(path))
    expected = {
        "format": FORMAT,
        "student_hash": student_hash,
        "teacher_hash": teacher_hash,
        "student_columns": student_columns,
        "teacher_columns": teacher_columns,
    }
    for key, value in expected.items():
        if value is not None and header.get(key) != value:
            rule = f"the projection must be this pair's, with {key} {value}; the file has {header.get(key)!r}"
            raise ValueError(f"{path}: {rule}; give this pair's file, or none to have it built")
    try:
        projection = Projection(
            **arrays,
            num_teacher=int(header["teacher_columns"]),
            student_hash=str(header["student_hash"]),
            teacher_hash=str(header["teacher_hash"]),
            exact_rows=int(header["exact_rows"]),
        )
        rows = int(header["student_columns"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: the header must hold sizes, hashes and counts; it is {header}; {_REMEDY}") from None
    problem = _first_problem(projection, rows)
    if problem:
        raise ValueError(f"{path}: {problem}; {_REMEDY}")
    return projection


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The JSON header and the arrays of a file, by name; only the file's form is checked, not what the arrays hold."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            header = json.loads((file.metadata() or {})[HEADER])
            names = [*_ARRAYS, *(_OPTIONAL.keys() & file.keys())]
            arrays = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else "it is damaged or of another kind"
        rule = "a projection must be a safetensors file that distill_rl wrote"
        raise ValueError(f"{path}: {rule}; {reason}; {_REMEDY}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header of a projection must be a table; it is {header!r}; {_REMEDY}")
    return header, arrays


def _first_problem(projection: Projection, rows: int) -> str | None:
    """The first rule that the arrays break, with the value that breaks it, as part of an error message; None if none."""
    for name, dtype in (_ARRAYS | _OPTIONAL).items():
        array = getattr(projection, name)
        if array.dtype != dtype or array.ndim != 1:
            return f"{name} must be {np.dtype(dtype)} [n]; it is {array.dtype} {list(array.shape)}"
    indptr, indices, values = projection.indptr, projection.indices, projection.values
    if len(indptr) != rows + 1 or indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
        return f"indptr must rise from 0 to {len(indices)} in {rows + 1} steps; it has {len(indptr)}"
    if len(values) != len(indices):
        return f"there must be one value per index; there are {len(values)} values and {len(indices)} indices"
    for name, ids, size in (
        ("indices", indices, projection.num_teacher),
        ("student_common", projection.student_common, rows),
        ("teacher_common", projection.teacher_common, projection.num_teacher),
        ("student_stops", projection.student_stops, rows),
        ("teacher_stops", projection.teacher_stops, projection.num_teacher),
    ):
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            return f"{name} must lie in 0 … {size - 1}; they range from {ids.min()} to {ids.max()}"
    row_of = np.repeat(np.arange(rows), np.diff(indptr))
    if ((np.diff(row_of) == 0) & (np.diff(indices) <= 0)).any():
        return "indices must ascend in every row; they do not"
    bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if len(bad):
        return f"values must be finite and above 0; entry {bad[0]} is {values[bad[0]]}"
    sums = np.bincount(row_of, weights=values, minlength=rows)
    bad = np.flatnonzero((np.diff(indptr) > 0) & (np.abs(sums - 1) > 1e-5))
    if len(bad):
        return f"every row must sum to 1; row {bad[0]} sums to {sums[bad[0]]:.6g}"
    common = projection.student_common, projection.teacher_common
    if len(common[0]) != len(common[1]) or any(len(np.unique(ids)) != len(ids) for ids in common):
        return f"the common vocabulary must be one to one; it has {len(common[0])} student and {len(common[1])} teacher ids"
    return None


# Splits one tokenizer's tokens, given as byte strings, into the tokens of another tokenizer.

BATCH = 4096
"""Byte strings per call of the tokenizer"""


class Retokenizer:
    """Spells the bytes of another tokenizer's token in this tokenizer's ids, independent of the text around it.

    The first of these ways that works is used; all but the third spell exactly the given bytes:

    1. The tokenizer's encoding of the bytes, if they are UTF-8.
    2. The encoding by its model alone, without normaliser and pre-tokeniser, of the bytes in the model's alphabet (a
       letter per byte, or ▁ for a space). Unlike 1 it puts no dummy space before a piece from the middle of a word, and
       it splits parts of characters by the merges of a byte-level BPE.
    3. For a lossy tokenizer, its encoding of the bytes if that differs only by what the tokenizer changes (the
       canonical folds) and by outer spaces.
    4. Greedily, the longest token that the remaining bytes begin with (byte-fallback pieces for parts of characters).

    Args:
        vocabulary, encoder: of the tokenizer to spell with.
    """

    def __init__(self, vocabulary: Vocabulary, encoder: TextEncoder) -> None:
        self._encoder, self._model = encoder, encoder.backend.model
        self._fold = fold_of([vocabulary]) if vocabulary.normalization == "lossy" else None
        self._bytes = vocabulary.spellings()
        self.ids = vocabulary.ids_by_bytes()
        self._longest = max(map(len, self.ids), default=0)
        letters = byte_of_letter() if encoder.description.byte_level else {}
        self._letters = {byte: chr(letter) for letter, byte in letters.items()}
        self._space = encoder.description.metaspace or " "

    def pieces(self, spellings: list[bytes]) -> Iterator[list[int]]:
        """Yields this tokenizer's ids of each byte string, in order; an empty list if it cannot spell one.
        Deterministic.

        The four ways of the class are tried for each. Strings are encoded in batches of `BATCH`.
        """
        for begin in range(0, len(spellings), BATCH):
            batch = spellings[begin : begin + BATCH]
            texts = [_text(spelling) for spelling in batch]
            encoded = iter(self._encoder.batch([text for text in texts if text is not None]))
            for spelling, text in zip(batch, texts):
                ids = [] if text is None else [token for token in next(encoded).tolist() if self._bytes[token]]
                yield self._ids_of(spelling, text, ids)

    def _ids_of(self, spelling: bytes, text: str | None, encoded: list[int]) -> list[int]:
        """The ids of one byte string, by the first of the class's four ways that works; [] if none does."""
        if self._spell(encoded) == spelling:
            return encoded
        by_model = self._by_model(spelling, text)
        if self._spell(by_model) == spelling:
            return by_model
        if self._fold is not None and text is not None:
            folded = self._fold(text).strip()
            if folded and folded == self._fold(self._spell(encoded).decode(errors="replace")).strip():
                return encoded
        return self._greedy(spelling)

    def _spell(self, ids: list[int]) -> bytes:
        return b"".join(self._bytes[token] for token in ids)

    def _by_model(self, spelling: bytes, text: str | None) -> list[int]:
        """The ids that the tokenizer's model alone makes of the bytes, without normaliser and pre-tokeniser."""
        # [] if the model cannot take them: bytes that are not UTF-8 without a byte map, or text that it has no piece
        # for. Whether the ids spell the bytes is for the caller to check.
        if self._letters:
            model_input = "".join(self._letters[byte] for byte in spelling)
        elif text is not None:
            model_input = text.replace(" ", self._space)
        else:
            return []
        try:
            return [token.id for token in self._model.tokenize(model_input)]
        except Exception:  # a model without an unknown token raises for text that it has no pieces for
            return []

    def _greedy(self, spelling: bytes) -> list[int]:
        """The ids found by repeatedly taking the longest token that the remaining bytes begin with."""
        # [] if no token fits at some point.
        ids, done = [], 0
        while done < len(spelling):
            sizes = range(min(self._longest, len(spelling) - done), 0, -1)
            size = next((size for size in sizes if spelling[done : done + size] in self.ids), 0)
            if size == 0:
                return []
            ids.append(self.ids[spelling[done : done + size]])
            done += size
        return ids


def _text(spelling: bytes) -> str | None:
    """The decoded bytes; None if they are not UTF-8."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return None


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
    student = read_vocabulary(student_tokenizer, TextEncoder(student_tokenizer), student_stops)
    encoder = TextEncoder(teacher_tokenizer)
    teacher = read_vocabulary(teacher_tokenizer, encoder, teacher_stops)
    return _project(student, teacher, encoder, student_columns, teacher_columns)


def _project(
    student: Vocabulary, teacher: Vocabulary, encoder: TextEncoder, student_columns: int, teacher_columns: int
) -> Projection:
    """W and the common vocabulary of two vocabularies that are read; `encoder` is the teacher's."""
    _check_columns("student", student, student_columns)
    _check_columns("teacher", teacher, teacher_columns)
    student_common, teacher_common = common_vocabulary(student, teacher)
    stops, retokenizer = _stops(student, teacher), Retokenizer(teacher, encoder)
    rows = _exact_rows(student, teacher, (student_common, teacher_common), retokenizer.ids)
    exact_rows = len(rows)
    split = [token for token in np.flatnonzero(student.lengths).tolist() if token not in rows]
    for i, pieces in enumerate(retokenizer.pieces([student.token_bytes(token) for token in split])):
        if pieces:
            rows[split[i]] = _weights(pieces)
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
    student = read_vocabulary(student_tokenizer, TextEncoder(student_tokenizer), student_stops)
    encoder = TextEncoder(teacher_tokenizer)
    teacher = read_vocabulary(teacher_tokenizer, encoder, teacher_stops)
    name = f"projection-{student.hash[:16]}-{teacher.hash[:16]}-{student_columns}x{teacher_columns}.safetensors"
    path = Path(folder) / name
    columns = {"student_columns": student_columns, "teacher_columns": teacher_columns}
    try:
        stored = load_projection(path, student_hash=student.hash, teacher_hash=teacher.hash, **columns)
        if (tuple(stored.student_stops), tuple(stored.teacher_stops)) == _stops(student, teacher):
            return path
    except ValueError as error:
        if path.exists():
            log.warning("%s; building it again", error)
    save_projection(_project(student, teacher, encoder, **columns), path)
    return path


def _stops(student: Vocabulary, teacher: Vocabulary) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ((), ()) if student.hash == teacher.hash else (student.stops, teacher.stops)


def _check_columns(side: str, vocabulary: Vocabulary, columns: int) -> None:
    """Raises ValueError if a model has fewer columns than its tokenizer has ids."""
    if columns < vocabulary.size:
        sizes = f"config.vocab_size is {columns}, the tokenizer has {vocabulary.size}"
        remedy = "use the tokenizer that came with the model, or resize its embeddings"
        raise ValueError(f"the {side} model must have a column for every id of its tokenizer: {sizes}; {remedy}")


def _exact_rows(
    student: Vocabulary, teacher: Vocabulary, common: tuple[np.ndarray, np.ndarray], teacher_ids: dict[bytes, int]
) -> dict[int, dict[int, float]]:
    """Student id → {teacher id: 1.0}, for student tokens that have exactly one counterpart."""
    # That is a pair of the common vocabulary, a teacher token of equal bytes or one of equal role.
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
    """Teacher id → weight, for a student token that the teacher spells in these pieces."""
    # The first `MAX_PIECES` get weights that decrease tenfold from piece to piece and sum to 1; repeated pieces add
    # up.
    weights = [FIRST_WEIGHT * DECAY**i for i in range(min(len(pieces), MAX_PIECES))]
    total = sum(weights)
    row: dict[int, float] = {}
    for piece, weight in zip(pieces, weights):
        row[piece] = row.get(piece, 0.0) + weight / total
    return row


def _to_csr(rows: dict[int, dict[int, float]], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The sparse matrix of these rows in CSR form, with ascending columns in every row."""
    lengths = [len(rows.get(token, ())) for token in range(count)]
    entries = [entry for token in sorted(rows) for entry in sorted(rows[token].items())]
    indices = np.fromiter((column for column, _ in entries), np.int32, len(entries))
    values = np.fromiter((value for _, value in entries), np.float32, len(entries))
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))), indices, values
