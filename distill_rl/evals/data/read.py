"""Reads rows of questions from Parquet, JSON lines, JSON, CSV and Arrow files, and from folders saved by `datasets`."""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from distill_rl.errors import DataError, first_line

T = TypeVar("T")
Columns = Mapping[str, Sequence[str]]
"""Per kind of column ("answer"), the names that it may have."""

_QUESTION_COLUMNS = {"question", "problem", "prompt", "input"}
"""A first CSV record with one of these names is a header."""
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow")
_LONGEST_CELL = 1 << 30
"""Characters of a cell of CSV; the module's own limit, 128 KiB, is shorter than some documents."""
MAX_PROBLEMS = 20
"""Bad rows that are reported before reading stops."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file."""

    file: Path
    position: int
    """From 1; in JSON lines and CSV files, of its line or record in the file."""
    values: Mapping[str, Any]
    """Values by column; column names are in lower case."""
    problem: str = ""
    """The rule that the row breaks; it then has no values."""


def read_rows(path: Path, header: Sequence[str] = ()) -> list[Row]:
    """Reads all rows of a file, or of a folder that `datasets` saved. Column names become lower case.

    A row that cannot be read, such as an invalid line, is returned with the rule that it breaks (`Row.problem`).

    Args:
        path: its suffix, one of SUFFIXES, gives the format.
        header: the columns of a CSV file whose first record does not name them.

    Raises:
        DataError: an unreadable, damaged or empty file, or an unknown format.
    """
    rows = []
    try:
        for position, content in _contents(path, header):
            if isinstance(content, Mapping):
                rows.append(Row(path, position, {str(name).strip().lower(): value for name, value in content.items()}))
            else:
                rows.append(Row(path, position, {}, problem=content))
    except OSError as error:
        raise DataError(str(path), "cannot be read", error.strerror or str(error)) from error
    if not rows:
        raise DataError(str(path), "must hold at least one row")
    return rows


def convert_rows(rows: Iterable[Row], function: Callable[[Row], T]) -> list[T]:
    """Applies `function` to every row and returns the results in order.

    Args:
        function: raises ValueError with the rule that a bad row breaks.

    Raises:
        DataError: the bad rows, including those with a `problem`, one line each with file, position and rule; stops
            after MAX_PROBLEMS of them.
    """
    converted, problems = [], []
    for row in rows:
        try:
            if row.problem:
                raise ValueError(row.problem)
            converted.append(function(row))
        except ValueError as error:
            problems.append(str(DataError(f"{row.file}, row {row.position}", str(error))))
            if len(problems) == MAX_PROBLEMS:
                problems.append(f"{row.file}: stopped after {MAX_PROBLEMS} bad rows")
                break
    if problems:
        raise DataError.many(problems)
    return converted


def require_columns(rows: Sequence[Row], kinds: Columns, foreign: Columns | None = None) -> None:
    """Checks that every file has the columns of its suite. A file whose rows were all unreadable has none and passes.

    Args:
        kinds: the columns that a file must have, at least one name of each kind.
        foreign: columns that occur only in the data of other suites.

    Raises:
        DataError: a file lacks a kind of column or has a foreign one; one line per file and kind, up to MAX_PROBLEMS.
    """
    columns_of: dict[Path, dict[str, None]] = {}
    for row in rows:
        columns_of.setdefault(row.file, {}).update(dict.fromkeys(row.values))
    problems = []
    for file, columns in columns_of.items():
        listed = f"the columns {', '.join(columns)}"
        for kind, names in kinds.items():
            if columns and not any(name in columns for name in names):
                allowed = " or ".join(f"`{name}`" for name in names)
                problems.append(str(DataError(str(file), f"must have a column with the {kind} ({allowed})", listed)))
        for kind, names in (foreign or {}).items():
            if any(name in columns for name in names):
                rule = f"must have no column with {kind}, which belongs to the data of another suite"
                problems.append(str(DataError(str(file), rule, listed)))
    if problems:
        shown = problems[:MAX_PROBLEMS]
        if len(problems) > MAX_PROBLEMS:
            shown.append(f"and {len(problems) - MAX_PROBLEMS} more files with wrong columns")
        raise DataError.many(shown)


def first_value(row: Row, names: Sequence[str]) -> Any:
    """The first value in the named columns that is neither missing nor empty; else an empty text if one has it; else
    None."""
    values = [row.values[name] for name in names if row.values.get(name) is not None]
    filled = [value for value in values if value != ""]
    return next(iter(filled or values), None)


def required_text(row: Row, names: Sequence[str]) -> str:
    """The first value in the named columns, as `first_value`, which must be non-empty Unicode text; it is not stripped.

    Raises:
        ValueError: it is missing, blank, not text, or holds lone surrogates.
    """
    value = first_value(row, names)
    if not isinstance(value, str) or not value.strip():
        got = "nothing" if value is None else repr(value)[:60]
        raise ValueError(f"`{names[0]}` must be non-empty text; got {got}; correct the row, or remove it")
    return require_unicode(value, names[0])


