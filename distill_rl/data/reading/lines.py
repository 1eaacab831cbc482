"""Lines of a file by number, through an index of every few MiB: the file is neither copied nor held in memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distill_rl.data.reading.cache import Cache, replacing
from distill_rl.errors import DataError

BLOCK_BYTES = 4 << 20
"""Bytes that a block has at least, but for the last of a file. The order of large data depends on it."""
_SPACE = np.isin(np.arange(256), np.frombuffer(b" \t\r\n\v\f", np.uint8))


@dataclass(frozen=True, slots=True)
class LineIndex:
    """Where the blocks of a file begin, and the file ends; lines that are not blank are rows."""

    offsets: np.ndarray
    """int64 [B + 1], in bytes."""
    rows: np.ndarray
    """int64 [B + 1], rows before each offset."""

    @classmethod
    def of(cls, path: Path, cache: Cache) -> LineIndex:
        """The index of a file, from the cache or by reading the file once, at the speed of the disk.

        One that cannot be written to the cache is said, and made again next time.

        Raises:
            OSError: the file cannot be read.
        """
        entry = cache.entry(path, f"lines {BLOCK_BYTES}", ".npy")
        with suppress(OSError, ValueError, EOFError):  # there is none, or it is damaged
            return cls(*np.load(entry))
        index = _scan(path)
        if cache.write:
            try:
                with replacing(entry) as partial:
                    np.save(partial, np.stack([index.offsets, index.rows]))
            except (OSError, DataError) as error:
                cache.say(f"not kept   the index of {path}, which is made again at every start: {error}")
        return index


def _scan(path: Path) -> LineIndex:
    """Reads a file and counts the rows of its blocks, each of which ends with a line."""
    offsets, rows = [0], [0]
    with path.open("rb") as file:  # a buffered read is full unless the file ends
        parts: list[bytes] = []  # of the block; a line may be longer than it
        while chunk := file.read(BLOCK_BYTES):
            end = chunk.rfind(b"\n") + 1
            if not end:
                parts.append(chunk)
                continue
            block = b"".join([*parts, chunk[:end]])
            parts = [chunk[end:]]
            offsets.append(offsets[-1] + len(block))
            rows.append(rows[-1] + _count(block))
    if rest := b"".join(parts):
        offsets.append(offsets[-1] + len(rest))
        rows.append(rows[-1] + _count(rest))
    return LineIndex(np.array(offsets, dtype=np.int64), np.array(rows, dtype=np.int64))


def _count(block: bytes) -> int:
    """The number of lines that are not blank."""
    data = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    starts = np.concatenate([[0], ends + 1])
    starts = starts[starts < len(data)]
    suspect = starts[_SPACE[data[starts]]]  # a blank line begins with white space, or is its line break alone
    return len(starts) - sum(not block[start : _line_end(block, start)].strip() for start in suspect.tolist())


def _line_end(block: bytes, start: int) -> int:
    end = block.find(b"\n", start)
    return len(block) if end < 0 else end
