"""One file of a store: an index, the tokens of every piece of text, and the teacher's targets for them.

A shard is a safetensors file, written once and mapped into memory to be read. Its index has one entry per record; a
record is a piece of a document. Everything else is *columns*, which hold the records one after the other:

    tokens                    one entry per token
    the targets, by name      one entry per token (`ids`, `logprobs`, …), or bytes of a compressed block (`blocks`)

The index has a checksum, and so has every record in every column. They are compared when a record is first read.
"""

from __future__ import annotations

import errno
import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from distill_rl.errors import StoreError
from distill_rl.store.manifest import Manifest
from distill_rl.types import NAME_BYTES, PieceRef

VERSION = "1"
SUFFIX = ".safetensors"
TOKENS, BLOCKS = "tokens", "blocks"
_INDEX = ("names", "first", "prefix", "length", "whole", "sizes", "checksums")
"""The tensors of the index, in the order in which they enter its checksum."""
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

    @property
    def num_bytes(self) -> int:
        """Of tokens and targets."""
        return self.tokens.nbytes + sum(column.values.nbytes for column in self.targets.values())


def serialize(records: Sequence[Record], identity: Mapping[str, Any] | None = None) -> bytes:
    """The contents of a shard with these records, which have the same columns. At least one record.

    Args:
        identity: `Manifest.identity` of its store; None: the shard does not say, as those of earlier versions.
    """
    columns = {name: column.dtype for name, column in records[0].targets.items()}
    parts = [[record.tokens.astype("<i4", copy=False) for record in records]]
    parts += [[np.ascontiguousarray(record.targets[name].values) for record in records] for name in columns]
    checksums = np.array([[crc32(part.data if part.size else b"") for part in column] for column in parts], "<u4").T
    pieces = [record.piece for record in records]
    sizes = [record.targets[BLOCKS].values.size if BLOCKS in columns else 0 for record in records]
    index = {
        "names": np.frombuffer(b"".join(piece.name for piece in pieces), np.uint8).reshape(-1, NAME_BYTES),
        "first": np.array([piece.first for piece in pieces], "<i8"),
        "prefix": np.array([piece.prefix for piece in pieces], "<i4"),
        "length": np.array([piece.length for piece in pieces], "<i4"),
        "whole": np.array([piece.whole for piece in pieces], np.uint8),
        "sizes": np.array(sizes, "<i8"),
        "checksums": np.ascontiguousarray(checksums),
    }
    tensors = {name: (_INDEX_DTYPES[name], array) for name, array in index.items()}
    for (name, dtype), column in zip([(TOKENS, "I32"), *columns.items()], parts):
        tensors[name] = dtype, np.concatenate(column)
    metadata = {
        "distill_rl": "targets",
        "version": VERSION,
        "columns": json.dumps([TOKENS, *columns]),
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


_INDEX_DTYPES = {
    "names": "U8", "first": "I64", "prefix": "I32", "length": "I32", "whole": "U8", "sizes": "I64", "checksums": "U32",
}  # fmt: skip


def _index_checksum(index: Mapping[str, np.ndarray]) -> int:
    checksum = 0
    for name in _INDEX:
        checksum = crc32(np.ascontiguousarray(index[name]).tobytes(), checksum)
    return checksum


def _identity(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """`Shard.identity`. Raises ValueError if it is damaged."""
    text, checksum = metadata.get("manifest"), metadata.get("manifest_checksum")
    if text is None and checksum is None:
        return None
    if text is None or f"{crc32(text.encode()):08x}" != checksum:
        raise ValueError("a manifest that does not match its checksum")
    identity: dict[str, Any] = json.loads(text)
    return identity


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
        self._tensors, metadata, self._data_start = self._header()
        try:
            if metadata.get("version") != VERSION:
                rule = f"a shard of version {VERSION}; this one was written by another version of distill_rl"
                raise StoreError(f"{path}", rule, str(metadata.get("version")), REMEDY)
            self.columns: list[str] = json.loads(metadata["columns"])
            index = {name: self._array(name) for name in _INDEX}
            if f"{_index_checksum(index):08x}" != metadata["index_checksum"]:
                places = [self._place(name) for name in _INDEX]
                around = min(begin for begin, _ in places), max(end for _, end in places)
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

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return len(self._map)

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.length, dtype=np.int64)])

    @cached_property
    def _block_starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)])

    def piece(self, i: int) -> PieceRef:
        """What record `i` is of."""
        return PieceRef(
            self.names[i].tobytes(), int(self.first[i]), int(self.prefix[i]), int(self.length[i]), bool(self.whole[i])
        )

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
        return {
            name: Column(self._tensors[name][0], self._of_record(name, i)) for name in self.columns if name != TOKENS
        }

    def column_bytes(self) -> dict[str, int]:
        """Bytes of every column, and of the index under `index`."""
        sizes = {name: self._place(name)[1] - self._place(name)[0] for name in self.columns}
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
        values = self._array(name)[start:stop]
        place = self.columns.index(name)
        if again or not self._checked[i, place]:
            if crc32(values.data if values.size else b"") != self._checksums[i, place]:
                dtype, _, (begin, _) = self._tensors[name]
                row = int(np.prod(values.shape[1:], dtype=np.int64)) * np.dtype(_DTYPES[dtype]).itemsize
                first = self._data_start + begin + start * row
                raise self._damaged(f"{name} of record {i} does not match its checksum", (first, first + values.nbytes))
            self._checked[i, place] = True
        return values

    def _array(self, name: str) -> np.ndarray:
        """A whole tensor of the file, as a view."""
        cached: np.ndarray | None = self.__dict__.setdefault("_arrays", {}).get(name)
        if cached is None:
            dtype, shape, (begin, end) = self._tensors[name]
            data = np.frombuffer(self._map, np.dtype(_DTYPES[dtype]), offset=self._data_start + begin,
                                 count=(end - begin) // np.dtype(_DTYPES[dtype]).itemsize)  # fmt: skip
            cached = self.__dict__["_arrays"][name] = data.reshape(shape)
        return cached

    def _place(self, name: str) -> tuple[int, int]:
        """The first byte of a tensor in the file, and the one after its last."""
        begin, end = self._tensors[name][2]
        return self._data_start + begin, self._data_start + end

    def _header(self) -> tuple[dict[str, tuple[str, tuple[int, ...], tuple[int, int]]], dict[str, str], int]:
        """dtype, shape and place of every tensor by name; the metadata; the first byte of the data."""
        size = len(self._map)
        length = int.from_bytes(self._map[:8], "little")
        if size < 8 or not 2 <= length <= size - 8:
            raise self._damaged("not a safetensors file, or cut off", (0, min(size, 8)))
        start = 8 + length
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
        return tensors, metadata, start

    def _check_shapes(self, index: Mapping[str, np.ndarray]) -> None:
        """Raises ValueError if the sizes of index and columns do not fit together."""
        records, tokens = len(index["names"]), int(index["length"].sum(dtype=np.int64))
        fits = all(len(array) == records for array in index.values())
        fits &= index["checksums"].shape == (records, len(self.columns)) and index["names"].shape[1:] == (NAME_BYTES,)
        fits &= bool((index["length"] >= 0).all() and (index["sizes"] >= 0).all())
        blocks = int(index["sizes"].sum(dtype=np.int64))
        for name in self.columns:
            fits &= len(self._array(name)) == (blocks if name == BLOCKS else tokens)
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
