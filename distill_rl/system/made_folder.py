"""Folders that are whole or not there at all, whichever process makes them and whenever it is killed.

A replacement is made in a hidden folder beside its target, `.NAME.<8 hex digits>`, which belongs to the process that made it
(`OwnedFolder`). The new folder is `new` in it, and takes the target's place in one of two ways:

    exchange          one call exchanges new and old (Linux, on most local file systems)
    set aside         where that is impossible, the old one is renamed to `old` in the hidden folder, and the new one takes its name;
                      a kill in between leaves no target, and `restore` puts the old one back
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distill_rl.system.files import DRAFT, lock_file, remove_drafts, sync, sync_tree
from distill_rl.system.owned_folder import OWNER, OwnedFolder, remove_abandoned

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
