"""Folders: who may write to them, those that disappear with their owner, and those that are replaced as a whole."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from distill_rl.system.files import DRAFT, NO_LOCKS, lock_file, remove_drafts, sync, sync_tree

# Who may write to a folder. What a run continues from decides about everything it makes, so only this user and root
# may own or change checkpoints and stores, and no link may lead to them.

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def ownership_problems(folder: Path) -> Iterator[str]:
    """Yields why a folder and its contents cannot be trusted, one clause per bad entry; nothing if they can.

    No file is opened.
    The owner must be this user or root, neither group nor others may write, and there may be no links or special files.
    The folder must exist; what disappears from it meanwhile is not looked at.
    """
    for entry in (folder, *sorted(folder.rglob("*"))):
        name = "the folder" if entry == folder else str(entry.relative_to(folder))
        try:
            info = entry.lstat()
        except FileNotFoundError:
            if entry == folder:
                raise
            continue  # a draft that was renamed meanwhile
        if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
            yield f"{name} is a {'link' if entry.is_symlink() else 'special file'}"
        elif info.st_uid not in (os.geteuid(), 0):
            yield f"{name} belongs to user {info.st_uid}"
        elif info.st_mode & _OTHERS:
            yield f"{name} can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"


def parent_problem(folder: Path) -> str | None:
    """Why others could swap the entries of a folder, or None if they cannot; the folder must exist.

    They could if a user other than this one or root owns it, or if group or others may write to it and it is not
    sticky, as /tmp is.
    """
    info = folder.stat()
    if info.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {info.st_uid}"
    if info.st_mode & _OTHERS and not info.st_mode & stat.S_ISVTX:
        return f"it can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


def close_folder(folder: Path) -> None:
    """Removes the write permission of group and others from one folder, not from its contents.

    Does nothing if the folder does not exist or cannot be changed, for example because another user owns it.
    """
    with suppress(OSError):  # `parent_problem` reports a folder of another user
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & _OTHERS:
            folder.chmod(mode & ~_OTHERS)


def close_tree(folder: Path) -> None:
    """Removes the write permission of group and others from a folder and all its contents, links excepted.

    Raises:
        OSError: it does not exist, or an entry that others may write to belongs to another user.
    """
    for entry in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(entry.lstat().st_mode)
        if mode & _OTHERS and not entry.is_symlink():
            entry.chmod(mode & ~_OTHERS)


# Folders that disappear with their owner: each is locked by the process that made it, as long as that process lives.
#
# A killed process cannot remove its folder. The next process that makes one removes every folder whose lock is free.

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
                _remove_locked(self.path)
                raise
            # `remove_abandoned` in another process may remove the folder before it is locked here. Then make another one.
            if lock is not None:
                self._lock = lock
                return

    def remove(self, *names: str) -> None:
        """Removes the files of these names and the folder, and gives up its lock; call it once.

        A folder with other contents stays, without those files and its lock file. Nothing is raised for that.
        """
        _remove_locked(self.path, *names)
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


def _remove_locked(folder: Path, *names: str) -> None:
    """Removes the files of these names and the lock file in a folder, then the folder if it is empty; ignores errors."""
    # Needs no file descriptor, unlike `shutil.rmtree`, because there may be none left.
    with suppress(OSError):
        for name in (*names, OWNER):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


# Folders that are whole or not there at all, whichever process makes them and whenever it is killed.
#
# A replacement is made in a hidden folder beside its target, `.NAME.<8 hex digits>`, which belongs to the process that made it
# (`OwnedFolder`). The new folder is `new` in it, and takes the target's place in one of two ways:
#
#     exchange          one call exchanges new and old (Linux, on most local file systems)
#     set aside         where that is impossible, the old one is renamed to `old` in the hidden folder, and the new one takes its name;
#                       a kill in between leaves no target, and `restore` puts the old one back

PARTIAL = ".partial-"
_NEW, _OLD = "new", "old"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def made_once(root: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Returns the folder `root`/`name`, which is made if it does not exist and renamed into place when it is complete.

    A second process that needs the same folder waits for the first. What a process that died had begun is deleted.

    Args:
        make: makes the folder, which does not exist, at the given path.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as lock:
        lock_file(lock, root, wait=True)
        if not (root / name).is_dir():
            partial = root / f"{PARTIAL}{name}"
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            sync_tree(partial)
            partial.rename(root / name)
            sync(root)
    return root / name


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields an empty folder, which takes the place of `target` when the block ends without an error, durably.

    `target` need not exist, and neither need the folders above it. What killed replacements of it left is removed first.

    Raises:
        OSError: it cannot be written or renamed; `target` is unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    restore(target)
    hidden = OwnedFolder(target.parent, f".{target.name}.")
    new, old = hidden.path / _NEW, hidden.path / _OLD
    try:
        new.mkdir()
        yield new
        sync_tree(new)
        put_in_place(new, target, old)
    finally:
        _remove(new)
        if os.path.lexists(target):
            _remove(old)
        hidden.remove()


def put_in_place(new: Path, target: Path, aside: Path) -> None:
    """Gives a folder that is complete, and on the disk, its name; what had this name is afterwards at `new` or `aside`.

    Args:
        aside: in the same file system; used where two folders cannot be exchanged.

    Raises:
        OSError: it cannot be renamed; `target` is unchanged.
    """
    if not os.path.lexists(target):
        new.rename(target)
    else:
        try:
            _exchange(new, target)
        except OSError:
            target.rename(aside)
            try:
                new.rename(target)
            except OSError:
                aside.rename(target)
                raise
    sync(target.parent)


def restore(target: Path) -> None:
    """Puts a folder back that a killed replacement had set aside, and removes what else it left."""

    def put_back(hidden: Path) -> None:
        if others := {entry.name for entry in hidden.iterdir()} - {OWNER, _NEW, _OLD}:
            raise FileExistsError(f"{hidden} is not of a replacement: it has {others}")
        if (hidden / _OLD).exists() and not os.path.lexists(target):
            (hidden / _OLD).rename(target)
            sync(target.parent)

    remove_abandoned(target.parent, f".{glob.escape(target.name)}.{'[0-9a-f]' * 8}", before=put_back)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed processes left in a folder of replacing its files, folders and links, and puts back what is missing.

    No other process may point a link in it elsewhere meanwhile.
    """
    for path in sorted(folder.glob(".*")):
        if match := DRAFT.fullmatch(path.name):
            if path.is_symlink():
                path.unlink()
            remove_drafts(folder / match[1])
            restore(folder / match[1])


def point_at(link: Path, name: str) -> None:
    """Makes `link` a symbolic link to its neighbour `name`, in place of what it pointed at before.

    A folder in its place, which a copy that followed links has made of it, is kept as `copied-NAME-…`.
    """
    if link.is_dir() and not link.is_symlink():
        link.rename(link.with_name(f"copied-{link.name}-{secrets.token_hex(2)}"))
    fresh = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    fresh.symlink_to(name)
    fresh.replace(link)
    sync(link.parent)


def _exchange(one: Path, other: Path) -> None:
    """Exchanges two entries of a file system. Raises OSError where C library, kernel or file system cannot do it."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _remove(path: Path) -> None:
    """Removes a folder, a file or a link, if there is one; ignores errors."""
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
