"""Results on disk, written so that an evaluation that was killed continues where it stopped.

While a suite runs, its graded rows are appended to `.<suite>.partial.jsonl`. The first line of that file is the key:
the settings that the rows belong to. When the suite is complete, `<suite>.items.jsonl` and then `<suite>.json` are
written atomically, and the partial file is deleted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from distill_rl.errors import ConfigError
from distill_rl.evals.results.result import Row
from distill_rl.system.files import lock_file, read_json_lines, write_atomic, write_json

Key = Mapping[str, Any]
"""Everything that determines the rows of a suite: model, data, prompts, backend."""


class Store:
    """The results of one model on one suite.

    Args:
        folder: the folder of the model's results; None: keep them in memory only.
        key: existing rows with another key are refused.
        clean: delete existing results first.
        replace_others: delete existing results with another key instead of refusing them.

    Raises:
        ConfigError: the folder holds results of this suite with another key.
    """

    def __init__(self, folder: Path | None, suite: str, key: Key, *, clean: bool = False, replace_others: bool = False):
        self.suite, self.key = suite, dict(key)
        self.rows: dict[str, Row] = {}
        self.device: str | None = None
        """Kind of device that produced the rows."""
        self.result: dict[str, Any] | None = None
        """The final result, once the suite is complete."""
        self._folder = folder
        self._file: BinaryIO | None = None
        if folder is None:
            return
        self._items, self._json = items_file(folder, suite), folder / f"{suite}.json"
        self._partial = folder / f".{suite}.partial.jsonl"
        if clean:
            self._delete()
        try:
            self._read_earlier_run()
        except ConfigError:
            if not replace_others:
                raise
            self._delete()

    def _delete(self) -> None:
        """Deletes the suite's result, items and partial file, as far as they exist."""
        for path in (self._json, self._items, self._partial):
            path.unlink(missing_ok=True)

    def _read_earlier_run(self) -> None:
        """Takes over a complete result if there is one, otherwise the rows of the partial file, if any.

        A result whose items file lacks rows is ignored. Beside a complete result, a left-over partial file is deleted.

        Raises:
            ConfigError: what is there has another key.
        """
        result = _read_json(self._json)
        if result is not None:
            self._require_same(result, self._json)
            self.rows = _by_id(read_json_lines(self._items))
            if len(self.rows) == result.get("num_items"):
                self.result = result
                self._partial.unlink(missing_ok=True)
                return
            self.rows = {}  # the items file was deleted or damaged: evaluate again
        lines = list(read_json_lines(self._partial))
        if lines:
            self._require_same(lines[0], self._partial)
            self.device = lines[0].get("device")
            self.rows = _by_id(lines[1:])

    def set_device(self, device: str) -> None:
        """Records the kind of device (cuda, cpu) that the model runs on; call it before the first row is appended.

        Raises:
            ConfigError: the existing rows come from another kind of device.
        """
        if self.rows and self.device not in (None, device):
            raise ConfigError(
                str(self._partial),
                "was started on another kind of device, where dtype auto may differ",
                f"{self.device}; now {device}",
                "continue there, set --dtype, or delete it with --clean",
            )
        self.device = device

    def append(self, rows: Sequence[Row]) -> None:
        """Adds graded items; they are on disk when this returns, unless the store has no folder. Ids that are already
        there are ignored."""
        new = {row["id"]: row for row in rows if row["id"] not in self.rows}
        if self._folder is not None and new:
            self._file = self._file or self._open()
            self._file.write(b"".join(map(to_line, new.values())))
            self._file.flush()
            os.fsync(self._file.fileno())
        self.rows |= new

    def finish(self, order: Iterable[str], result: Mapping[str, Any]) -> dict[str, Any]:
        """Completes the suite: writes the rows in the given order of ids and then the result, and deletes the partial
        file.

        Args:
            order: ids of rows that have been added or read.
            result: the fields of the result beside the key.

        Returns:
            Key and result in one, as written; also kept in `result`.
        """
        self.result = {**self.key, **result}
        if self._folder is not None:
            write_atomic(self._items, b"".join(to_line(self.rows[item_id]) for item_id in order))
            write_json(self._json, self.result)
            self.close()
            self._partial.unlink(missing_ok=True)
        return self.result

    def close(self) -> None:
        """Closes the partial file, which stays for the next run; does nothing if it is not open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        """Rewrites the partial file from key, device and rows, which drops a half-written last line, and opens it for
        appending."""
        header = self.key | {"device": self.device}
        write_atomic(self._partial, b"".join(map(to_line, (header, *self.rows.values()))))
        return self._partial.open("ab")

    def _require_same(self, existing: Mapping[str, Any], path: Path) -> None:
        """Checks that stored results have this store's key; further fields in `existing` do not matter.

        Args:
            existing: fields of the stored result, or the first line of the partial file.
            path: where it was read, for the message.

        Raises:
            ConfigError: fields of the key are missing or have other values; the message shows both.
        """
        different = [name for name, value in self.key.items() if name not in existing or existing[name] != value]
        if different:
            was = ", ".join(f"{name} {existing.get(name)}" for name in different)
            now = ", ".join(f"{name} {self.key[name]}" for name in different)
            raise ConfigError(
                str(path),
                "holds results of another evaluation",
                f"{was}; now {now}"[:400],
                "choose another --out, or delete them with --clean",
            )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a result folder against other evaluations for the duration of the block; creates the folder if necessary.
    The file `.lock` remains in it.

    Raises:
        ConfigError: another process holds the lock (this does not wait for it), or the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(str(folder), "must be a folder that can be written", error.strerror) from error
    try:
        if not lock_file(descriptor, folder):
            raise ConfigError(str(folder), "is in use by another evaluation", remedy="wait, or choose another")
        yield
    finally:
        os.close(descriptor)


def items_file(folder: Path, suite: str) -> Path:
    """The file with one row per item of a finished suite, in the folder of a model's results."""
    return folder / f"{suite}.items.jsonl"


def to_line(row: Mapping[str, Any]) -> bytes:
    """A row as one line of JSON in UTF-8; lone surrogates become question marks."""
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")


def _by_id(rows: Iterable[Mapping[str, Any]]) -> dict[str, Row]:
    """Rows by id, the first one where an id repeats; lines without an `id` and an `outcome` are skipped."""
    by_id: dict[str, Row] = {}
    for row in rows:
        if isinstance(row.get("id"), str) and isinstance(row.get("outcome"), str):
            by_id.setdefault(row["id"], dict(row))
    return by_id


def _read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if the file is missing, unreadable or holds anything else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
