"""The `compact` format: a teacher's top-k targets for one piece of text in about a byte per entry.

Here are header, checksum and the arrays around the compiled loops of `coder.py`. docs/store-compact.md has the format.

Legend: n tokens of one piece of text, k entries per token.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from distill_rl.store.levels import error_bound, logprob_table, mass_table, to_levels

__all__ = ["decode", "encode", "error_bound"]

VERSION = 1
_HEADER = struct.Struct("<IBBHIQQ")
"""CRC-32, version, flags, k, n, state 0, state 1; then 32-bit words, little-endian."""
_COUNTS, _RESTS, _LABELS = 1, 2, 4
_CRC_BYTES = 4
_SYMBOLS_PER_ENTRY, _SYMBOLS_PER_ROW = 9, 12
"""The most symbols of the coder: an id that is new takes 6, a step 3; count, rest and label of a row take 11."""
_MOST_K = (1 << 16) - 1


def encode(
    tokens: np.ndarray, targets: Mapping[str, np.ndarray], *, vocabulary_size: int, mass: float | None = None
) -> bytes:
    """A block with the targets of n tokens.

    Ids and their order are exact; log-probabilities are rounded within `error_bound`. Encoding what `decode` returned
    gives the same bytes.

    Args:
        tokens: int32 [n], the teacher's own token ids. `decode` needs them, too.
        targets: the wire form of `losses.TopKLogprobs`. `ids` int32 [n, k], below `vocabulary_size`, −1 at the end of a
            row for entries that are absent; `logprobs` any float [n, k], descending; and, where they are to be kept,
            `rest_logprob` [n], and `label_logprob` [n], of which any value, NaN too, is accepted.
        vocabulary_size: V.
        mass: keep only the fewest leading entries of each row whose probabilities sum to at least this, at least one,
            and add the others to the rest. None: keep all.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    from distill_rl.store.coder import encode_rows, fresh_models

    missing = {"ids", "logprobs"} - set(targets)
    if missing:
        raise ValueError(f"targets: must hold ids and logprobs; {', '.join(sorted(missing))} missing")
    tokens = _as(tokens, "tokens", 1)
    ids, logprobs = _as(targets["ids"], "ids", 2), np.asarray(targets["logprobs"], np.float32)
    n, k = ids.shape
    rest, label = (_optional(targets, name, n) for name in ("rest_logprob", "label_logprob"))
    counts = _counted(tokens, ids, logprobs, rest, vocabulary_size)
    if mass is not None:
        counts, rest = _cut(logprobs, rest, counts, mass)
    levels = to_levels(logprobs)
    rests, labels = (np.empty(0, np.int32) if each is None else to_levels(each) for each in (rest, label))
    has_counts = bool((counts < k).any())
    room = n * (k * _SYMBOLS_PER_ENTRY + _SYMBOLS_PER_ROW)
    records, words = np.empty(room, np.int64), np.empty(room, np.uint32)
    used, x0, x1 = encode_rows(
        tokens, ids, levels, counts, rests, labels, has_counts, mass_table(), fresh_models(), records, words
    )
    flags = _COUNTS * has_counts + _RESTS * (rest is not None) + _LABELS * (label is not None)
    body = _HEADER.pack(0, VERSION, flags, k, n, x0, x1)[_CRC_BYTES:] + words[room - used :].astype("<u4").tobytes()
    return struct.pack("<I", _checksum(tokens, vocabulary_size, body)) + body


def decode(
    tokens: np.ndarray, block: bytes | memoryview | np.ndarray, *, vocabulary_size: int
) -> dict[str, np.ndarray]:
    """The targets of a block: `ids` int32 [n, k], `logprobs` fp32 [n, k], and those fp32 [n] that were encoded.

    Entries that are absent have id −1 and log-probability −inf.

    Args:
        tokens: int32 [n], those that the block was encoded with.
        block: as `encode` returned it.
        vocabulary_size: that which the block was encoded with.

    Raises:
        ValueError: the block is damaged, or belongs to other tokens or another vocabulary.
    """
    tokens = _as(tokens, "tokens", 1)
    data = bytes(block)
    if len(data) < _HEADER.size or len(data) % 4:
        raise ValueError(f"block: must have {_HEADER.size} bytes and then words of 4; has {len(data)}")
    crc, version, flags, k, n, x0, x1 = _HEADER.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"block: must have version {VERSION}; has {version}")
    if n != len(tokens):
        raise ValueError(f"block: must have a row per token; has {n} rows for {len(tokens)} tokens")
    if crc != _checksum(tokens, vocabulary_size, data[_CRC_BYTES:]):
        raise ValueError("block: its checksum is wrong; it is damaged, or was encoded with other tokens")
    return _decoded(tokens, data, flags, k, x0, x1, vocabulary_size)


