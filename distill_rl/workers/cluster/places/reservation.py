"""Reserves what a plan asks for: all at once, with a deadline, and in turn with the other runs of the cluster."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from distill_rl.config.schema import RayConfig
from distill_rl.errors import ConfigError
from distill_rl.workers.cluster.places.placement import PlacementPlan
from distill_rl.workers.cluster.places.turns import Queue, queue, ticket, waits

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
    """Whether the cluster has what the plan asks for, so that it is worth waiting for other runs.

    That is in all, and for each bundle on some node.
    """
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
