"""Reserves what a plan asks for: all at once, with a deadline, and in turn with the other runs of the cluster."""

from __future__ import annotations

import getpass
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from distill_rl.config.schema import RayConfig
from distill_rl.errors import ConfigError
from distill_rl.observe.log import say
from distill_rl.system.files import write_json
from distill_rl.workers.cluster.places.placement import PlacementPlan

_POLL_S, _QUEUE_POLL_S = 0.25, 1.0
"""Seconds between two looks at what was asked for: alone, and in a queue, where every look asks the head for all groups."""

Reserved = tuple[PlacementPlan, PlacementGroup]
"""Where the actors of a run go, and what is reserved for them."""


@contextmanager
def reserve(
    make_plan: Callable[[], PlacementPlan],
    settings: RayConfig,
    run: str,
    *,
    interrupted: Callable[[], None],
    waiting: Callable[[Queue], None] = lambda queue: None,
    lost: Callable[[], object] = lambda: False,
) -> Iterator[Reserved]:
    """Reserves all bundles at once in the cluster, for as long as the block runs. Yields the plan and Ray's placement group.

    On a cluster that was joined, runs that came before go first.

    Args:
        make_plan: plans for the nodes of the present; called again while it waits for other runs, because nodes may come and go.
        run: its name, for the others.
        interrupted: called at every poll of the wait; may raise.
        waiting: called when the run begins to wait for others, and whenever these change.
        lost: whether Ray's daemons have died, so that nothing can be given back; asking would never end.

    Raises:
        ConfigError: the cluster cannot provide them within `ray.placement_timeout_s` although no other run is in the way, or within
            `ray.queue_timeout_s`; the message gives needed and available amounts, and the other runs.
    """
    plan = make_plan()
    holder = waits(run)
    began = alone_since = time.monotonic()
    group, nobody = None, Queue((), ())
    seen = nobody
    takes_turns = settings.address is not None and _could_hold(plan)
    with ExitStack() as stack:
        asked, in_line = stack.enter_context(ExitStack()), stack.enter_context(ExitStack())
        if settings.address is not None:
            in_line.enter_context(ticket(holder))
        while True:
            interrupted()
            others = queue(holder) if takes_turns else nobody
            if not others.ahead:
                present = make_plan() if seen else plan
                if group is None or present != plan:
                    asked.close()
                    plan, group = present, _ask(present, replace(holder, works=True).group)
                    asked.callback(_give_back, group, lost)
            poll_s = _QUEUE_POLL_S if others else _POLL_S
            if group is None:
                time.sleep(poll_s)
            elif group.wait(poll_s):
                break
            now = time.monotonic()
            if others:
                alone_since = now
                if others != seen:
                    seen = others
                    waiting(others)
            since, limit_s = (
                (began, settings.queue_timeout_s) if others else (alone_since, settings.placement_timeout_s)
            )
            if now - since > limit_s:
                raise _not_placed(plan, settings, others)
        in_line.close()
        yield plan, group


def _give_back(group: PlacementGroup, lost: Callable[[], object]) -> None:
    if not lost():
        remove_placement_group(group)


def _ask(plan: PlacementPlan, name: str) -> PlacementGroup:
    """Asks Ray for all bundles of a plan, without waiting for them."""
    labels = [{"ray.io/node-id": node} if node else {} for node in plan.nodes]
    pinned: dict[str, Any] = {"bundle_label_selector": labels} if labels else {}
    return placement_group([dict(bundle) for bundle in plan.bundles], strategy="PACK", name=name, **pinned)


def _could_hold(plan: PlacementPlan) -> bool:
    """Whether the cluster has what the plan asks for, so that it is worth waiting for other runs."""
    # That is in all, and for each bundle on some node.
    total, nodes = ray.cluster_resources(), [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return _has(total, _asked(plan)) and all(any(_has(node, bundle) for node in nodes) for bundle in plan.bundles)


def _has(resources: Mapping[str, float], asked: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= amount for name, amount in asked.items())


def _not_placed(plan: PlacementPlan, settings: RayConfig, others: Queue) -> ConfigError:
    """Returns the error for resources that are not free in time."""
    amounts = shortage(plan, ray.cluster_resources(), ray.available_resources())
    if others:
        rule = f"its turn must come within ray.queue_timeout_s={settings.queue_timeout_s:g}"
        remedy = "raise it, wait for the others, or end one (`distill-rl stop NAME`)"
        return ConfigError("placement", rule, f"{others}; {amounts}", remedy)
    rule = f"the actors' resources must be free within ray.placement_timeout_s={settings.placement_timeout_s:g}"
    return ConfigError("placement", rule, amounts, "lower parallel sizes, raise ray.num_cpus, or join a larger cluster")


def _asked(plan: PlacementPlan) -> Counter[str]:
    """The amount of each resource that the plan asks for."""
    asked: Counter[str] = Counter()
    for bundle in plan.bundles:
        asked.update(bundle)
    return asked


def shortage(plan: PlacementPlan, total: Mapping[str, float], available: Mapping[str, float]) -> str:
    """Returns one line with the amount of each resource that the plan asks for, the cluster has, and is free.

    It ends with the nodes to which bundles are pinned, if any.
    """
    asked = _asked(plan)
    amounts = [
        f"{name}: asked {asked[name]:g}, cluster has {total.get(name, 0):g}, free {available.get(name, 0):g}"
        for name in sorted(asked)
    ]
    pinned = sorted({node for node in plan.nodes if node})
    return ", ".join(amounts) + (f", on the nodes {', '.join(pinned)}" if pinned else "")


# Runs on one cluster take turns: the one that has waited longest reserves its resources next.

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
