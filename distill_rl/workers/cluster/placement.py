"""Where actors run: bundles of resources that are reserved together, with a deadline and a table of what was short.

A bundle is a set of resources on one node. `place_actors` decides in four steps:

1. Ranks. `colocated`: bundle i holds the i-th rank of the student and of every teacher, which share its GPU.
   `disaggregated`: every rank has a bundle and a GPU of its own. An engine on several GPUs has a bundle with
   these for itself in either case.
2. Guests. Aligners with a share of a GPU (`aligner.num_gpus`) join the bundles with one GPU in turn. The evaluators
   (one, or one per rank of `evaluate.parallel.tp`) join the first of them, one each, if the cluster has too few GPUs
   left over for them. An engine takes its memory at its start, so beside other ranks it counts as a guest with
   the share `teachers[].vllm.gpu_share`. The other ranks of a bundle divide the rest of its GPU evenly: each gets
   (1 - sum of the guests' shares) / number of these ranks.
3. Other actors get a bundle each: ranks of teachers that only read a store, aligners without a GPU, and evaluators that
   are no guests.
4. Nodes. Ray packs bundles on as few nodes as it can, unless `disaggregated` or a student with replicas asks for a
   fixed node per rank and the cluster has room for that.
"""

from __future__ import annotations

import getpass
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from distill_rl.config.layout import evaluator_problem, evaluators
from distill_rl.config.schema import Config, ParallelConfig, RayConfig
from distill_rl.errors import ConfigError
from distill_rl.observe.log import say
from distill_rl.system.files import write_json
from distill_rl.transport.choose import require_between_nodes

EVALUATOR = "evaluator"


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """One actor's bundle and its share of it, besides one logical CPU."""

    bundle: int
    num_gpus: float
    gpu_memory: float = 1.0
    """The share of the GPU's memory that its process may use; 1 sets no limit."""


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    bundles: tuple[Mapping[str, float], ...]
    placements: Mapping[str, ActorPlacement]
    """By actor name."""
    nodes: tuple[str | None, ...] = ()
    """Per bundle, the node that it must be on (None: any node). Empty if no bundle is pinned."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, with its total resources."""

    node_id: str
    resources: Mapping[str, float]


def actor_names(config: Config, num_aligners: int = 1) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Returns the names of the student's ranks, of each running teacher's ranks (by teacher), and of the aligners.

    Ranks are in the order (dp_rank · sp + sp_rank) · tp + tp_rank, such as `student-dp0-tp1` and `big/dp0-tp1`, or
    `student-dp0-sp1-tp0` where rows are divided.
    """
    student = [f"student-{rank}" for rank in _rank_names(config.student.parallel)]
    teachers = {}
    for teacher in config.running_teachers:
        parallel = replace(teacher.parallel, tp=1) if teacher.origin.engine else teacher.parallel
        teachers[teacher.name] = [f"{teacher.name}/{rank}" for rank in _rank_names(parallel)]
    return student, teachers, [f"aligner-{i}" for i in range(num_aligners)]


def evaluator_names(evaluator: str, ranks: int) -> list[str]:
    """The names of the actors that hold one copy of an evaluated model, such as evaluator, or evaluator-tp0, …"""
    return [evaluator] if ranks == 1 else [f"{evaluator}-tp{tp_rank}" for tp_rank in range(ranks)]


def _rank_names(parallel: ParallelConfig) -> list[str]:
    """The names of a group's ranks, such as dp0-tp1 or dp0-sp1-tp0, with tp changing fastest."""
    positions = [f"-sp{sp_rank}" for sp_rank in range(parallel.sp)] if parallel.sp > 1 else [""]
    return [
        f"dp{dp_rank}{position}-tp{tp_rank}"
        for dp_rank in range(parallel.dp)
        for position in positions
        for tp_rank in range(parallel.tp)
    ]


