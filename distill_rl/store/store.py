"""A store, opened to be read: finds the targets of a piece of a document by its name and its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distill_rl.errors import StoreError
from distill_rl.store.formats import decoded
from distill_rl.store.manifest import FILE, SHARDS, Manifest, read_manifest
from distill_rl.store.shard import SUFFIX, Column, Shard
from distill_rl.system import ownership
from distill_rl.system.files import allow_open_files
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
        if problem := next(ownership.problems(folder / FILE), None) or next(
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
        yield from ownership.problems(folder)
