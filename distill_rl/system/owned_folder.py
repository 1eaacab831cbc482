"""Folders that disappear with their owner: each is locked by the process that made it, as long as that process lives.

A killed process cannot remove its folder. The next process that makes one removes every folder whose lock is free.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from distill_rl.system.files import NO_LOCKS

OWNER = "owner"
"""The file that the owner has locked."""


class OwnedFolder:
    """A new folder in `root`, which only this user can enter, named `prefix` and eight random hex digits."""

    def __init__(self, root: Path, prefix: str):
        """Makes the folder and locks it for this process; `path` is its path.

        Args:
            root: an existing folder.
            prefix: start of the folder's name.

        Raises:
            OSError: the folder cannot be made or locked. Nothing of it is left.
        """
        while True:
            self.path = root / f"{prefix}{secrets.token_hex(4)}"
            self.path.mkdir(mode=0o700)
            try:
                lock = claim(self.path)
            except OSError:
                _remove(self.path)
                raise
            # `remove_abandoned` in another process may remove the folder before it is locked here. Then make another one.
            if lock is not None:
                self._lock = lock
                return

    def remove(self, *names: str) -> None:
        """Removes the files of these names and the folder, and gives up its lock; call it once.

        A folder with other contents stays, without those files and its lock file. Nothing is raised for that.
        """
        _remove(self.path, *names)
        os.close(self._lock)


def remove_abandoned(root: Path, pattern: str, before: Callable[[Path], object] = lambda path: None) -> list[Path]:
    """Removes the folders of this user whose owners are dead, with their contents, and returns their paths.

    Folders whose owner cannot be determined are left alone. Nothing is raised for them.

    Args:
        pattern: glob in `root` that matches only folders made by `OwnedFolder`.
        before: called with each folder before it is removed; if it raises OSError, the folder stays.
    """
    removed = []
    for path in root.glob(pattern):
        with suppress(OSError):
            lock = claim(path) if path.lstat().st_uid == os.getuid() and not path.is_symlink() else None
            if lock is not None:
                try:
                    before(path)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)
                removed.append(path)
    return removed


def claim(folder: Path) -> int | None:
    """Locks a folder and returns the descriptor of its lock file, which the caller must close to give it up.

    Creates the lock file if necessary. Returns None, without waiting, if another process holds the lock or has removed
    the folder. On a file system without locks nobody holds any.

    Raises:
        OSError: it cannot be determined who owns the folder, for example because no descriptor is free.
    """
    owner = folder / OWNER
    with suppress(FileNotFoundError, BlockingIOError), ExitStack() as undo:
        lock = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        undo.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        if owner.stat().st_ino == os.fstat(lock).st_ino:
            undo.pop_all()
            return lock
    return None


def _remove(folder: Path, *names: str) -> None:
    """Removes the files of these names and the lock file in a folder, then the folder if it is empty; ignores errors.

    Needs no file descriptor, unlike `shutil.rmtree`, because there may be none left.
    """
    with suppress(OSError):
        for name in (*names, OWNER):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
