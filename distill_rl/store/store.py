"""A store of a teacher's targets: finds those of a piece of a document by its name and its tokens, and writes new ones.

Its manifest says whose targets it holds, how they were taken and how they are written. Its files, the shards, are
safetensors files, written once and mapped into memory to be read. The index of one has an entry per record; a record is a
piece of a document. Everything else is *columns*, which hold the records one after the other:

    tokens                    one entry per token
    the targets, by name      one entry per token (`ids`, `logprobs`, …), or bytes of a compressed block (`blocks`)

The index has a checksum, and so has every record in every column. They are compared when a record is first read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import psutil

from distill_rl.config.schema import TeacherConfig
from distill_rl.errors import StoreError, first_line
from distill_rl.system import files
from distill_rl.types import NAME_BYTES, PieceRef

# The manifest: what a store says of itself.

VERSION = 1
FILE, TEACHER, SHARDS, _LOCK = "manifest.json", "teacher", "shards", ".lock"
FORMATS = ("exact", "compact")
DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model", "tokenizer*")
"""Files of a model that describe it and its tokenizer, as globs; weights are not among them."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Two captures go into one store only if all of this is the same, `model` and `revision` excepted."""

    format: str
    """`exact` or `compact`."""
    kind: str
    """`topk` or `sampled`: `teachers[].export`."""
    entries: int
    """Per token: `loss.top_k`, or `loss.draws`."""
    temperature: float
    wire_dtype: str
    """Of the log-probs: fp32, fp16 or bf16."""
    dtype: str
    """In which the teacher was run; `served` if a server ran it, which does not say."""
    model: str
    """Name or folder of the teacher when it was captured; for people."""
    revision: str | None
    weights: str
    """Of the teacher: sha256 over config and weights, and how they were quantised (`models.files.facts.teacher_identity`), or
    `served_identity`."""
    tokenizer: str
    """sha256 over what determines a text's ids (`models.files.hub.tokenizer_hash`)."""
    vocabulary_size: int
    """Ids with a probability; further columns of the teacher's output layer are padding."""
    mass: float | None = None
    """With `compact`: the fewest entries that hold this probability are kept. None: all."""
    files: dict[str, str] = field(default_factory=dict)
    """sha256 of every file in the folder `teacher`, by name."""

    @property
    def identity(self) -> dict[str, Any]:
        """What tells the targets of two stores apart, which every shard repeats."""
        return {name: value for name, value in asdict(self).items() if name in _WORDS}

    def differences(self, other: Mapping[str, Any]) -> Iterator[str]:
        """Yields how targets with another `identity` differ from those here, one clause each."""
        for name, mine in self.identity.items():
            if mine != other.get(name):
                yield f"{_WORDS[name]} {short(mine)} here, {short(other.get(name))} there"


_WORDS = {
    "format": "capture.format",
    "kind": "teachers[].export",
    "entries": "entries per token (loss.top_k or loss.draws)",
    "temperature": "loss.temperature",
    "wire_dtype": "teachers[].wire_dtype",
    "dtype": "teachers[].dtype",
    "weights": "the teacher's weights",
    "tokenizer": "the teacher's tokenizer",
    "vocabulary_size": "ids that are compared",
    "mass": "capture.mass",
}
"""What a user calls the fields that tell the targets of two stores apart."""


def short(value: Any) -> Any:
    """A value as it is written in YAML; of a hash the first digits, and what is said behind it."""
    if value is None:
        return "null"
    if not isinstance(value, str):
        return value
    first, space, rest = value.partition(" ")
    return f"{first[:12]}{space}{rest}" if len(first) == 64 else value


SERVED = "served"
"""`Manifest.dtype` of a teacher that a server ran, and how its `weights` begin."""


def served_identity(teacher: TeacherConfig) -> str:
    """What stands in place of the weights' hash for a teacher that a server runs: its name there and the interface.

    It does not tell two models apart that are served under one name.
    """
    return f"{SERVED} as {teacher.model} by {teacher.endpoint.api}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Makes a store in a folder that holds none. The files that describe the teacher must be in it (`describe_teacher`)."""
    (folder / SHARDS).mkdir(parents=True, exist_ok=True)
    value = asdict(manifest) | {"version": VERSION}
    files.write_json(folder / FILE, value | {"checksum": _checksum(value)})
    for path in (folder, folder / SHARDS, folder / FILE):  # a store that others may write to is not read
        files.close_folder(path)


