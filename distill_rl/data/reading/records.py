"""Files that must be read from the start: JSON, JSON lines, CSV and text, compressed or not → rows, one after another."""

from __future__ import annotations

import csv
import io
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa

from distill_rl.data.reading.layouts import RowLayout, check_strings, check_text
from distill_rl.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
PROBLEM = "distill_rl_problem"
"""Column of converted data that says why a row could not be read; null in a good row."""
AS_JSON = "distill_rl_json"
"""Column of converted data that says, as a JSON list, which columns of the row hold JSON; null if all hold text."""

Record = tuple[str, Callable[[], dict[str, Any]]]
"""A row: its label for error messages, and a function that parses it or raises DataError."""
SampleBy = Literal["line", "document"]
_FIRST_ROWS = 128


def kind_of(path: Path) -> str:
    """The suffix of a file in lower case, without that of its compression: `.jsonl` of `a.JSONL.gz` and of `a.ndjson`."""
    kind = (Path(path.stem) if compression_of(path) else path).suffix.lower()
    return ".jsonl" if kind == ".ndjson" else kind


def compression_of(path: Path) -> str | None:
    """What a file is compressed with, as Arrow names it, by its suffix; None if it is not."""
    return COMPRESSIONS.get(path.suffix.lower())


def open_bytes(path: Path) -> IO[bytes]:
    """A file for reading, decompressed if its suffix says so."""
    compression = compression_of(path)
    if compression is None:
        return path.open("rb")
    stream = pa.input_stream(str(path), compression=compression)
    return io.BufferedReader(stream, 1 << 20)  # type: ignore[arg-type]


def records(path: Path, sample_by: SampleBy = "line") -> Iterator[Record]:
    """Yields the rows of a file, not parsed yet. Blank lines are skipped.

    Only a `.json` file may be one list of objects, which is parsed as a whole.

    Args:
        sample_by: what a row of a text file is.

    Raises:
        DataError: a list that is no valid JSON; a CSV file whose header or quotes are wrong.
        OSError, pyarrow.ArrowException: a damaged file.
    """
    kind = kind_of(path)
    with open_bytes(path) as file:
        if kind == ".csv":
            yield from _csv_records(path, file)
        elif kind == ".txt" and sample_by == "document":
            text = file.read()
            if text.strip():
                yield "row 0", partial(text_row, without_mark(text), f"{path}: row 0")
        elif kind == ".json" and _is_list(file):
            for i, row in enumerate(_parse(file.read(), f"{path}: the JSON list")):
                yield f"row {i}", partial(_object, row, f"{path}: row {i}")
        else:
            parse = text_row if kind == ".txt" else json_row
            i = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    line = without_mark(line) if number == 1 else line
                    label = f"row {i} (line {number})"
                    yield label, partial(parse, line, f"{path}: {label}")
                    i += 1


def is_json_list(path: Path) -> bool:
    """Whether a file is one JSON list, not JSON lines."""
    if kind_of(path) != ".json":
        return False
    with open_bytes(path) as file:
        return _is_list(file)