def place_actors(
    config: Config,
    num_aligners: int = 1,
    *,
    gpus: float,
    nodes: Sequence[Node] = (),
    needs: Mapping[str, float] | None = None,
) -> PlacementPlan:
    """Plans the bundles and every actor's place in them, as described at the top of this module. Reserves nothing.

    Every actor gets one logical CPU. Beside an evaluator that is a guest, or an engine, the ranks are limited to
    what is left of the GPU's memory, divided in proportion to `needs`, so that these find their share. Other ranks are
    not limited.

    Args:
        gpus: number of GPUs in the cluster; 0: all actors run on CPUs.
        nodes: of the cluster, those with most resources first. Empty: no bundle is pinned to a node.
        needs: memory that a rank of the student (`student`) and of each teacher needs, by name, without those that an
            engine runs; None: equal needs.

    Raises:
        ConfigError: the guests of a GPU leave nothing of it to the ranks, the cluster has too few GPUs for
            `evaluate.parallel.tp`, or the transport works only within a node.
    """
    student, teachers, aligners = actor_names(config, num_aligners)
    running, bundles, placements = config.running_teachers, list[dict[str, float]](), dict[str, ActorPlacement]()
    readers = [name for t in running if not t.gpus_per_rank for name in teachers.pop(t.name)]
    engines = {name: t for t in running if t.origin.engine for name in teachers[t.name]}
    split = [name for t in running if t.gpus_per_rank > 1 for name in teachers.pop(t.name)]
    groups = [student, *teachers.values()]
    if config.ray.placement == "disaggregated":
        ranks_by_bundle = [[name] for group in groups for name in group]
    else:
        # Bundle i: the i-th rank of every group that has so many.
        ranks_by_bundle = [[group[i] for group in groups if i < len(group)] for i in range(max(map(len, groups)))]
    num_gpus_split = {name: float(engines[name].gpus_per_rank) if gpus else 0.0 for name in split}
    aligner_share = config.aligner.num_gpus if gpus and ranks_by_bundle else 0.0
    gpus_used = len(ranks_by_bundle) + sum(num_gpus_split.values())

    if too_few := evaluator_problem(config, gpus):
        raise ConfigError.many([too_few])
    all_evaluators = evaluator_names(EVALUATOR, evaluators(config)) if config.evaluate.suites else []
    gpus_each = config.evaluate.parallel.tp / max(1, len(all_evaluators)) if gpus else 0.0
    are_guests = 0 < gpus < gpus_used + gpus_each * len(all_evaluators)
    evaluator_guests = all_evaluators[: len(ranks_by_bundle)] if are_guests else []
    other_evaluators = dict.fromkeys(all_evaluators[len(evaluator_guests) :], gpus_each)

    for i, all_ranks in enumerate(ranks_by_bundle):
        own_aligners = aligners[i :: len(ranks_by_bundle)] if aligner_share else []
        guests = dict.fromkeys(own_aligners, aligner_share)
        if evaluates := i < len(evaluator_guests):
            guests[evaluator_guests[i]] = config.evaluate.gpu_share
        shared = [name for name in all_ranks if name in engines] if gpus and len(all_ranks) > 1 else []
        guests |= {name: engines[name].origin.share_of_gpu(shared=True) for name in shared}
        ranks = [name for name in all_ranks if name not in shared]
        left = 1.0 - sum(guests.values())
        if left < 0 or (ranks and left == 0):
            share_it = {
                "aligner.num_gpus": own_aligners,
                "evaluate.gpu_share": evaluates,
                "teachers[].vllm.gpu_share": shared,
            }
            what = " and ".join(key for key, shares_it in share_it.items() if shares_it)
            value = f"{', '.join(guests)} with {sum(guests.values()):g} of one GPU"
            raise ConfigError(what, "actors that share a GPU with ranks must leave them some of it", value, "lower it")
        memory = _memory_shares(ranks, left, needs) if evaluates or shared else {}
        for name in ranks:
            of_memory = memory.get(name, engines[name].origin.share_of_gpu(shared=False) if name in engines else 1.0)
            placements[name] = ActorPlacement(i, left / len(ranks) if gpus else 0.0, of_memory)
        for name, share in guests.items():
            placements[name] = ActorPlacement(i, share, share if name in shared else 1.0)
        bundles.append(_bundle(len(ranks) + len(guests), 1.0 if gpus else 0.0))
    for name, num_gpus in num_gpus_split.items():
        placements[name] = ActorPlacement(len(bundles), num_gpus, engines[name].origin.share_of_gpu(shared=False))
        bundles.append(_bundle(1, num_gpus))
    num_rank_bundles = len(bundles)

    others = dict.fromkeys([*readers, *([] if aligner_share else aligners)], 0.0) | other_evaluators
    for name, num_gpus in others.items():
        placements[name] = ActorPlacement(len(bundles), num_gpus)
        bundles.append(_bundle(1, num_gpus))

    if config.ray.placement != "disaggregated":  # the ranks of a student's replica are kept on one node
        pinned = _replica_nodes(bundles[:num_rank_bundles], config.student.parallel, nodes)
    elif pinned := _separate_nodes(bundles[:num_rank_bundles], len(student), nodes):
        require_between_nodes(config.transport)
    by_bundle = (*pinned, *[None] * (len(bundles) - len(pinned))) if pinned else ()
    return PlacementPlan(tuple(bundles), placements, by_bundle)


def _bundle(num_cpus: int, num_gpus: float) -> dict[str, float]:
    """Returns the resources of one bundle of a Ray placement group; without GPUs it has no entry for them."""
    return {"CPU": float(num_cpus)} | ({"GPU": num_gpus} if num_gpus else {})


