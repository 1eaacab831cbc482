"""Names of files; atomic and durable writes, sizes and hashes of files."""

from __future__ import annotations

import difflib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import resource
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from distill_rl.errors import ConfigError

DRAFT = re.compile(r"\.(.+)\.[0-9a-f]{8}")
"""The name of what is made beside a file or folder that it will replace, whose name it holds."""

_OTHER_FILES = 512
"""Files, sockets and pipes that a process has open beside those that `allow_open_files` is asked for."""
MAX_NAME_BYTES = 200
"""Of a name that users choose; file systems take 255, and names of files add to it."""


def name_problem(name: str) -> str | None:
    """Why files and folders cannot have this name in all places where it is written, scripts among them; None: they can."""
    if name in ("", ".", "..") or any(letter in name for letter in "/\\\0"):
        return "must be the name of one folder"
    if not name.isprintable():
        return "must not contain control characters"
    if any(letter in name for letter in "'\"`$"):
        return "must not contain quotes or $, because it is written into scripts"
    if (size := len(name.encode())) > MAX_NAME_BYTES:
        return f"may have {MAX_NAME_BYTES} bytes at most, because files are named after it; it has {size}"
    return None


def nearby(path: Path) -> str:
    """`did you mean PATH?` with the most similar name in the folder of a path that does not exist; empty if none is."""
    names: list[str] = []
    with suppress(OSError):  # there is no such folder, or it may not be read
        names = [entry.name for entry in path.parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else ""


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Writes a file that appears complete or not at all: writes beside it, flushes to disk, renames.

    Missing folders above it are created, an existing file is replaced, and text is encoded as UTF-8. What a killed process
    left of writing the same file is removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_drafts(path)
    temporary, file = _draft_of(path)
    try:
        with file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def _draft_of(path: Path) -> tuple[Path, BinaryIO]:
    """A new file beside another, locked: what is not locked was left by a killed process (`remove_drafts`)."""
    while True:
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        file = draft.open("xb")
        with suppress(OSError):  # a file system without locks, where no draft is removed
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return draft, file
        file.close()  # it was removed before it was locked


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What `flock` answers on a file system without locks."""


def lock_file(file: IO[Any] | int, folder: Path, *, wait: bool = False) -> bool:
    """Locks an open file for this process as long as it is open; False if another process holds the lock, unless `wait` is set.

    Args:
        folder: named by the error.

    Raises:
        ConfigError: the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        rule, remedy = (
            "must be on a file system with locks (flock)",
            "mount it with them (Lustre: -o flock), or choose a folder elsewhere",
        )
        raise ConfigError(f"{folder}", rule, f"{error.strerror}", remedy) from None
    return True


def remove_drafts(path: Path) -> None:
    """Removes what killed processes left beside a file of writing it."""
    for draft in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}"):
        with suppress(OSError), draft.open("r+b") as file:  # a folder, or another process writes it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()


def write_json(path: str | Path, value: Any) -> None:
    """Writes a value as indented JSON with sorted keys, atomically, as `write_atomic` does.

    Raises:
        ValueError: it contains NaN or infinity.
        TypeError: it contains something that JSON cannot express.
    """
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def write_json_lines(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON objects to a file, one per line, atomically, as `write_atomic` does."""
    write_atomic(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects in the complete lines of a file; nothing if there is no file.

    Invalid lines are skipped, and so is a last line that a killed process left half-written.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield row


def append_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends JSON objects to a file, one per line, durably, after ending a line that a killed process left half-written."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write("".join(f"{json.dumps(row)}\n" for row in rows).encode())
        file.flush()
        os.fsync(file.fileno())


def allow_open_files(count: int) -> None:
    """Raises this process's limit of open files, if it can and must, so that it may have `count` beside all others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * count + _OTHER_FILES  # twice, so that the limit is not raised for each further file
    if soft == resource.RLIM_INFINITY or soft >= count + _OTHER_FILES:
        return
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def sync(path: str | Path) -> None:
    """Flushes a file to disk, or a directory, so that files renamed, created or deleted in it stay so after a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: str | Path) -> None:
    """Flushes every file and directory under `root`, and `root` itself, to disk."""
    for directory, _, names in os.walk(root):
        for name in names:
            sync(Path(directory) / name)
        sync(directory)


def size_text(count: int) -> str:
    """A number of bytes as `1.2 GiB`, or below a gibibyte `12.3 MiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def size_of(root: str | Path) -> int:
    """Bytes of all files in the folder `root` and below; 0 if there is no such folder.

    A link counts with its own size, not its target's. Files may be deleted meanwhile.
    """
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(directory) / name).lstat().st_size
    return total


def sha256(path: str | Path) -> str:
    """The SHA-256 of the contents of a file, in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
