"""The folder in which indices of lines and Parquet copies of compressed data are kept, by path, size and time of a file."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from distill_rl.errors import DataError

_ABANDONED_S = 24 * 3600.0


def _silent(_: str) -> None:
    """Says nothing."""


@dataclass(frozen=True, slots=True)
class Cache:
    """What opening data may write, and how it tells the user."""

    write: bool = True
    """False: what is in the cache is used, and nothing is added."""
    say: Callable[[str], None] = _silent
    """Called with one line before anything that takes long."""

    @property
    def folder(self) -> Path:
        """`distill_rl` in the cache folder of `datasets`, which is found without importing that."""
        home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        hub = os.environ.get("HF_HOME") or Path(home, "huggingface")
        return Path(os.environ.get("HF_DATASETS_CACHE") or Path(hub, "datasets")).expanduser() / "distill_rl"

    def entry(self, path: Path, about: str, suffix: str) -> Path:
        """Where something that is derived from a file is kept; an edited file has another entry.

        Args:
            about: what else it depends on.
        """
        status = path.stat()
        name = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{about}"
        return self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}{suffix}"


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields the path of a file to write, which becomes `target` when the block ends without an error.

    Raises:
        DataError: the folder cannot be made or written, or the disk is full.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(target.parent, error) from error
    for abandoned in target.parent.glob("*.tmp.*"):  # by a killed process, a day ago or longer
        with suppress(OSError):  # somebody else deleted it
            if time.time() - abandoned.stat().st_mtime > _ABANDONED_S:
                abandoned.unlink()
    partial = target.with_suffix(f".{secrets.token_hex(4)}.tmp{target.suffix}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise _unwritable(target.parent, error) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def _unwritable(folder: Path, error: OSError) -> DataError:
    rule = "is writable and has room for what is derived from the data"
    return DataError(str(folder), rule, str(error), "set HF_DATASETS_CACHE to another folder")
