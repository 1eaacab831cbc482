"""Rows of questions from files of any usual form: Parquet, JSON lines, JSON, CSV, Arrow, folders of `datasets`."""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from distill_rl.errors import DataError

T = TypeVar("T")

_HEADINGS = {"question", "problem", "prompt", "input"}
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow")
MAX_PROBLEMS = 20
"""bad rows that are told before reading stops"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file; the keys of `values` are in lower case."""

    file: Path
    number: int
    """from 1; of JSON lines and CSV without a header the line or record in the file"""
    values: Mapping[str, Any]
    problem: str = ""
    """why there are no values"""


def read_rows(path: Path, header: Sequence[str] = ()) -> list[Row]:
    """All rows of a file, or of a folder that `datasets` saved.

    Args:
        header: the columns of a CSV file whose first record does not name them.

    Raises:
        DataError: not readable, damaged, or of no form that is known here.
    """
    try:
        rows = [Row(path, number, _lowered(value), "") if isinstance(value, Mapping) else Row(path, number, {}, value)
                for number, value in _values(path, header)]  # fmt: skip
    except OSError as error:
        raise DataError(str(path), "cannot be read", error.strerror or str(error)) from error
    if not rows:
        raise DataError(str(path), "must hold at least one row")
    return rows


def convert(rows: Iterable[Row], function: Callable[[Row], T]) -> list[T]:
    """`function` of every row; it raises ValueError with the rule that a bad row breaks.

    Raises:
        DataError: the bad rows, one line each with file, number and rule; after MAX_PROBLEMS of them no more is read.
    """
    converted, problems = [], []
    for row in rows:
        try:
            if row.problem:
                raise ValueError(row.problem)
            converted.append(function(row))
        except ValueError as error:
            problems.append(str(DataError(f"{row.file}, row {row.number}", str(error))))
            if len(problems) == MAX_PROBLEMS:
                problems.append(f"{row.file}: stopped after {MAX_PROBLEMS} bad rows")
                break
    if problems:
        raise DataError.many(problems)
    return converted


def require_columns(
    rows: Sequence[Row], kinds: Mapping[str, Sequence[str]], foreign: Mapping[str, Sequence[str]] | None = None
) -> None:
    """
    Args:
        kinds: per kind of column ("answer") the names that it may have.
        foreign: the same for columns that only the data of other suites have.

    Raises:
        DataError: a file without a column of one of the kinds, or with a foreign one, and the columns that it has; one
            line per file and kind.
    """
    columns: dict[Path, dict[str, None]] = {}
    for row in rows:
        columns.setdefault(row.file, {}).update(dict.fromkeys(row.values))
    problems = []
    for file, there in columns.items():
        for kind, names in kinds.items():
            if there and not any(name in there for name in names):
                listed = " or ".join(f"`{name}`" for name in names)
                found = f"the columns {', '.join(there)}"
                problems.append(str(DataError(str(file), f"must have a column with the {kind} ({listed})", found)))
        for kind, names in (foreign or {}).items():
            if any(name in there for name in names):
                rule = f"must have no column with {kind}, as the data of another suite do"
                problems.append(str(DataError(str(file), rule, f"the columns {', '.join(there)}")))
    if problems:
        shown = problems[:MAX_PROBLEMS]
        if len(problems) > MAX_PROBLEMS:
            shown.append(f"and {len(problems) - MAX_PROBLEMS} more files without a column that is needed")
        raise DataError.many(shown)


def value(row: Row, names: Sequence[str]) -> Any:
    """The first of the columns that the row has a value in, be it an empty text if there is no other; None: in none."""
    found = [row.values[name] for name in names if row.values.get(name) is not None]
    return next((one for one in found if one != ""), found[0] if found else None)


def text(row: Row, names: Sequence[str]) -> str:
    """The same, as a text that is not empty.

    Raises:
        ValueError: something else.
    """
    found = value(row, names)
    if not isinstance(found, str) or not found.strip():
        got = "nothing" if found is None else repr(found)[:60]
        raise ValueError(f"`{names[0]}` must be a text that is not empty; got {got}; mend the row, or remove it")
    return checked(found, names[0])


