"""Whether a folder may be read that holds pickles, which run code: nobody else may own it, write to it, or have led us to it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def problems(folder: Path) -> Iterator[str]:
    """Why a folder and what is in it cannot be trusted, one clause per entry; nothing is opened.

    Owner must be this user or root; neither group nor others may write; there are no links and no devices.
    """
    for entry in (folder, *sorted(folder.rglob("*"))):
        name = "the folder" if entry == folder else str(entry.relative_to(folder))
        found = entry.lstat()
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            yield f"{name} is a {'link' if entry.is_symlink() else 'special file'}"
        elif found.st_uid not in (os.geteuid(), 0):
            yield f"{name} belongs to user {found.st_uid}"
        elif found.st_mode & _OTHERS:
            yield f"{name} can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"


def place_problem(folder: Path) -> str | None:
    """Why others could exchange what lies directly in a folder, or None. In a sticky one, like /tmp, they cannot."""
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS and not found.st_mode & stat.S_ISVTX:
        return f"it can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def close_place(folder: Path) -> None:
    """Takes the right to write to one folder from group and others, if there is one and it is this user's."""
    with suppress(OSError):  # what is somebody else's is found by `place_problem`
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & _OTHERS:
            folder.chmod(mode & ~_OTHERS)


def close_to_others(folder: Path) -> None:
    """Takes the right to write from group and others, whatever the umask gave them."""
    for entry in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(entry.lstat().st_mode)
        if mode & _OTHERS and not entry.is_symlink():
            entry.chmod(mode & ~_OTHERS)
