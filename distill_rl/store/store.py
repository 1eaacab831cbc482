"""A store: finds the targets of a piece of a document by its name and its tokens, and writes new ones."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import psutil

from distill_rl.errors import StoreError
from distill_rl.store.manifest import FILE, SHARDS, Manifest, read_manifest
from distill_rl.store.shard import SUFFIX, Column, Record, Shard, decoded, encoded, serialize
from distill_rl.system.files import allow_open_files, sync
from distill_rl.system.folders import ownership_problems
from distill_rl.types import PieceRef


@dataclass(frozen=True, slots=True)
class Found:
    """Where the targets of a piece are: in the positions of one record.

    Positions `start` to `start + count` of the record are positions `skip` to `skip + count` of the piece. A piece that
    begins with a prefix has no targets for the prefix but its last position, which predicts the first token of the text.
    """

    shard: Shard
    record: int
    start: int
    skip: int
    count: int

    @property
    def in_context(self) -> bool:
        """Whether the teacher saw more of the document before the piece than it would have in a run."""
        return self.start > 0 or self.skip > 0


class Store:
    """The targets of one teacher. Opening it reads the manifest and the index of every shard, no targets.

    Raises:
        StoreError: no store, a newer or damaged one, one with files of another, or one that others may have changed.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        if problem := next(ownership_problems(folder / FILE), None) or next(
            _permission_problems(folder / SHARDS), None
        ):
            rule = "only this user and root may own or change a store"
            raise StoreError(f"{folder}", rule, problem, "copy it to a folder of your own: cp -r")
        files = shard_files(folder)
        allow_open_files(len(files))
        self.shards = [Shard(path) for path in files]
        require_own(self.manifest, self.shards)
        self._index()
        self._last: tuple[Path, int, dict[str, Column]] | None = None

    def __len__(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def pieces(self) -> Iterator[PieceRef]:
        """Yields what every record is of."""
        for shard in self.shards:
            yield from (shard.piece(i) for i in range(len(shard)))

    def add(self, shard: Shard) -> None:
        """Takes in a shard that was written after the store had been opened.

        Raises:
            StoreError: it is of another store.
        """
        require_own(self.manifest, [shard])
        self.shards.append(shard)
        allow_open_files(len(self.shards))
        for i in range(len(shard)):
            self._added.setdefault(shard.names[i].tobytes(), []).append((len(self.shards) - 1, i))

    def refresh(self) -> None:
        """Takes in the shards that other processes have written since the store was opened.

        Raises:
            StoreError: one of them is damaged, or of another store.
        """
        known = {shard.path for shard in self.shards}
        for path in shard_files(self.folder):
            if path not in known:
                self.add(Shard(path))

    def records(self, name: bytes) -> list[tuple[Shard, int]]:
        """All records of a document."""
        key = np.frombuffer(name[:8], "<u8")[0]
        place = int(np.searchsorted(self._keys, key))
        found = []
        while place < len(self._keys) and self._keys[place] == key:
            shard, i = self.shards[self._shard_of[place]], int(self._record_of[place])
            if shard.names[i].tobytes() == name:
                found.append((shard, i))
            place += 1
        return found + [(self.shards[shard], i) for shard, i in self._added.get(name, ())]

    def find(self, piece: PieceRef, tokens: np.ndarray) -> Found | None:
        """Where the targets of a piece are, or None if the store has none for exactly these tokens.

        1. A record that begins where the piece does and has its tokens: those of a causal model do not depend on what
           follows, so a longer record does.
        2. Otherwise, for a later piece, a record that has the piece further on: the teacher then saw the text before it,
           too.

        Args:
            tokens: int32 [piece.length], of the teacher.

        Raises:
            StoreError: a record is damaged.
        """
        later = None
        for shard, i in self.records(piece.name):
            first, prefix, length = int(shard.first[i]), int(shard.prefix[i]), int(shard.length[i])
            if (first, prefix) == (piece.first, piece.prefix) and length >= piece.length:
                if np.array_equal(shard.tokens(i)[: piece.length], tokens):
                    return Found(shard, i, 0, 0, piece.length)
            elif first < piece.first and later is None:
                start = piece.first - first + prefix
                body = tokens[piece.prefix :]
                if start + len(body) <= length and np.array_equal(shard.tokens(i)[start : start + len(body)], body):
                    before = 1 if piece.prefix else 0  # the position that predicts the first token of the text
                    later = Found(shard, i, start - before, piece.prefix - before, len(body) + before)
        return later

    def has(self, piece: PieceRef, tokens: np.ndarray) -> bool:
        """Whether the store has the targets of a piece; one without tokens needs none. As `find`."""
        return not piece.length or self.find(piece, tokens) is not None

    def has_whole(self, name: bytes) -> bool:
        """Whether the store has a document in one piece, by its name."""
        return any(shard.whole[i] and not shard.first[i] for shard, i in self.records(name))

    def targets(self, found: Found) -> dict[str, Column]:
        """The targets that `find` has found, [found.count, …]; read-only.

        Raises:
            StoreError: the record is damaged.
        """
        stop = found.start + found.count
        columns = self._decoded(found.shard, found.record)
        return {name: Column(column.dtype, column.values[found.start : stop]) for name, column in columns.items()}

    def _decoded(self, shard: Shard, record: int) -> dict[str, Column]:
        """The targets of a record. The last one is kept, since the pieces of a document mostly follow each other."""
        if self._last is None or self._last[:2] != (shard.path, record):
            self._last = shard.path, record, decoded(self.manifest, shard, record)
        return self._last[2]

    def _index(self) -> None:
        """Sorts the names of all shards by their first eight bytes; further shards are kept in a dictionary."""
        self._added: dict[bytes, list[tuple[int, int]]] = {}
        names = [shard.names for shard in self.shards] or [np.empty((0, 16), np.uint8)]
        keys = np.concatenate([np.ascontiguousarray(of_shard[:, :8]).view("<u8")[:, 0] for of_shard in names])
        order = np.argsort(keys, kind="stable")
        counts = [len(shard) for shard in self.shards]
        self._keys = keys[order]
        self._shard_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order]
        records = [np.arange(count, dtype=np.int32) for count in counts] or [np.empty(0, np.int32)]
        self._record_of = np.concatenate(records)[order]