def checked(found: str, name: str) -> str:
    """
    Raises:
        ValueError: JSON can spell halves of surrogate pairs, which are no text.
    """
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"`{name}` must be Unicode text, without lone surrogates") from error
    return found


def content_sha256(contents: Iterable[Sequence[str]], *, exact: bool = False) -> str:
    """SHA-256 of rows of texts, whatever their order.

    Args:
        exact: every character counts; else runs of white space count as one blank, and none at the ends.
    """
    digests = sorted(_digest(texts, exact=exact) for texts in contents)
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


class ContentIds:
    """Names rows by their content, so that they are the same in whatever form and order the rows are stored."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def __call__(self, *texts: str) -> str:
        """12 hexadecimal digits; rows with the same texts get -2, -3, …"""
        name = _digest(texts)[:12]
        self._seen[name] += 1
        return name if self._seen[name] == 1 else f"{name}-{self._seen[name]}"


def _digest(texts: Sequence[str], *, exact: bool = False) -> str:
    counted = [one if exact else " ".join(one.split()) for one in texts]
    return hashlib.sha256(json.dumps(counted).encode()).hexdigest()


def _lowered(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name).strip().lower(): content for name, content in values.items()}


def _values(path: Path, header: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """(number, row or what is wrong with it)"""
    if path.is_dir():
        return enumerate(_saved(path), start=1)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return enumerate(_parquet(path), start=1)
    if suffix == ".arrow":
        return enumerate(_arrow(path), start=1)
    if suffix == ".csv":
        return _csv(path, header)
    if suffix in (".json", ".jsonl"):
        return _json(path)
    raise DataError(str(path), f"must end in {', '.join(SUFFIXES)}, or be a folder written by datasets.save_to_disk")


def _parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error


def _arrow(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    from datasets import Dataset

    try:
        return Dataset.from_file(str(path)).to_list()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error


def _saved(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    from datasets import load_from_disk

    try:
        return load_from_disk(str(path)).to_list()
    except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error


def _csv(path: Path, header: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    names: Sequence[str] = ()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, cells in enumerate(csv.reader(file), start=1):
                if not cells:
                    continue
                if not names:
                    lowered = [cell.strip().lower() for cell in cells]
                    names = lowered if not header or _HEADINGS & set(lowered) else header
                    if names is lowered:
                        continue
                if len(cells) == len(names):
                    yield number, dict(zip(names, cells))
                else:
                    yield number, f"must have {len(names)} cells ({', '.join(names)}), has {len(cells)}"
    except (csv.Error, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error


def _json(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """JSON lines; or, of a .json file, a list of objects or a single object."""
    content = path.read_bytes()
    whole = _parse(content) if path.suffix.lower() == ".json" else ""
    if isinstance(whole, Mapping):
        yield 1, whole
        return
    if isinstance(whole, list):
        for number, row in enumerate(whole, start=1):
            yield number, row if isinstance(row, Mapping) else "must be an object with the columns as its keys"
        return
    if whole and content.lstrip().startswith(b"["):
        raise DataError(str(path), "must be valid JSON", "a list that is not", "it may be cut off; copy it again")
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            row = _parse(line)
            problem = row if isinstance(row, str) else "must be one JSON object per line"
            yield number, row if isinstance(row, Mapping) else problem


def _parse(content: bytes) -> Mapping[str, Any] | list[Any] | str:
    """An object or a list, or what is wrong."""
    try:
        parsed = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "must be UTF-8"
    except (ValueError, RecursionError):
        return "must be one JSON object per line"
    return parsed if isinstance(parsed, Mapping | list) else "must be one JSON object per line"


def _damaged(path: Path, error: Exception) -> DataError:
    kind = path.suffix[1:] or "folder"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return DataError(str(path), f"must be a readable, complete {kind}", reason, "it may be cut off; copy it again")
