"""Writes targets to a store, a shard at a time."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
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


@dataclass(slots=True)
class _Draft:
    """What a shard will hold."""

    records: list[Record] = field(default_factory=list)
    encoded: list[bool] = field(default_factory=list)
    """Of every record: whether its columns are in the format of the store."""
    tokens: dict[tuple[bytes, int, int], list[np.ndarray]] = field(default_factory=dict)
    """By name, first token and prefix: the tokens of the pieces."""
    num_bytes: int = 0

    def add(self, record: Record, *, encoded: bool) -> None:
        self.records.append(record)
        self.encoded.append(encoded)
        key = record.piece.name, record.piece.first, record.piece.prefix
        self.tokens.setdefault(key, []).append(record.tokens)
        self.num_bytes += record.num_bytes

    def holds(self, piece: PieceRef, tokens: np.ndarray) -> bool:
        """As of `StoreWriter`."""
        same_place = self.tokens.get((piece.name, piece.first, piece.prefix), ())
        return any(np.array_equal(longer[: piece.length], tokens) for longer in same_place)


class StoreWriter:
    """Collects pieces with their targets and writes them as shards, each of which appears complete or not at all.

    A shard is begun by `flush_if_due` when 64 MiB have come together, or `write_every_s` seconds after the last one; what is
    added between two calls is in one shard. A thread compresses and writes it while the teacher goes on; at most one is
    being written. What was not written yet is lost with the process. Several writers, also of several machines, may
    fill one store.

    Args:
        store: takes in what was written.
        write_every_s: seconds of work that a kill may cost.
    """

    def __init__(self, store: Store, *, write_every_s: float):
        self.store, self._every_s = store, write_every_s
        self._draft = _Draft()
        self._begun: tuple[_Draft, Future[tuple[Path, int]]] | None = None
        """The shard that the thread is writing, which will return its path and size."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-writer")
        self.bytes_written = 0
        self._begun_at = time.monotonic()
        remove_abandoned(store.folder)

    def add(self, piece: PieceRef, tokens: np.ndarray, targets: Mapping[str, Column]) -> None:
        """Adds a piece, which waits to be written. The arrays are copied.

        Args:
            tokens: int32 [piece.length]
            targets: the wire format's tensors, [piece.length, …].
        """
        self._add(piece, tokens, targets, encoded=False)

    def add_encoded(self, piece: PieceRef, tokens: np.ndarray, columns: Mapping[str, Column]) -> None:
        """As `add`, with columns in the format of the store, such as another store of the same kind has."""
        self._add(piece, tokens, columns, encoded=True)

    def _add(self, piece: PieceRef, tokens: np.ndarray, columns: Mapping[str, Column], *, encoded: bool) -> None:
        copies = {name: Column(column.dtype, np.array(column.values)) for name, column in columns.items()}
        self._draft.add(Record(piece, np.array(tokens, np.int32), copies), encoded=encoded)

    def holds(self, piece: PieceRef, tokens: np.ndarray) -> bool:
        """Whether a piece with these tokens, or a longer one from the same place on, is waiting to be written."""
        drafts = [self._draft, *([self._begun[0]] if self._begun is not None else [])]
        return any(draft.holds(piece, tokens) for draft in drafts)

    def flush_if_due(self) -> None:
        """Begins a shard of what is waiting if that is much, or the last one was begun `write_every_s` seconds ago.

        Raises:
            StoreError: as for `flush`, of the shard before.
        """
        if self._begun is not None and self._begun[1].done():
            self._finish()
        if self._draft.num_bytes >= SHARD_BYTES or time.monotonic() - self._begun_at >= self._every_s:
            self._begin()

    def flush(self) -> None:
        """Writes all that is waiting, if anything is, and makes it durable.

        Raises:
            StoreError: it cannot be written, and goes on waiting. Nothing that was written before is harmed.
        """
        self._begin()
        self._finish()

    def _begin(self) -> None:
        """Lets the thread write what is waiting, once the shard before is written."""
        self._finish()
        self._begun_at = time.monotonic()
        if self._draft.records:
            draft, self._draft = self._draft, _Draft()
            self._begun = draft, self._thread.submit(self._write, draft)

    def _finish(self) -> None:
        """Waits for the shard that is being written, if any, and lets the store take it in."""
        if self._begun is None:
            return
        (draft, writing), self._begun = self._begun, None
        try:
            path, num_bytes = writing.result()
        except StoreError:
            for record, encoded in zip(draft.records, draft.encoded):
                self._draft.add(record, encoded=encoded)
            raise
        self.bytes_written += num_bytes
        self.store.add(Shard(path))

    def _write(self, draft: _Draft) -> tuple[Path, int]:
        """Writes a shard, in the thread; returns its path and size."""
        manifest = self.store.manifest
        records = [
            record if done else replace(record, targets=encoded(manifest, record.tokens, record.targets))
            for record, done in zip(draft.records, draft.encoded)
        ]
        content = serialize(records, manifest.identity)
        path = self.store.folder / SHARDS / f"{time.time_ns():016x}-{secrets.token_hex(4)}{SUFFIX}"
        _write(path, content, f"{process_home()}-{os.getpid()}")
        return path, len(content)


def _write(path: Path, content: bytes, owner: str) -> None:
    """Writes a shard under a name that tells its process, flushes it to disk, and renames it.

    Raises:
        StoreError: there is too little space, or the folder cannot be written.
    """
    temporary = path.with_name(f".{owner}.{path.name}")
    try:
        with open(temporary, "xb", opener=_open_private) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        rule, remedy = f"a shard of {len(content):,} bytes must be written", "fix this"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            rule, remedy = f"a shard of {len(content):,} bytes must fit on the disk", "free some space"
        remedy += " and start again: what was written before is kept"
        raise StoreError(f"{path.parent}", rule, error.strerror or str(error), remedy) from error


def _open_private(path: str, flags: int) -> int:
    """Opens a file that others may not write to, even while it is being written: another run may open the store then."""
    return os.open(path, flags, 0o644)


def remove_abandoned(folder: Path) -> None:
    """Removes half-written shards of processes of this machine, or container, that have ended."""
    home = process_home()
    for path in (folder / SHARDS).glob(f".{home}-*{SUFFIX}"):
        pid = path.name.removeprefix(f".{home}-").partition(".")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            with suppress(OSError):
                path.unlink()


def process_home() -> str:
    """Tells where process ids mean the same: in one container, on one machine, since it was started. 16 hex digits."""
    boot, container = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [boot.read_text("ascii"), str(container.readlink())]
    return blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
