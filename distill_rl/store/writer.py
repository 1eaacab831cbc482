"""Writes targets to a store, a shard at a time."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from distill_rl.errors import StoreError
from distill_rl.store.formats import encoded
from distill_rl.store.manifest import SHARDS
from distill_rl.store.shard import SUFFIX, Column, Record, Shard, serialize
from distill_rl.store.store import Store
from distill_rl.system.files import sync
from distill_rl.types import PieceRef

SHARD_BYTES = 64 * 2**20
"""Targets of a shard, before they are compressed."""


class StoreWriter:
    """Collects pieces with their targets and writes them as shards, each of which appears complete or not at all.

    A shard is written when 64 MiB have come together, or `write_every_s` seconds after the last one. What was not
    written yet is lost with the process. Several writers, also of several machines, may fill one store.

    Args:
        store: takes in what was written.
        write_every_s: seconds of work that a kill may cost.
    """

    def __init__(self, store: Store, *, write_every_s: float):
        self.store, self._every_s = store, write_every_s
        self._records: list[Record] = []
        self._waiting: dict[tuple[bytes, int, int], list[np.ndarray]] = {}
        """By name, first token and prefix: the tokens of the pieces that were not written yet."""
        self._num_bytes = 0
        self.bytes_written = 0
        self._written_at = time.monotonic()
        self._prefix = f"{socket.gethostname()[:32]}-{os.getpid()}"
        remove_abandoned(store.folder)

    def add(self, piece: PieceRef, tokens: np.ndarray, targets: Mapping[str, Column]) -> None:
        """Adds a piece, and writes a shard if that is due. The arrays are copied.

        Args:
            tokens: int32 [piece.length]
            targets: the wire format's tensors, [piece.length, …].

        Raises:
            StoreError: a shard cannot be written, for lack of space for example.
        """
        self.copy(piece, tokens, encoded(self.store.manifest, tokens, targets))

    def copy(self, piece: PieceRef, tokens: np.ndarray, columns: Mapping[str, Column]) -> None:
        """As `add`, with columns in the format of the store, such as another store of the same kind has."""
        copies = {name: Column(column.dtype, np.array(column.values)) for name, column in columns.items()}
        record = Record(piece, np.array(tokens, np.int32), copies)
        self._records.append(record)
        key = piece.name, piece.first, piece.prefix
        self._waiting.setdefault(key, []).append(record.tokens)
        self._num_bytes += record.num_bytes
        if self._num_bytes >= SHARD_BYTES:
            self.flush()

    def holds(self, piece: PieceRef, tokens: np.ndarray) -> bool:
        """Whether a piece with these tokens, or a longer one from the same place on, is waiting to be written."""
        waiting = self._waiting.get((piece.name, piece.first, piece.prefix), ())
        return any(np.array_equal(longer[: piece.length], tokens) for longer in waiting)

    def flush_if_due(self) -> None:
        """Writes what is waiting if the last shard was written `write_every_s` seconds ago.

        Raises:
            StoreError: as for `flush`.
        """
        if time.monotonic() - self._written_at >= self._every_s:
            self.flush()

    def flush(self) -> None:
        """Writes all that is waiting, if anything is, and makes it durable.

        Raises:
            StoreError: it cannot be written. Nothing that was written before is harmed.
        """
        self._written_at = time.monotonic()
        if not self._records:
            return
        content = serialize(self._records)
        path = self.store.folder / SHARDS / f"{time.time_ns():016x}-{secrets.token_hex(4)}{SUFFIX}"
        _write(path, content, self._prefix)
        self.bytes_written += len(content)
        self.store.add(Shard(path))
        self._records, self._num_bytes = [], 0
        self._waiting.clear()


def _write(path: Path, content: bytes, owner: str) -> None:
    """Writes a shard under a name that tells its process, flushes it to disk, and renames it.

    Raises:
        StoreError: there is too little space, or the folder cannot be written.
    """
    temporary = path.with_name(f".{owner}.{path.name}")
    try:
        with open(temporary, "xb", opener=_closed) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        rule = f"a shard of {len(content):,} bytes must fit on the disk"
        remedy = "free some space and start the capture again: what was written before is kept"
        raise StoreError(f"{path.parent}", rule, error.strerror or str(error), remedy) from error


def _closed(path: str, flags: int) -> int:
    """Opens a file that others may not write to, even while it is being written: another run may open the store then."""
    return os.open(path, flags, 0o644)


def remove_abandoned(folder: Path) -> None:
    """Removes half-written shards of processes of this machine that have ended."""
    host = socket.gethostname()[:32]
    for path in (folder / SHARDS).glob(f".{host}-*{SUFFIX}"):
        pid = path.name.removeprefix(f".{host}-").partition(".")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            with suppress(OSError):
                path.unlink()