def _memory_shares(ranks: Sequence[str], left: float, needs: Mapping[str, float] | None) -> dict[str, float]:
    """Divides `left`, a share of a GPU's memory, among ranks in proportion to their needs; returns the shares by name."""
    if needs is None or len(ranks) == 1:
        return {name: left / len(ranks) for name in ranks}
    # The key of `student-dp0-tp0` is `student`, that of `big/dp0-tp0` is `big`.
    need = {name: needs[name.rpartition("/")[0] or "student"] for name in ranks}
    total = sum(need.values())
    return {name: left * rank_need / total for name, rank_need in need.items()}


def _separate_nodes(
    bundles: Sequence[Mapping[str, float]], num_student: int, nodes: Sequence[Node]
) -> list[str] | None:
    """Returns a node id for every bundle, such that no node has ranks of both the student and a teacher."""
    # Nodes are filled one after the other, first with the student's bundles, the first `num_student`, then, from a fresh node on, with
    # those of the teachers. None if the cluster has too few nodes.
    unused = list(nodes)
    chosen: list[str] = []
    for group in (bundles[:num_student], bundles[num_student:]):
        waiting = list(group)
        while waiting and unused:
            node = unused.pop(0)
            room = Counter(node.resources)
            while waiting and _take(room, waiting[0]):
                waiting.pop(0)
                chosen.append(node.node_id)
        if waiting:
            return None
    return chosen


def _replica_nodes(
    bundles: Sequence[Mapping[str, float]], parallel: ParallelConfig, nodes: Sequence[Node]
) -> list[str] | None:
    """Returns a node id for every bundle with a rank of the student, the same for all ranks of a replica."""
    # Each replica, whose ranks are neighbours, takes the first node that has room for all of it. None if there is only one replica or one
    # node, or if some replica fits on no node.
    if parallel.replicas == 1 or len(nodes) < 2:
        return None
    rooms = {node.node_id: Counter(node.resources) for node in nodes}
    size = parallel.dp // parallel.replicas * parallel.ranks_per_row
    chosen: list[str] = []
    for first in range(0, parallel.replicas * size, size):
        needed = _asked(bundles[first : first + size])
        node_id = next((node_id for node_id, room in rooms.items() if _take(room, needed)), None)
        if node_id is None:
            return None
        chosen += [node_id] * size
    return chosen


def _take(room: Counter[str], needed: Mapping[str, float]) -> bool:
    """Subtracts `needed` from a node's `room` and returns True; if any is missing, only returns False."""
    if any(room[resource] < amount for resource, amount in needed.items()):
        return False
    room.subtract(needed)  # type: ignore[arg-type]
    return True


# Reserves what a plan asks for: all at once, with a deadline, and in turn with the other runs of the cluster.

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
            in_line.enter_context(_bundles([_TICKET], holder.group, lost))
        while True:
            interrupted()
            others = queue(holder) if takes_turns else nobody
            if not others.ahead:
                present = make_plan() if seen else plan
                if group is None or present != plan:
                    asked.close()
                    labels = [{"ray.io/node-id": node} if node else {} for node in present.nodes]
                    pinned = {"bundle_label_selector": labels} if labels else {}
                    name = replace(holder, works=True).group
                    plan, group = present, asked.enter_context(_bundles(present.bundles, name, lost, **pinned))
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
            waited, limit_s = now - alone_since, settings.placement_timeout_s
            if others:
                waited, limit_s = now - began, settings.queue_timeout_s
            if waited > limit_s:
                raise _not_placed(plan, settings, others)
        in_line.close()
        yield plan, group


@contextmanager
def _bundles(
    bundles: Sequence[Mapping[str, float]], name: str, lost: Callable[[], object], **pinned: Any
) -> Iterator[PlacementGroup]:
    """Asks Ray for bundles, without waiting for them, and gives them back when the block ends."""
    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK", name=name, **pinned)
    try:
        yield group
    finally:
        if not lost():
            remove_placement_group(group)


def _could_hold(plan: PlacementPlan) -> bool:
    """Whether the cluster has what the plan asks for, so that it is worth waiting for other runs."""
    # That is in all, and for each bundle on some node.
    total, nodes = ray.cluster_resources(), [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return _has(total, _asked(plan.bundles)) and all(any(_has(node, each) for node in nodes) for each in plan.bundles)


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


def _asked(bundles: Iterable[Mapping[str, float]]) -> Counter[str]:
    """The amount of each resource that bundles ask for."""
    asked: Counter[str] = Counter()
    for bundle in bundles:
        asked.update(bundle)
    return asked


def shortage(plan: PlacementPlan, total: Mapping[str, float], available: Mapping[str, float]) -> str:
    """Returns one line with the amount of each resource that the plan asks for, the cluster has, and is free.

    It ends with the nodes to which bundles are pinned, if any.
    """
    asked = _asked(plan.bundles)
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
