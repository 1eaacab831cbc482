"""distill-rl store info | verify | merge | export: looks after stores of teacher targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distill_rl.errors import StoreError
from distill_rl.observe.log import printable, status
from distill_rl.store import maintain


def info(store: Path) -> int:
    """Prints what a store holds, what it takes, and how sure its teacher is; returns 0.

    Raises:
        StoreError: no store, or a damaged one.
    """
    for line in maintain.info(store):
        print(printable(line))
    return 0


def verify(store: Path) -> int:
    """Reads all of a store, and returns 0 if nothing is damaged.

    Raises:
        StoreError: a file is damaged; every problem has a line with the file and the place in it.
    """
    with status(f"reading   {store}"):
        summary, problems = maintain.verify(store)
    StoreError.raise_all(problems)
    print(printable(summary))
    return 0


def merge(stores: Sequence[Path], out: Path) -> int:
    """Copies the targets of several stores into one, each piece once; prints what was copied, and returns 0.

    Raises:
        StoreError: the stores are of different teachers or kinds, one is damaged, or `out` cannot be written.
    """
    with status(f"merging   into {out}"):
        summary = maintain.merge(stores, out)
    print(printable(summary))
    return 0


def export(store: Path, out: Path) -> int:
    """Writes a store as Parquet files that other tools can read; prints where, and returns 0.

    Raises:
        StoreError: the store is damaged, or `out` is not a new folder that can be written.
    """
    with status(f"exporting {store}"):
        summary = maintain.export(store, out)
    print(printable(summary))
    return 0
