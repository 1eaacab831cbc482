"""Runs on one cluster take turns: the one that has waited longest reserves its resources next.

A run that waits holds a ticket, and a run that works holds what it has reserved. Both are placement groups of Ray, whose names say
whose they are and since when. Ray lists them, and removes those of a driver that has ended in whatever way. So the queue needs no
process, and nobody waits for a run that is gone.
"""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from distill_rl.observe.log import say
from distill_rl.system.files import write_json

_PREFIX = "distill_rl:"
_HELD = ("CREATED", "RESCHEDULING")
"""States of a placement group whose run works, or has lost a node."""
_TICKET = {"node:__internal_head__": 0.001}
"""What a ticket reserves: next to nothing of something that every cluster has and no run asks for."""


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A run that waits or works on the cluster; in the order in which they came."""

    since: int
    """Nanoseconds since the epoch."""
    user: str
    run: str
    works: bool = False

    @property
    def group(self) -> str:
        """The name of its placement group."""
        return _PREFIX + json.dumps([self.since, self.user, self.run, self.works])

    @classmethod
    def of(cls, group: str) -> Self | None:
        """The holder of a placement group of this name; None if it is not of a run."""
        try:
            return cls(*json.loads(group.removeprefix(_PREFIX))) if group.startswith(_PREFIX) else None
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        return f"{self.run} ({self.user}, since {datetime.fromtimestamp(self.since / 1e9):%H:%M})"


@dataclass(frozen=True, slots=True)
class Queue:
    """Who is in the way of a run."""

    ahead: Sequence[Holder]
    """Those that wait and came before, the first one first."""
    working: Sequence[Holder]

    def __bool__(self) -> bool:
        return bool(self.ahead or self.working)

    def __str__(self) -> str:
        working = f"at work: {', '.join(map(str, self.working))}" if self.working else ""
        ahead = f"before it: {', '.join(map(str, self.ahead))}" if self.ahead else ""
        return "; ".join(filter(None, [f"number {self.place} in the queue", ahead, working]))

    @property
    def place(self) -> int:
        """Of the run itself, from 1."""
        return len(self.ahead) + 1


def waits(run: str) -> Holder:
    """The holder of this process's ticket for a run."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = f"user {os.getuid()}"
    return Holder(time.time_ns(), user, run)


def queue(holder: Holder) -> Queue:
    """Who is in the way of a run that waits."""
    found = [(of, group["state"]) for group in placement_group_table().values() if (of := Holder.of(group["name"]))]
    # What a run asks for when its turn has come is no more than its ticket until it is there.
    working = [of for of, state in found if of.works and state in _HELD and of.since != holder.since]
    ahead = [of for of, state in found if not of.works and state != "REMOVED" and of < holder]
    return Queue(tuple(sorted(ahead)), tuple(sorted(working)))


def tell(others: Queue, file: Path | None = None) -> None:
    """Prints who is in the way.

    Args:
        file: gets the place in the queue, for `distill-rl status`; None: none does.
    """
    say(f"waiting   {others}")
    if file is not None:
        write_json(file, {"place": others.place})


@contextmanager
def ticket(holder: Holder) -> Iterator[None]:
    """Puts a run into the queue while the block runs."""
    group = placement_group([_TICKET], name=holder.group)
    try:
        yield
    finally:
        remove_placement_group(group)
