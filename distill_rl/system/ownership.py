"""Who may write to a folder. What a run continues from decides about everything it makes, so only this user and root
may own or change checkpoints and stores, and no link may lead to them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def problems(folder: Path) -> Iterator[str]:
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