def require_unicode(text: str, name: str) -> str:
    """Returns the text unchanged if it can be encoded; `name` is its column, for the error.

    Raises:
        ValueError: it holds lone surrogates, which JSON escapes can spell.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"`{name}` must be Unicode text, without lone surrogates") from error
    return text


def content_sha256(contents: Iterable[Sequence[str]], *, exact: bool = False) -> str:
    """SHA-256 of rows of texts as hexadecimal digits, independent of the order of the rows.

    Args:
        exact: hash every character; otherwise runs of white space count as one blank, and white space at the ends is
            ignored.
    """
    digests = sorted(_digest(texts, exact=exact) for texts in contents)
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


class ContentIds:
    """Makes row ids from content, so that they do not depend on file format and row order."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def __call__(self, *texts: str) -> str:
        """The id of the next row: 12 hexadecimal digits made from its texts; repeated rows get the suffixes -2, -3, …

        White space counts as in `content_sha256` without `exact`.
        """
        row_id = _digest(texts)[:12]
        self._seen[row_id] += 1
        return row_id if self._seen[row_id] == 1 else f"{row_id}-{self._seen[row_id]}"


def _digest(texts: Sequence[str], *, exact: bool = False) -> str:
    """SHA-256 of texts in their order, as hexadecimal digits; white space counts as in `content_sha256`."""
    hashed = [text if exact else " ".join(text.split()) for text in texts]
    return hashlib.sha256(json.dumps(hashed).encode()).hexdigest()


def _contents(path: Path, header: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Iterates over the rows of a file, or of a folder that `datasets` saved: (position, the row or the rule that it
    breaks).

    The position counts from 1; in JSON lines and CSV files it is that of the line or record. `header` is for CSV files
    that do not name their columns.

    Raises:
        DataError: an unknown format, or a damaged file (for some formats only during iteration).
    """
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in (".parquet", ".arrow"):
        return enumerate(_table(path, suffix), start=1)
    if suffix == ".csv":
        return _csv(path, header)
    if suffix in (".json", ".jsonl"):
        return _json(path)
    raise DataError(str(path), f"must end in {', '.join(SUFFIXES)}, or be a folder written by datasets.save_to_disk")


def _table(path: Path, suffix: str) -> list[dict[str, Any]]:
    """The rows of a Parquet file, an Arrow file, or a folder that `datasets` saved, as dictionaries by column.

    Args:
        suffix: of `path`, in lower case.

    Raises:
        DataError: the file is damaged, or the folder holds no saved data set.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if suffix == ".parquet" and path.is_file():
            return pq.read_table(path).to_pylist()
        import datasets  # slow to import

        dataset = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.Dataset.from_file(str(path))
        return dataset.to_list()
    except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error


def _csv(path: Path, header: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Yields the rows of a CSV file: (number of the record, the cells by column, or the rule that the record breaks).

    The first record names the columns if `header` is empty or if it holds a usual name of the question's column;
    otherwise `header` does. Empty records are skipped; one with another number of cells than columns is bad.

    Raises:
        DataError: during iteration, the file is no UTF-8 or no CSV.
    """
    names: Sequence[str] = ()
    csv.field_size_limit(_LONGEST_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for position, cells in enumerate(csv.reader(file), start=1):
                if not cells:
                    continue
                if not names:
                    first = [cell.strip().lower() for cell in cells]
                    if not header or _QUESTION_COLUMNS & set(first):
                        names = first
                        continue
                    names = header
                if len(cells) == len(names):
                    yield position, dict(zip(names, cells))
                else:
                    yield position, f"must have {len(names)} cells ({', '.join(names)}), has {len(cells)}"
    except (csv.Error, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error


def _json(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Yields the rows of a JSON file: (position from 1, the object or the rule that the row breaks).

    A .json file may be a list of objects or a single object. Anything else is read as JSON lines; blank lines are
    skipped but count.

    Raises:
        DataError: at the first step, a .json file that begins as a list and is not valid.
    """
    content = path.read_bytes()
    whole = _parse(content) if path.suffix.lower() == ".json" else ""  # text is an error message
    if isinstance(whole, Mapping):
        yield 1, whole
        return
    if isinstance(whole, list):
        for position, row in enumerate(whole, start=1):
            yield position, row if isinstance(row, Mapping) else "must be an object with the columns as its keys"
        return
    if whole and content.lstrip().startswith(b"["):
        raise DataError(str(path), "must be valid JSON", "a list that is not", "it may be cut off; copy it again")
    for position, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            row = _parse(line)
            problem = row if isinstance(row, str) else "must be one JSON object per line"
            yield position, row if isinstance(row, Mapping) else problem


def _parse(content: bytes) -> Mapping[str, Any] | list[Any] | str:
    """Parses bytes as JSON; returns the object or list. If they are not valid JSON in UTF-8, or another JSON value, it
    returns a text instead, the rule that they break."""
    try:
        parsed = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "must be UTF-8"
    except (ValueError, RecursionError):
        return "must be one JSON object per line"
    return parsed if isinstance(parsed, Mapping | list) else "must be one JSON object per line"


def _damaged(path: Path, error: Exception) -> DataError:
    """The error about a file or folder that a reader rejected with `error`, of which the first line is shown."""
    kind = path.suffix[1:] or "folder"
    reason = first_line(error)[:200]
    return DataError(str(path), f"must be a readable, complete {kind}", reason, "it may be cut off; copy it again")