def _decoded(
    tokens: np.ndarray, data: bytes, flags: int, k: int, x0: int, x1: int, vocabulary_size: int
) -> dict[str, np.ndarray]:
    """The targets of a block whose checksum is right. Raises ValueError as `decode` does, whatever the bytes are."""
    from distill_rl.store.coder import LOW, decode_rows, fresh_models

    low, high = LOW, LOW << 32
    if not (low <= x0 < high and low <= x1 < high and k >= 1 and flags < 8):
        raise ValueError("block: its header is impossible")
    n = len(tokens)
    named: dict[str, Any] = {
        "ids": np.empty((n, k), np.int32),
        "logprobs": np.empty((n, k), np.float32),
        "rest_logprob": np.empty(n, np.float32),
        "label_logprob": np.empty(n, np.float32),
    }
    has_counts, has_rests, has_labels = (bool(flags & flag) for flag in (_COUNTS, _RESTS, _LABELS))
    words = np.frombuffer(data, "<u4", offset=_HEADER.size).astype(np.uint32)
    states = np.array([x0, x1], np.int64)
    parts, tables = (has_counts, has_rests, has_labels), (mass_table(), logprob_table())
    at = decode_rows(tokens, vocabulary_size, parts, tables, fresh_models(), words, states, *named.values())
    # The encoder starts from LOW with both states, so the decoder ends there, having read every word.
    if at != len(words) or (states != low).any():
        raise ValueError("block: its contents are impossible")
    if not has_rests:
        del named["rest_logprob"]
    if not has_labels:
        del named["label_logprob"]
    return named


def _checksum(tokens: np.ndarray, vocabulary_size: int, body: bytes) -> int:
    """CRC-32 of the vocabulary's size as 8 bytes, the tokens as 4 each, and the block behind its checksum."""
    known = struct.pack("<Q", vocabulary_size) + tokens.astype("<i4").tobytes()
    return zlib.crc32(body, zlib.crc32(known))


def _as(array: np.ndarray, name: str, dimensions: int) -> np.ndarray:
    """A copy of the array in int32: contiguous, aligned and writable, so that Numba compiles for one kind of array."""
    given = np.asarray(array)
    if given.ndim != dimensions or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"{name}: must be integers in {dimensions} dimensions; got {given.dtype} {list(given.shape)}")
    copy = np.array(given, np.int32, order="C")
    if given.dtype != np.int32 and (copy != given).any():
        raise ValueError(f"{name}: must fit into int32; got {given.min()} to {given.max()}")
    return copy


def _optional(targets: Mapping[str, np.ndarray], name: str, n: int) -> np.ndarray | None:
    """fp32 [n] of that name, or None if there is none. Raises ValueError for another shape."""
    if name not in targets:
        return None
    given = np.asarray(targets[name], np.float32)
    if given.shape != (n,):
        raise ValueError(f"{name}: must have shape [{n}]; got {list(given.shape)}")
    return given


def _counted(
    tokens: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, rest: np.ndarray | None, vocabulary_size: int
) -> np.ndarray:
    """int32 [n], the number of present entries of each row."""
    n, k = ids.shape
    if len(tokens) != n or logprobs.shape != (n, k):
        raise ValueError(f"ids, logprobs: must have shape [{len(tokens)}, k]; got {[n, k]} and {list(logprobs.shape)}")
    if not 1 <= k <= _MOST_K:
        raise ValueError(f"ids: must have 1 to {_MOST_K} entries per row; got {k}")
    if not 1 <= vocabulary_size <= 1 << 31:
        raise ValueError(f"vocabulary_size: must be from 1 to 2^31; got {vocabulary_size}")
    present = ids >= 0
    counts = present.sum(1, dtype=np.int32)
    if (ids < -1).any() or (ids >= vocabulary_size).any():
        raise ValueError(f"ids: must be from 0 to {vocabulary_size - 1}, or -1 for an absent entry")
    if (counts < 1).any() or (present != (np.arange(k) < counts[:, None])).any():
        raise ValueError("ids: must begin with an entry in each row; absent entries stand at its end")
    if not (logprobs[:, :-1] >= logprobs[:, 1:]).all() or np.isnan(logprobs[:, 0]).any():
        raise ValueError("logprobs: must descend along each row, without NaN")
    if rest is not None and np.isnan(rest).any():
        raise ValueError("rest_logprob: must not be NaN")
    return counts


def _cut(
    logprobs: np.ndarray, rest: np.ndarray | None, counts: np.ndarray, mass: float
) -> tuple[np.ndarray, np.ndarray | None]:
    """(counts, rest) with the fewest leading entries that hold `mass`; the rest gains what the others held."""
    if not 0 < mass <= 1:
        raise ValueError(f"mass: must be above 0 and at most 1; got {mass}")
    place = np.arange(logprobs.shape[1])
    present = place < counts[:, None]
    probabilities = np.where(present, np.exp(logprobs.astype(np.float64)), 0)
    kept = np.minimum(counts, 1 + (np.cumsum(probabilities, 1) < mass).sum(1)).astype(np.int32)
    if rest is not None:
        dropped = np.where(place < kept[:, None], 0, probabilities).sum(1)
        with np.errstate(divide="ignore"):
            changed = np.log(np.exp(rest.astype(np.float64)) + dropped)
        rest = np.where(kept < counts, changed, rest).astype(np.float64)
    return kept, rest
