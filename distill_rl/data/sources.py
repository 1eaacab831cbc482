"""Data sources: a read-only sequence of documents over files, Arrow folders or a hub data set."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from distill_rl.config.schema import DataConfig
from distill_rl.data.files import Kind, content_hash
from distill_rl.data.loader import random_order
from distill_rl.data.locate import HubError, Loaded, is_hub_name, locate
from distill_rl.data.rows import check_value
from distill_rl.errors import DataError

__all__ = ["HubError", "Source", "is_hub_name", "open_source", "split_validation"]

_VALIDATION_STREAM = 1


class Source:
    """A map-style sequence of documents; cheap to open again in another process.

    `source[i]` is `{"row": row, "text": str}` or `{"row": row, "messages": [{"role": str, "content": str}, …]}`. Rows
    are counted from 0 over all files in order, and a part made by `select` keeps these numbers.

    Args:
        parts: the files and folders, each with the one column that is read.
        kind: text | messages; also the documents' key.
        key: the name of that column.
        paths: the files whose content enters the fingerprint.
    """

    def __init__(self, parts: Sequence[Loaded], *, kind: Kind, key: str, paths: Sequence[Path]):
        self.parts, self.kind, self.key, self._paths = tuple(parts), kind, key, tuple(paths)
        self._ends = np.cumsum([len(part.dataset) for part in self.parts], dtype=np.int64)
        self._rows: np.ndarray | None = None
        self._selection = ""

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._rows is None else len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Document `index` of this source, read and checked now; see the class for its form.

        Its "row" is the number in the whole data, which differs from `index` in a part made by `select`.

        Raises:
            IndexError: an index below 0 or past the end.
            DataError: a value that is not text or messages, or not UTF-8; names file and row.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = int(index if self._rows is None else self._rows[index])
        part_index = int(np.searchsorted(self._ends, row, side="right"))
        part = self.parts[part_index]
        row_in_part = row - (int(self._ends[part_index - 1]) if part_index else 0)
        what = f"{part.name}, column {self.key!r}, row {row_in_part}"
        try:
            value = part.dataset[row_in_part][self.key]
        except UnicodeDecodeError as error:
            raise DataError(
                what, "text is UTF-8", f"byte 0x{error.object[error.start]:02x} at {error.start}"
            ) from error
        return {"row": row, self.kind: check_value(value, self.kind, what)}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the files' content (`content_hash`), kind, column and selection of rows; not over paths."""
        content = content_hash(self._paths)
        return hashlib.sha256(f"{content}\0{self.kind}\0{self.key}\0{self._selection}".encode()).hexdigest()

    def select(self, rows: np.ndarray, description: str) -> Source:
        """The part made of `rows`; the files are shared, not copied.

        Args:
            rows: int64 indices into this source, in the order that the part is to have.
            description: enters the fingerprint, so it must determine `rows`.
        """
        chosen = Source(self.parts, kind=self.kind, key=self.key, paths=self._paths)
        chosen._rows = rows if self._rows is None else self._rows[rows]
        chosen._selection = f"{self._selection}\0{description}"
        return chosen


def open_source(data: DataConfig, *, split: Literal["train", "validation"] = "train") -> Source:
    """Opens `data.path`, or `data.validation.path` for split "validation", and finds the column to read.

    If the data have splits, training reads `data.split`; validation reads "validation" if there is one, otherwise
    `data.split`. With several files, the columns of the first decide between text and messages, and all must have that
    column.

    Raises:
        HubError: a hub name that cannot be reached.
        DataError: missing path, no rows, no such column or split, rows that are not text or messages, damaged files.
    """
    setting = "data.path" if split == "train" else "data.validation.path"
    path = data.path if split == "train" else data.validation.path
    if not path:
        raise DataError(setting, "a path or a hub name", "nothing")
    origins = locate(path, (data.split,) if split == "train" else ("validation", data.split), setting)
    kind, key = _choose_column(origins[0].columns(), data)
    parts, paths = [], []
    for origin in origins:
        columns = origin.columns()
        if key not in columns:
            raise _no_column(origin.name, key, columns, kind)
        parts.append(origin.open(key, kind))
        paths += origin.content
    if not sum(len(part.dataset) for part in parts):
        raise DataError(setting, "at least one row", f"an empty data set at {path}")
    return Source(parts, kind=kind, key=key, paths=paths)


def split_validation(source: Source, data: DataConfig, seed: int) -> tuple[Source, Source | None]:
    """The rows to train on, and the rows to validate on; None for the latter if validation is off.

    Opens `data.validation.path` if it is set. Otherwise holds out the fraction `data.validation.fraction` of the rows,
    at least one and never all; only `seed` decides which. Both parts keep the order of the source. A fraction of 0 or
    less is off.

    Raises:
        DataError: a fraction of 1 or more, or fewer than two rows to divide; whatever `open_source` raises.
    """
    if data.validation.path:
        return source, open_source(data, split="validation")
    fraction = data.validation.fraction
    if fraction <= 0:
        return source, None
    if len(source) < 2 or fraction >= 1:
        raise DataError(
            "data.validation.fraction", "a fraction below 1 of at least two rows", f"{fraction} of {len(source)} rows"
        )
    count = min(max(round(fraction * len(source)), 1), len(source) - 1)
    order = random_order(seed, (_VALIDATION_STREAM,), len(source))
    description = f"seed {seed}, {count} rows held out"
    held_out = source.select(np.sort(order[:count]), f"validation: {description}")
    return source.select(np.sort(order[count:]), f"training: {description}"), held_out


def _choose_column(columns: Sequence[str], data: DataConfig) -> tuple[Kind, str]:
    """The kind of document and its column, by `data.format`; "auto" prefers messages if `columns` has such a column."""
    automatic: Kind = "messages" if data.messages_key in columns else "text"
    kind: Kind = automatic if data.format == "auto" else data.format
    return kind, data.messages_key if kind == "messages" else data.text_key


def _no_column(name: str, key: str, columns: Sequence[str], kind: Kind) -> DataError:
    """The error for data without the column `key`, for the caller to raise; hints at the most similar of `columns`."""
    close = difflib.get_close_matches(key, columns, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    setting = "data.messages_key" if kind == "messages" else "data.text_key"
    return DataError(
        f"{name}: column {key!r}", "a column of the data", f"the columns {list(columns)}", f"{hint}set {setting}"
    )