def shard_files(folder: Path) -> list[Path]:
    """The shards of a store, in the order of their names; those that are being written are not among them."""
    return sorted(path for path in (folder / SHARDS).glob(f"*{SUFFIX}") if not path.name.startswith("."))


def require_own(manifest: Manifest, shards: Sequence[Shard]) -> None:
    """Checks that no shard says that its targets are of another store.

    Raises:
        StoreError: some do; its line names the first and what is different.
    """
    found = [(shard, list(manifest.differences(shard.identity))) for shard in shards if shard.identity is not None]
    if others := [(shard.path, differences) for shard, differences in found if differences]:
        (path, differences), more = others[0], f" and {len(others) - 1:,} more files" if len(others) > 1 else ""
        rule = "must hold the targets that the manifest.json of its store describes"
        raise StoreError(f"{path}{more}", rule, "; ".join(differences), "move it to its own store")


def unmarked(shards: Sequence[Shard]) -> str:
    """How many shards do not say which store they are of, and why, as a clause; empty if all do."""
    count = sum(shard.identity is None for shard in shards)
    what = "files of an earlier version, which do not say whose targets they hold"
    return f"{what}: {count:,} (`distill-rl store merge` writes them anew)" if count else ""


def _permission_problems(folder: Path) -> Iterator[str]:
    """Why others may have changed the shards; a folder that does not exist holds none."""
    if folder.is_dir():
        yield from ownership_problems(folder)


# Writes targets to a store, a shard at a time.

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
    """Writes a shard under a name that tells its process, flushes it to disk, and renames it."""
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
