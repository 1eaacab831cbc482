"""The file format of W: safetensors with a JSON header, written atomically and fully checked when read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from distill_rl.system.files import write_atomic

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
            raise ValueError(
                f"{path}: the projection must be this pair's, with {key} {value}; the file has {header.get(key)!r}; "
                "give this pair's file, or none to have it built"
            )
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
    """The JSON header and the arrays of a file, by name; only the file's form is checked, not what the arrays hold.

    Optional arrays that the file does not have are left out.

    Raises:
        ValueError: a missing or damaged file, or one that `save_projection` did not write.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            header = json.loads((file.metadata() or {})[HEADER])
            names = [*_ARRAYS, *(_OPTIONAL.keys() & file.keys())]
            arrays = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else "it is damaged or of another kind"
        raise ValueError(
            f"{path}: a projection must be a safetensors file that distill_rl wrote; {reason}; {_REMEDY}"
        ) from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header of a projection must be a table; it is {header!r}; {_REMEDY}")
    return header, arrays


def _first_problem(projection: Projection, rows: int) -> str | None:
    """The first rule that the arrays break, with the value that breaks it, as part of an error message; None if none.

    Args:
        rows: V_s according to the file's header.
    """
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