def make_store(folder: Path, manifest: Manifest, sources: list[Path]) -> None:
    """Makes a store, or checks that one which exists fits. Of several runs that do so at the same time, one makes it.

    Args:
        manifest: without the files that describe the teacher.
        sources: as of `describe_teacher`.

    Raises:
        StoreError: the store holds other targets, or cannot be written.
    """
    if not (folder / FILE).exists():
        try:
            with _locked(folder):
                if not (folder / FILE).exists():
                    write_manifest(folder, replace(manifest, files=describe_teacher(folder, sources)))
        except OSError as error:
            raise StoreError(f"{folder}", "must be writable", first_line(error), "choose another folder") from error
    require_same(folder, manifest)
    with suppress(OSError):
        # Also that of a process that was killed; who comes later finds the store, and does not need it.
        (folder / _LOCK).unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes other processes wait that enter it with the same folder, except on a file system without locks."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def require_same(folder: Path, manifest: Manifest) -> None:
    """Checks that the targets of a capture may go into the store in a folder.

    Raises:
        StoreError: it holds other targets, or its manifest cannot be read; the line names every difference.
    """
    differences = list(read_manifest(folder).differences(manifest.identity))
    if differences:
        rule = "one store holds the targets of one teacher, taken in one way"
        raise StoreError(f"{folder}", rule, "; ".join(differences), "keep them in folders of their own")


def describe_teacher(folder: Path, sources: list[Path]) -> dict[str, str]:
    """Copies the files that describe a teacher into the store's folder `teacher`, and returns their sha256 by name.

    Args:
        sources: the model's folder and, behind it, the tokenizer's if that is another one; its files go first.
    """
    target = folder / TEACHER
    target.mkdir(parents=True, exist_ok=True)
    for source in sources:
        for pattern in DESCRIPTION:
            for file in sorted(source.glob(pattern)):
                if file.is_file() and not file.name.endswith(".index.json"):
                    files.write_atomic(target / file.name, file.read_bytes())
    return {file.name: files.sha256(file) for file in sorted(target.iterdir()) if not file.name.startswith(".")}


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest of a store.

    Raises:
        StoreError: no store, a newer one, or a damaged manifest.
    """
    path = folder / FILE
    if not folder.is_dir() or not path.is_file():
        rule = "must be a store, a folder that `distill-rl capture` has made"
        found = f"no {FILE}" if folder.is_dir() else "no such folder"
        raise StoreError(f"{folder}", rule, found, "name the folder that was given with --out")
    remedy = "copy it again from where the store was made"
    try:
        value = json.loads(path.read_text("utf-8"))
        version = value["version"]
        checksum = value.pop("checksum")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}", "must be a manifest of a store", first_line(error), remedy) from error
    if version != VERSION:
        rule = f"version {VERSION} can be read; the store was made by another version of distill_rl"
        raise StoreError(f"{path}", rule, version, "update distill_rl")
    if checksum != _checksum(value):
        raise StoreError(f"{path}, byte 0", "does not match its checksum: it was damaged or edited", None, remedy)
    del value["version"]
    try:
        return Manifest(**value)
    except TypeError as error:
        raise StoreError(f"{path}", "must be a manifest of a store", first_line(error), remedy) from error


def description_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yields the files that describe the teacher and are missing or changed, one line each."""
    for name, expected in manifest.files.items():
        file = folder / TEACHER / name
        found = files.sha256(file) if file.is_file() else "no file"
        if found != expected:
            remedy = "copy it again from where the store was made"
            rule = f"must have the sha256 {expected[:12]}… of the manifest"
            yield str(StoreError(f"{file}, byte 0", rule, short(found), remedy))


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# Shards.

