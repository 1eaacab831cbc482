"""Results on disk: every judged item at once, the whole at the end; a run that was killed goes on where it stopped.

While a suite runs, its rows are appended to `.<suite>.partial.jsonl`, whose first line says what they belong to. When
all are there, `<suite>.items.jsonl` and then `<suite>.json` appear, each whole, and the partial file goes.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from distill_rl.errors import ConfigError
from distill_rl.evals.results.result import Row
from distill_rl.system.files import write_atomic, write_json

Key = Mapping[str, Any]
"""what decides the rows of a suite: model, data, prompts, backend"""


class Store:
    """The results of one model on one suite; without a folder they are kept in memory alone.

    Args:
        folder: of the model's results.
        key: rows of another key are refused.
        clean: what is there is deleted first.
        replace_others: so is what is there with another key.

    Raises:
        ConfigError: the folder holds results of this suite with another key.
    """

    def __init__(self, folder: Path | None, suite: str, key: Key, *, clean: bool = False, replace_others: bool = False):
        self.suite, self.key = suite, dict(key)
        self.rows: dict[str, Row] = {}
        self.device: str | None = None
        """kind of device that the rows were made on"""
        self.result: dict[str, Any] | None = None
        """of a run that was finished earlier"""
        self._folder = folder
        self._file: BinaryIO | None = None
        if folder is None:
            return
        self._items, self._json = folder / f"{suite}.items.jsonl", folder / f"{suite}.json"
        self._partial = folder / f".{suite}.partial.jsonl"
        if clean:
            self._delete()
        try:
            self._find()
        except ConfigError:
            if not replace_others:
                raise
            self._delete()

    def _delete(self) -> None:
        for path in (self._json, self._items, self._partial):
            path.unlink(missing_ok=True)

    def _find(self) -> None:
        result = _read_json(self._json)
        if result is not None:
            self._require_same(result, self._json)
            self.rows = _by_id(_read_rows(self._items))
            if len(self.rows) == result.get("num_items"):
                self.result = result
                self._partial.unlink(missing_ok=True)
                return
            self.rows = {}  # somebody took the items away
        lines = [*_read_rows(self._partial)]
        if lines:
            self._require_same(lines[0], self._partial)
            self.device = lines[0].get("device")
            self.rows = _by_id(lines[1:])

    def set_device(self, device: str) -> None:
        """Notes what the model runs on, before the first row.

        Raises:
            ConfigError: the rows that are there were made on another kind of device.
        """
        if self.rows and self.device not in (None, device):
            raise ConfigError(
                str(self._partial),
                "was begun on another kind of device, where the same dtype need not be used",
                f"{self.device}; now {device}",
                "go on there, set --dtype, or throw it away with --clean",
            )
        self.device = device

    def append(self, rows: Sequence[Row]) -> None:
        """Adds judged items; they are on disk when this returns."""
        new = {row["id"]: row for row in rows if row["id"] not in self.rows}
        if self._folder is not None and new:
            self._file = self._file or self._open()
            self._file.write(b"".join(map(_line, new.values())))
            self._file.flush()
            os.fsync(self._file.fileno())
        self.rows |= new

    def finish(self, order: Iterable[str], result: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the rows in `order` and then the result; returns the result."""
        self.result = {**self.key, **result}
        if self._folder is not None:
            write_atomic(self._items, b"".join(_line(self.rows[name]) for name in order))
            write_json(self._json, self.result)
            self.close()
            self._partial.unlink(missing_ok=True)
        return self.result

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        """Writes what is held anew, so that a half-written last line is gone, and goes on from there."""
        header = self.key | {"device": self.device}
        write_atomic(self._partial, b"".join(map(_line, (header, *self.rows.values()))))
        return self._partial.open("ab")

    def _require_same(self, found: Mapping[str, Any], path: Path) -> None:
        different = [name for name, value in self.key.items() if name not in found or found[name] != value]
        if different:
            was = ", ".join(f"{name} {found.get(name)}" for name in different)
            now = ", ".join(f"{name} {self.key[name]}" for name in different)
            raise ConfigError(
                str(path),
                "holds results of another evaluation",
                f"{was}; now {now}"[:400],
                "choose another --out, or throw them away with --clean",
            )


@contextmanager
def locked(folders: Iterable[Path]) -> Iterator[None]:
    """While entered no other process writes results there.

    Raises:
        ConfigError: another one does, or a folder cannot be made.
    """
    descriptors: list[int] = []
    try:
        for folder in folders:
            descriptors.append(_lock_folder(folder))
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _lock_folder(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(str(folder), "must be a folder that can be written", error.strerror) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(str(folder), "is in use by another evaluation", remedy="wait, or choose another") from error
    return descriptor


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")


def _by_id(rows: Iterable[Mapping[str, Any]]) -> dict[str, Row]:
    """The first of each id; what is no row is left out."""
    found: dict[str, Row] = {}
    for row in rows:
        if isinstance(row.get("id"), str) and isinstance(row.get("outcome"), str):
            found.setdefault(row["id"], dict(row))
    return found


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; a last one that a killed process left half-written is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if isinstance(row, dict):
                yield row


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
