"""Folders that are made once and reused: whole or not there at all, whichever process makes them."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from distill_rl.system.files import sync, sync_tree

PARTIAL = ".partial-"


def made_once(root: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Returns the folder `root`/`name`, which is made if it does not exist and renamed into place when it is complete.

    A second process that needs the same folder waits for the first. What a process that died had begun is deleted.

    Args:
        make: makes the folder, which does not exist, at the given path.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / name).is_dir():
            partial = root / f"{PARTIAL}{name}"
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            sync_tree(partial)
            partial.rename(root / name)
            sync(root)
    return root / name


def point_at(link: Path, name: str) -> None:
    """Makes `link` a symbolic link to its neighbour `name`, in place of what it pointed at before."""
    fresh = link.with_name(f"{PARTIAL}{link.name}-{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(name)
    fresh.replace(link)
    sync(link.parent)