SHARD_VERSION = "1"
SUFFIX = ".safetensors"
TOKENS, BLOCKS = "tokens", "blocks"
_INDEX = {
    "names": "U8", "first": "I64", "prefix": "I32", "length": "I32", "whole": "U8", "sizes": "I64", "checksums": "U32",
}  # fmt: skip
"""The tensors of the index with their dtypes, in the order in which they enter its checksum."""
_DTYPES = {
    "U8": "u1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "U32": "<u4",
    "F16": "<f2",
    "BF16": "<i2",
    "F32": "<f4",
}
"""Names of safetensors → numpy. numpy has no bfloat16: its 16 bits are read as an integer."""
REMEDY = "copy the store again, or delete this file and capture what it held again"


@dataclass(frozen=True, slots=True)
class Column:
    """Values of one kind for all tokens of a record, or the bytes of a block."""

    dtype: str
    """As safetensors names it."""
    values: np.ndarray
    """[tokens, …]; of a block, uint8 [bytes]. bfloat16 as int16 of the same bits."""


@dataclass(frozen=True, slots=True)
class Record:
    """A piece of a document with its targets, to be written."""

    piece: PieceRef
    tokens: np.ndarray
    """int32 [piece.length]"""
    targets: Mapping[str, Column]
    encoded: bool = False
    """Whether the targets are in the format of the store already."""

    @property
    def num_bytes(self) -> int:
        """Of tokens and targets."""
        return self.tokens.nbytes + sum(column.values.nbytes for column in self.targets.values())


def serialize(records: Sequence[Record], identity: Mapping[str, Any] | None = None) -> bytes:
    """The contents of a shard with these records, which have the same columns. At least one record.

    Args:
        identity: `Manifest.identity` of its store; None: the shard does not say, as those of earlier versions.
    """
    columns = {TOKENS: ("I32", [record.tokens.astype("<i4", copy=False) for record in records])}
    for name, column in records[0].targets.items():
        columns[name] = column.dtype, [np.ascontiguousarray(record.targets[name].values) for record in records]
    checksums = [[crc32(part.data if part.size else b"") for part in parts] for _, parts in columns.values()]
    pieces = [record.piece for record in records]
    sizes = [record.targets[BLOCKS].values.size if BLOCKS in columns else 0 for record in records]
    index = {
        "names": np.frombuffer(b"".join(piece.name for piece in pieces), np.uint8).reshape(-1, NAME_BYTES),
        "first": np.array([piece.first for piece in pieces], "<i8"),
        "prefix": np.array([piece.prefix for piece in pieces], "<i4"),
        "length": np.array([piece.length for piece in pieces], "<i4"),
        "whole": np.array([piece.whole for piece in pieces], np.uint8),
        "sizes": np.array(sizes, "<i8"),
        "checksums": np.ascontiguousarray(np.array(checksums, "<u4").T),
    }
    tensors = {name: (_INDEX[name], array) for name, array in index.items()}
    tensors |= {name: (dtype, np.concatenate(parts)) for name, (dtype, parts) in columns.items()}
    metadata = {
        "distill_rl": "targets",
        "version": SHARD_VERSION,
        "columns": json.dumps(list(columns)),
        "index_checksum": f"{_index_checksum(index):08x}",
    }
    if identity is not None:
        text = json.dumps(identity, sort_keys=True)
        metadata |= {"manifest": text, "manifest_checksum": f"{crc32(text.encode()):08x}"}
    return _safetensors(tensors, metadata)