def _is_list(file: Any) -> bool:
    """Whether a file at its start begins with a list; does not move it."""
    return bool(file.peek(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["))


def first_columns(path: Path, sample_by: SampleBy, *, strict: bool = True) -> list[str] | None:
    """The columns of the first row, or None for a file without rows.

    Args:
        strict: False: those of the first rows together, without the ones that cannot be parsed.

    Raises:
        DataError: the row cannot be parsed; with `strict` False, none of the first rows can.
        OSError, pyarrow.ArrowException: a damaged file.
    """
    found: dict[str, None] = {}
    problem = None
    for _, parse in islice(records(path, sample_by), 1 if strict else _FIRST_ROWS):
        try:
            found |= dict.fromkeys(parse())
        except DataError as error:
            problem = problem or error
    if not found and problem is not None:
        raise problem
    return list(found) or None


def stored_columns(layout: RowLayout, *, strict: bool) -> list[str]:
    """The columns of what `documents` yields."""
    return [*layout.names, AS_JSON] if strict else [*layout.names, AS_JSON, PROBLEM]


def stored_row(row: dict[str, Any]) -> dict[str, Any]:
    """The values of a row of `documents`, as they were in the file. Raises the DataError that PROBLEM holds."""
    if problem := row.pop(PROBLEM, None):
        raise DataError(problem)
    names = row.pop(AS_JSON)
    for name in json.loads(names) if names else ():
        row[name] = json.loads(row[name])
    return row


def documents(path: Path, layout: RowLayout, sample_by: SampleBy, *, strict: bool) -> Iterator[dict[str, str | None]]:
    """Yields the columns of a file, row by row: text as it is, anything else as its JSON text (AS_JSON).

    So a column can hold objects of different shapes, such as the arguments of different tools.

    Args:
        strict: raise for the first bad row; otherwise a bad row has its reason in PROBLEM.

    Raises:
        DataError: with `strict`, a row that is not an object, lacks a column, or does not fit the layout.
    """
    for label, parse in records(path, sample_by):
        what = f"{path}: {label}"
        values: dict[str, str | None] = {}
        problem = None
        try:
            row = with_columns(parse(), layout, what)
            layout.document(row, lambda column, what=what: f"{what}, column {column!r}")  # type: ignore[misc]
            values = {name: _as_text(row[name], f"{what}, column {name!r}") for name in layout.names if name in row}
            others = [name for name in values if not isinstance(row[name], str | None)]
            values[AS_JSON] = json.dumps(others) if others else None
        except (DataError, RecursionError) as error:
            bad = error if isinstance(error, DataError) else DataError(what, "is nested less deeply", "too many levels")
            if strict:
                raise bad from error
            problem = str(bad)
        yield values if strict else {**values, PROBLEM: problem}


def _as_text(value: Any, what: str) -> str | None:
    """Text and null as they are, anything else as its JSON text. Raises DataError for text that is not valid Unicode."""
    if value is None:
        return None
    return check_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), what)


def with_columns(row: dict[str, Any], layout: RowLayout, what: str) -> dict[str, Any]:
    """Returns a row that has the columns that the layout requires. Raises DataError for another one."""
    for key in (*layout.required, *layout.chosen_by):
        if key not in row:
            raise DataError(what, f"has the column {key!r}, like the first row", sorted(row))
    for key in layout.chosen_by:
        check_strings(row[key], f"{what}, column {key!r}")
    return row


def without_mark(text: bytes) -> bytes:
    """The bytes of a file, or of its first line, without a byte-order mark; elsewhere U+FEFF is a character like others."""
    return text.removeprefix(BOM_UTF8)


def text_row(text: bytes, what: str) -> dict[str, Any]:
    """The row `{"text": …}` of a line, or of a whole file, without the line break at its end. Raises DataError unless UTF-8."""
    try:
        return {"text": text.decode().rstrip("\r\n")}
    except UnicodeDecodeError as error:
        raise _not_utf8(what, error) from error


def json_row(line: bytes, what: str) -> dict[str, Any]:
    """The row of a line of JSON. Raises DataError unless it is a JSON object in UTF-8."""
    return _object(_parse(line, what), what)


def _csv_records(path: Path, file: IO[bytes]) -> Iterator[Record]:
    """Yields the rows of a CSV file, by the names in its header; a cell may hold line breaks in quotes."""
    csv.field_size_limit(1 << 30)  # the default, 128 KiB, is shorter than documents
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, strict=True)
    rows = (cells for cells in reader if cells)
    try:
        header = next(rows, [])
        if twice := [name for name, count in Counter(header).items() if count > 1]:
            raise DataError(f"{path}: the header", "names every column once", f"{twice[0]!r} twice", "rename one")
        for i, cells in enumerate(rows):
            label = f"row {i} (to line {reader.line_num})"
            yield label, partial(_csv_row, header, cells, f"{path}: {label}")
    except csv.Error as error:
        remedy = "the file may be truncated, or a quote inside a cell not doubled"
        raise DataError(f"{path}: line {reader.line_num}", "is valid CSV", str(error), remedy) from error


def _csv_row(header: Sequence[str], cells: Sequence[str], what: str) -> dict[str, Any]:
    """The row of the cells of one record. Raises DataError if there are more or fewer than in the header."""
    if len(cells) != len(header):
        remedy = "put cells with commas, quotes or line breaks in quotes"
        raise DataError(what, f"has {len(header)} cells, as the header has", len(cells), remedy)
    return dict(zip(header, cells))


def _parse(text: bytes, what: str) -> Any:
    """The value of a JSON text, with or without a byte-order mark."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf8(what, error) from error
    except (ValueError, RecursionError) as error:
        found = f"{getattr(error, 'msg', str(error))} at character {getattr(error, 'pos', 0)}"
        remedy = "the file may be truncated, or not JSON lines"
        raise DataError(what, "is complete, valid JSON", found, remedy) from error


def _not_utf8(what: str, error: UnicodeDecodeError) -> DataError:
    found = f"byte 0x{error.object[error.start]:02x} at byte {error.start}"
    return DataError(what, "text is UTF-8", found, "convert the file to UTF-8")


def _object(row: Any, what: str) -> dict[str, Any]:
    """Returns a row that is a JSON object. Raises DataError for anything else."""
    if not isinstance(row, dict):
        raise DataError(what, "is a JSON object with the columns as its keys", type(row).__name__)
    return row
