"""Data sources: a read-only sequence of documents over files, Arrow folders or a hub data set."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from distill_rl.config.schema import DataConfig
from distill_rl.data.files import content_hash
from distill_rl.data.layouts import Kind, Layout, choose_layout
from distill_rl.data.loader import random_order
from distill_rl.data.locate import HubError, Part, is_hub_name, locate
from distill_rl.errors import DataError

__all__ = ["HubError", "Source", "is_hub_name", "open_source", "split_validation"]

_VALIDATION_STREAM = 1


class Source:
    """A map-style sequence of documents; cheap to open again in another process.

    `source[i]` is `{"row": row, "text": str}` or `{"row": row, "messages": [{"role": str, "content": str, …}, …]}`, the
    latter with "tools" and "chat_template_kwargs" if the row has them (`Layout.document`). Rows are counted from 0 over
    all files in order, and a part made by `select` keeps these numbers.

    Args:
        parts: the files and folders, each with the columns that are read.
        layout: how their rows become documents.
        paths: the files whose content enters the fingerprint.
    """

    def __init__(self, parts: Sequence[Part], *, layout: Layout, paths: Sequence[Path]):
        self.parts, self.layout, self._paths = tuple(parts), layout, tuple(paths)
        self._ends = np.cumsum([len(part.rows) for part in self.parts], dtype=np.int64)
        self._rows: np.ndarray | None = None
        self._selection = ""

    @property
    def kind(self) -> Kind:
        """text | messages; also the documents' key."""
        return self.layout.kind

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

        def at(column: str) -> str:
            """Words for this row and a column of it."""
            return f"{part.name}, column {column!r}, row {row_in_part}"

        try:
            values = part.rows[row_in_part]
        except UnicodeDecodeError as error:
            found = f"byte 0x{error.object[error.start]:02x} at {error.start}"
            raise DataError(at(self.layout.key), "text is UTF-8", found) from error
        return {"row": row, **self.layout.document(values, at)}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the files' content (`content_hash`), format, column and selection of rows; not over paths."""
        content, layout = content_hash(self._paths), self.layout
        return hashlib.sha256(f"{content}\0{layout.format}\0{layout.key}\0{self._selection}".encode()).hexdigest()

    def select(self, rows: np.ndarray, description: str) -> Source:
        """The part made of `rows`; the files are shared, not copied.

        Args:
            rows: int64 indices into this source, in the order that the part is to have.
            description: enters the fingerprint, so it must determine `rows`.
        """
        chosen = Source(self.parts, layout=self.layout, paths=self._paths)
        chosen._rows = rows if self._rows is None else self._rows[rows]
        chosen._selection = f"{self._selection}\0{description}"
        return chosen


def open_source(data: DataConfig, *, split: Literal["train", "validation"] = "train") -> Source:
    """Opens `data.path`, or `data.validation.path` for split "validation", and finds the columns to read.

    If the data have splits, training reads `data.split`; validation reads "validation" if there is one, otherwise
    `data.split`. With several files, the columns of the first decide between text and messages, and all must have the
    same main column.

    Raises:
        HubError: a hub name that cannot be reached.
        DataError: missing path, no rows, no such column or split, rows that are not text or messages, damaged files.
    """
    setting = "data.path" if split == "train" else "data.validation.path"
    path = data.path if split == "train" else data.validation.path
    if not path:
        raise DataError(setting, "a path or a hub name", "nothing")
    origins = locate(path, (data.split,) if split == "train" else ("validation", data.split), setting)
    layout = choose_layout(origins[0].columns(), data, origins[0].name)
    parts, paths = [], []
    for origin in origins:
        parts.append(origin.open(layout))
        paths += origin.content
    if not sum(len(part.rows) for part in parts):
        raise DataError(setting, "at least one row", f"an empty data set at {path}")
    return Source(parts, layout=layout, paths=paths)


def split_validation(source: Source, data: DataConfig, seed: int) -> tuple[Source, Source | None]:
    """The rows to train on, and the rows to validate on; None for the latter if validation is off.

    Opens `data.validation.path` if it is set. Otherwise holds out the fraction `data.validation.fraction` of the rows,
    at least one and never all; only `seed` decides which. Both parts keep the order of the source. A fraction of 0 or
    less is off.

    Raises:
        DataError: chats to validate on beside texts to train on, or the reverse; a fraction of 1 or more, or fewer than
            two rows to divide; whatever `open_source` raises.
    """
    if data.validation.path:
        validation = open_source(data, split="validation")
        if validation.kind != source.kind:
            names = {"text": "rows of text", "messages": "chats"}
            rule = f"{names[source.kind]}, as data.path has"
            found = f"{names[validation.kind]} in {data.validation.path}"
            raise DataError("data.validation.path", rule, found, "give both in the same form")
        return source, validation
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