def _safetensors(tensors: Mapping[str, tuple[str, np.ndarray]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file: 8 bytes with the length of the header, the header in JSON, the tensors."""
    # Tensors with the widest elements come first and the header's length is a multiple of 8, so all are aligned.
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts, end = [], 0
    for name, (dtype, array) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
        start, end = end, end + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, end]}
        parts.append(array.tobytes())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _index_checksum(index: Mapping[str, np.ndarray]) -> int:
    return crc32(b"".join(index[name].tobytes() for name in _INDEX))


def _identity(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """`Shard.identity`. Raises ValueError if it is damaged."""
    text, checksum = metadata.get("manifest"), metadata.get("manifest_checksum")
    if text is None and checksum is None:
        return None
    if text is None or f"{crc32(text.encode()):08x}" != checksum:
        raise ValueError("a manifest that does not match its checksum")
    identity: dict[str, Any] = json.loads(text)
    return identity


@dataclass(frozen=True, slots=True)
class _Tensor(Column):
    """A whole tensor of the file, as a view."""

    begin: int
    """Its first byte in the file."""

    @property
    def end(self) -> int:
        return self.begin + self.values.nbytes


class Shard:
    """A shard, mapped into memory. The index is checked when it is opened, a record when it is first read.

    Raises:
        StoreError: not a shard, cut off, or damaged; names the file and the place.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if path.stat().st_size else b""
        except OSError as error:
            remedy = REMEDY
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # nothing is wrong with the file
                remedy = "allow more open files (ulimit -n), or put the shards together with `distill-rl store merge`"
            raise StoreError(f"{path}", "must be readable", error.strerror or str(error), remedy) from error
        self._data_start = 0
        try:
            self._tensors, metadata = self._header()
            if metadata.get("version") != SHARD_VERSION:
                rule = f"a shard of version {SHARD_VERSION}; this one was written by another version of distill_rl"
                raise StoreError(f"{path}", rule, str(metadata.get("version")), REMEDY)
            self.columns: list[str] = json.loads(metadata["columns"])
            index = {name: self._tensors[name].values for name in _INDEX}
            if f"{_index_checksum(index):08x}" != metadata["index_checksum"]:
                tensors = [self._tensors[name] for name in _INDEX]
                around = min(tensor.begin for tensor in tensors), max(tensor.end for tensor in tensors)
                raise self._damaged("its index does not match its checksum", around)
            self._check_shapes(index)
            self.identity = _identity(metadata)
            """`Manifest.identity` of its store; None if an earlier version has written it, which did not say."""
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise self._damaged("its header is damaged", (0, self._data_start)) from error
        self.names: np.ndarray = index["names"]
        """uint8 [n, 16]"""
        self.first, self.prefix, self.length = index["first"], index["prefix"], index["length"]
        self.whole: np.ndarray = index["whole"].astype(bool)
        self._sizes, self._checksums = index["sizes"], index["checksums"]
        self._checked = np.zeros(self._checksums.shape, dtype=bool)
        self._starts = np.concatenate([[0], np.cumsum(self.length, dtype=np.int64)])
        self._block_starts = np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return len(self._map)

    def piece(self, i: int) -> PieceRef:
        """What record `i` is of."""
        first, prefix, length = (int(numbers[i]) for numbers in (self.first, self.prefix, self.length))
        return PieceRef(self.names[i].tobytes(), first, prefix, length, bool(self.whole[i]))

    def tokens(self, i: int) -> np.ndarray:
        """int32 [length]: the tokens of record `i`, read-only.

        Raises:
            StoreError: the record is damaged.
        """
        return self._of_record(TOKENS, i)

    def targets(self, i: int) -> dict[str, Column]:
        """The targets of record `i`, read-only views of the file.

        Raises:
            StoreError: the record is damaged.
        """
        names = (name for name in self.columns if name != TOKENS)
        return {name: Column(self._tensors[name].dtype, self._of_record(name, i)) for name in names}

    def column_bytes(self) -> dict[str, int]:
        """Bytes of every column, and of the index under `index`."""
        sizes = {name: self._tensors[name].values.nbytes for name in self.columns}
        return sizes | {"index": self.num_bytes - sum(sizes.values())}

    def problems(self) -> list[str]:
        """Reads every record, and returns a line for each that is damaged."""
        lines = []
        for i in range(len(self)):
            for name in self.columns:
                try:
                    self._of_record(name, i, again=True)
                except StoreError as error:
                    lines.append(str(error))
        return lines

    def _of_record(self, name: str, i: int, *, again: bool = False) -> np.ndarray:
        """Record `i` of a column, compared with its checksum the first time, or `again`."""
        starts = self._block_starts if name == BLOCKS else self._starts
        start, stop = int(starts[i]), int(starts[i + 1])
        tensor = self._tensors[name]
        values = tensor.values[start:stop]
        place = self.columns.index(name)
        if again or not self._checked[i, place]:
            if crc32(values.data if values.size else b"") != self._checksums[i, place]:
                first = tensor.begin + start * tensor.values.strides[0]
                raise self._damaged(f"{name} of record {i} does not match its checksum", (first, first + values.nbytes))
            self._checked[i, place] = True
        return values

    def _header(self) -> tuple[dict[str, _Tensor], dict[str, str]]:
        """Every tensor by name; the metadata."""
        size = len(self._map)
        length = int.from_bytes(self._map[:8], "little")
        if size < 8 or not 2 <= length <= size - 8:
            raise self._damaged("not a safetensors file, or cut off", (0, min(size, 8)))
        start = self._data_start = 8 + length
        try:
            header = json.loads(bytes(self._map[8:start]))
            metadata = header.pop("__metadata__")
            tensors = {
                name: (entry["dtype"], tuple(entry["shape"]), tuple(entry["data_offsets"]))
                for name, entry in header.items()
            }
            for dtype, shape, (begin, end) in tensors.values():
                if end - begin != np.prod(shape, dtype=np.int64) * np.dtype(_DTYPES[dtype]).itemsize or begin < 0:
                    raise ValueError("a shape that does not fit its bytes")
            needed = start + max(end for _, _, (_, end) in tensors.values())
        except (ValueError, LookupError, TypeError, AttributeError):
            raise self._damaged("its header is damaged", (8, start)) from None
        if size < needed:
            raise self._damaged(f"cut off: {size:,} of {needed:,} bytes", (size, needed))
        found = {}
        for name, (dtype, shape, (begin, _)) in tensors.items():
            count = int(np.prod(shape, dtype=np.int64))
            values = np.frombuffer(self._map, _DTYPES[dtype], count, start + begin)
            found[name] = _Tensor(dtype, values.reshape(shape), start + begin)
        return found, metadata

    def _check_shapes(self, index: Mapping[str, np.ndarray]) -> None:
        """Raises ValueError if the sizes of index and columns do not fit together."""
        records, tokens = len(index["names"]), int(index["length"].sum(dtype=np.int64))
        fits = all(len(array) == records for array in index.values())
        fits &= index["checksums"].shape == (records, len(self.columns)) and index["names"].shape[1:] == (NAME_BYTES,)
        fits &= bool((index["length"] >= 0).all() and (index["sizes"] >= 0).all())
        blocks = int(index["sizes"].sum(dtype=np.int64))
        for name in self.columns:
            fits &= len(self._tensors[name].values) == (blocks if name == BLOCKS else tokens)
        if not fits:
            raise ValueError("sizes that do not fit together")

    def _damaged(self, rule: str, place: tuple[int, int]) -> StoreError:
        return StoreError(f"{self.path}, bytes {place[0]:,} to {place[1]:,}", rule, None, REMEDY)


# The formats of a store: how targets become the columns of a record, and back.
#
# exact     the tensors of the wire format as they are: a run from the store has the bits of a live one
# compact   ids entropy-coded, log-probs quantised (`compact.py`): a tenth of the bytes, for top-k targets

_NUMPY_DTYPES = {"ids": "I32", "logprobs": "F32", "rest_logprob": "F32", "label_logprob": "F32"}
"""Of what a compact block decodes to."""


def encoded(manifest: Manifest, tokens: np.ndarray, targets: Mapping[str, Column]) -> Mapping[str, Column]:
    """The columns that a store keeps of a piece's targets.

    Args:
        tokens: int32 [n], of the piece.
        targets: the wire format's tensors, [n, …]; for `compact` a top k in fp32.
    """
    if manifest.format == "exact":
        return targets
    from distill_rl.store.compact import encode

    arrays = {name: column.values for name, column in targets.items()}
    block = encode(tokens, arrays, vocabulary_size=manifest.vocabulary_size, mass=manifest.mass)
    return {BLOCKS: Column("U8", np.frombuffer(block, np.uint8))}


def decoded(manifest: Manifest, shard: Shard, record: int) -> dict[str, Column]:
    """The targets of a record in the wire format, [n, …]; read-only.

    Raises:
        StoreError: the record is damaged.
    """
    columns = shard.targets(record)
    if manifest.format == "exact":
        return columns
    from distill_rl.store.compact import decode

    try:
        block = columns[BLOCKS].values
        targets = decode(shard.tokens(record), block, vocabulary_size=manifest.vocabulary_size)
    except (KeyError, ValueError) as error:
        rule = f"record {record} must be targets in the format compact"
        raise StoreError(f"{shard.path}", rule, str(error), REMEDY) from error
    return {name: Column(_NUMPY_DTYPES[name], values) for name, values in targets.items()}


# A store and what it finds.


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
        places = [place for place in (folder / FILE, folder / SHARDS) if place.exists()]
        if problem := next((problem for place in places for problem in files.ownership_problems(place)), None):
            rule = "only this user and root may own or change a store"
            raise StoreError(f"{folder}", rule, problem, "copy it to a folder of your own: cp -r")
        paths = shard_files(folder)
        files.allow_open_files(len(paths))
        self.shards = [Shard(path) for path in paths]
        require_own(self.manifest, self.shards)
        self._index()
        # The last record is kept, since the pieces of a document mostly follow each other.
        self._decoded = lru_cache(maxsize=1)(partial(decoded, self.manifest))

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
        files.allow_open_files(len(self.shards))
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


# Writes targets to a store, a shard at a time.

SHARD_BYTES = 64 * 2**20
"""Targets of a shard, before they are compressed."""


@dataclass(slots=True)
class _Draft:
    """What a shard will hold."""

    records: list[Record] = field(default_factory=list)
    tokens: dict[tuple[bytes, int, int], list[np.ndarray]] = field(default_factory=dict)
    """By name, first token and prefix: the tokens of the pieces."""
    num_bytes: int = 0

    def add(self, record: Record) -> None:
        self.records.append(record)
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

    def add(self, piece: PieceRef, tokens: np.ndarray, targets: Mapping[str, Column], *, encoded: bool = False) -> None:
        """Adds a piece, which waits to be written. The arrays are copied.

        Args:
            tokens: int32 [piece.length]
            targets: the wire format's tensors, [piece.length, …].
            encoded: they are columns in the format of the store instead, such as another store of the same kind has.
        """
        copies = {name: Column(column.dtype, np.array(column.values)) for name, column in targets.items()}
        self._draft.add(Record(piece, np.array(tokens, np.int32), copies, encoded))

    def holds(self, piece: PieceRef, tokens: np.ndarray) -> bool:
        """Whether a piece with these tokens, or a longer one from the same place on, is waiting to be written."""
        return self._draft.holds(piece, tokens) or (self._begun is not None and self._begun[0].holds(piece, tokens))

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
            for record in draft.records:
                self._draft.add(record)
            raise
        self.bytes_written += num_bytes
        self.store.add(Shard(path))

    def _write(self, draft: _Draft) -> tuple[Path, int]:
        """Writes a shard, in the thread; returns its path and size."""
        manifest = self.store.manifest
        records = [
            record if record.encoded else replace(record, targets=encoded(manifest, record.tokens, record.targets))
            for record in draft.records
        ]
        content = serialize(records, manifest.identity)
        path = self.store.folder / SHARDS / f"{time.time_ns():016x}-{secrets.token_hex(4)}{SUFFIX}"
        _write(path, content, f"{process_home()}-{os.getpid()}")
        return path, len(content)


def _write(path: Path, content: bytes, owner: str) -> None:
    """Writes a shard under a name that tells its process, flushes it to disk, and renames it."""
    temporary = path.with_name(f".{owner}.{path.name}")
    try:
        with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, 0o644)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        files.sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        rule, remedy = f"a shard of {len(content):,} bytes must be written", "fix this"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            rule, remedy = f"a shard of {len(content):,} bytes must fit on the disk", "free some space"
        remedy += " and start again: what was written before is kept"
        raise StoreError(f"{path.parent}", rule, error.strerror or str(error), remedy) from error


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
