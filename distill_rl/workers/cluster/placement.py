"""Where actors run: bundles of resources, asked for together, with a deadline and a table of what was short."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from distill_rl.config.facts import running_teachers
from distill_rl.config.schema import Config, ParallelConfig
from distill_rl.errors import ConfigError
from distill_rl.transport.choose import require_between_nodes

_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """One actor's place: its name, its bundle, and its share of the bundle."""

    actor: str
    bundle: int
    num_cpus: float
    num_gpus: float
    gpu_memory: float = 1.0
    """share of the GPU's memory that its process is held to; 1: all that it finds"""


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    bundles: tuple[Mapping[str, float], ...]
    placements: Mapping[str, ActorPlacement]
    nodes: tuple[str | None, ...] = ()
    """per bundle the node that it must be on; empty, or None: any"""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, with all that it has."""

    node_id: str
    resources: Mapping[str, float]


def student_name(dp_rank: int, tp_rank: int) -> str:
    return f"student-dp{dp_rank}-tp{tp_rank}"


def teacher_name(teacher: str, dp_rank: int, tp_rank: int) -> str:
    return f"{teacher}/dp{dp_rank}-tp{tp_rank}"


def aligner_name(index: int) -> str:
    return f"aligner-{index}"


EVALUATOR = "evaluator"


def actor_names(config: Config, num_aligners: int = 1) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Names of the student's ranks, of each running teacher's ranks, and of the aligners; ranks are dp-major."""
    student = [student_name(d, t) for d in range(config.student.parallel.dp) for t in range(config.student.parallel.tp)]
    teachers = {
        teacher.name: [
            teacher_name(teacher.name, d, t) for d in range(teacher.parallel.dp) for t in range(teacher.parallel.tp)
        ]
        for teacher in running_teachers(config)
    }
    return student, teachers, [aligner_name(i) for i in range(num_aligners)]


def place_actors(
    config: Config,
    num_aligners: int = 1,
    *,
    gpus: float,
    nodes: Sequence[Node] = (),
    needs: Mapping[str, float] | None = None,
) -> PlacementPlan:
    """Which actors sit together.

    `colocated`: bundle i holds one GPU (where there are any) shared by the i-th rank of the student and of every teacher.
    `disaggregated`: a bundle and a GPU for every rank; the student and the teachers on `nodes` of their own where
    there are enough of them.

    With `student.parallel.replicas` > 1 the ranks of a replica, which are neighbours, sit on one node where some node has
    room for all of them; otherwise, and without replicas, Ray packs the bundles on as few nodes as it can.

    Each actor has one logical CPU. An aligner has a bundle of its own, on any node, and no GPU; where `aligner.num_gpus`
    gives them a share of one, they sit with the ranks, in turn. The evaluator, which there is where suites are asked
    for, has a bundle of its own, with a GPU if one is left over; else `evaluate.gpu_share` of the first. The ranks there
    are then held to what is left of its memory, divided as they need it, so that the evaluator finds its share; ranks
    that no evaluator joins take what they find.

    Args:
        gpus: in the cluster.
        needs: memory that a rank of the student (`student`) and of each teacher needs, in any unit, by name; None: all
            alike.

    Raises:
        ConfigError: the guests of one GPU leave nothing of it to the ranks, or the transport that is asked for does not
            reach from node to node.
    """
    student, teachers, aligners = actor_names(config, num_aligners)
    apart = config.ray.placement == "disaggregated"
    groups = [student, *teachers.values()]
    tables = [[name] for group in groups for name in group] if apart else _side_by_side(groups)
    alone = [EVALUATOR] if config.evaluate.suites and (not gpus or gpus > len(tables)) else []
    shared = {EVALUATOR: config.evaluate.gpu_share} if config.evaluate.suites and not alone else {}
    share = config.aligner.num_gpus if gpus else 0.0
    bundles: list[dict[str, float]] = []
    placements: dict[str, ActorPlacement] = {}
    for index, together in enumerate(tables):
        guests = dict.fromkeys(aligners[index :: len(tables)] if share else [], share) | (shared if not index else {})
        left = 1.0 - sum(guests.values())
        if left <= 0:
            raise _too_greedy(guests, bool(share))
        bundles.append({"CPU": float(len(together) + len(guests))} | ({"GPU": 1.0} if gpus else {}))
        held = _memory_shares(together, left, needs) if gpus and EVALUATOR in guests else {}
        for name in together:
            placements[name] = ActorPlacement(
                name, index, 1.0, left / len(together) if gpus else 0.0, held.get(name, 1.0)
            )
        for name, part in guests.items():
            placements[name] = ActorPlacement(name, index, 1.0, part)
    ranks = len(bundles)
    for name in [*([] if share else aligners), *alone]:
        of_gpu = 1.0 if gpus and name in alone else 0.0
        bundles.append({"CPU": 1.0} | ({"GPU": of_gpu} if of_gpu else {}))
        placements[name] = ActorPlacement(name, len(bundles) - 1, 1.0, of_gpu)
    own = _own_nodes(config, bundles[:ranks], len(student), nodes)
    return PlacementPlan(tuple(bundles), placements, (*own, *[None] * (len(bundles) - len(own))) if own else ())


def _too_greedy(guests: Mapping[str, float], aligners: bool) -> ConfigError:
    """Guests of one GPU, aligners among them or not, that leave nothing of it."""
    return ConfigError(
        " and ".join(["aligner.num_gpus"] * aligners + ["evaluate.gpu_share"] * (EVALUATOR in guests)),
        "who shares a GPU with ranks must leave them some of it",
        f"{', '.join(guests)} with {sum(guests.values()):g} of one GPU",
        "lower it",
    )


def _own_nodes(
    config: Config, bundles: Sequence[Mapping[str, float]], num_student: int, nodes: Sequence[Node]
) -> Sequence[str] | None:
    """The nodes of the first bundles, where it matters; None where Ray may put all of them as it likes."""
    if config.ray.placement != "disaggregated":
        return _replicas_together(bundles, config.student.parallel, nodes)
    apart = _nodes_apart(bundles, num_student, nodes)
    if apart:
        require_between_nodes(config.transport)
    return apart


def _memory_shares(ranks: Sequence[str], left: float, needs: Mapping[str, float] | None) -> dict[str, float]:
    """`left` of a GPU's memory, divided among ranks in proportion to what they need."""
    if needs is None:
        return {name: left / len(ranks) for name in ranks}
    # `student-dp0-tp0` is a rank of the student, `big/dp0-tp0` of the teacher `big`
    need = {name: needs[name.rpartition("/")[0] or "student"] for name in ranks}
    return {name: left * its / sum(need.values()) for name, its in need.items()}


def _side_by_side(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[group[index] for group in groups if index < len(group)] for index in range(max(map(len, groups)))]


def _nodes_apart(bundles: Sequence[Mapping[str, float]], num_student: int, nodes: Sequence[Node]) -> list[str] | None:
    """A node for every bundle, so that none has a student's and a teacher's; None where the cluster has too few."""
    remaining = list(nodes)
    chosen: list[str] = []
    for group in (bundles[:num_student], bundles[num_student:]):
        waiting = list(group)
        while waiting and remaining:
            node = remaining.pop(0)
            room = Counter(node.resources)
            while waiting and all(room[name] >= amount for name, amount in waiting[0].items()):
                room.subtract(waiting.pop(0))
                chosen.append(node.node_id)
        if waiting:
            return None
    return chosen


def _replicas_together(
    bundles: Sequence[Mapping[str, float]], parallel: ParallelConfig, nodes: Sequence[Node]
) -> list[str] | None:
    """A node for every bundle with a rank of the student, the same for all ranks of a replica; None where there is one
    replica or one node, or where no node has room for a whole replica."""
    if parallel.replicas == 1 or len(nodes) < 2:
        return None
    rooms = {node.node_id: Counter(node.resources) for node in nodes}
    size = parallel.dp // parallel.replicas * parallel.tp
    chosen: list[str] = []
    for first in range(0, parallel.replicas * size, size):
        asked: Counter[str] = Counter()
        for bundle in bundles[first : first + size]:
            asked.update(bundle)  # type: ignore[arg-type]
        home = next((n for n, room in rooms.items() if all(room[r] >= count for r, count in asked.items())), None)
        if home is None:
            return None
        rooms[home].subtract(asked)
        chosen += [home] * size
    return chosen


@contextmanager
def reserve(plan: PlacementPlan, *, timeout_s: float, interrupted: Callable[[], None]) -> Iterator[PlacementGroup]:
    """Reserves all bundles at once; asks `interrupted`, which may raise, while it waits.

    Raises:
        ConfigError: the cluster cannot give them within `timeout_s`; names asked and available amounts.
    """
    labels = [{"ray.io/node-id": node} if node else {} for node in plan.nodes]
    pinned: dict[str, Any] = {"bundle_label_selector": labels} if labels else {}
    group = placement_group([dict(bundle) for bundle in plan.bundles], strategy="PACK", **pinned)
    try:
        deadline = time.monotonic() + timeout_s
        while not (ready := group.wait(_POLL_S)) and time.monotonic() < deadline:
            interrupted()
        if not ready:
            raise ConfigError(
                "placement",
                f"the actors' resources must be free within ray.placement_timeout_s={timeout_s:g}",
                shortage(plan, ray.cluster_resources(), ray.available_resources()),
                "lower parallel sizes, raise ray.num_cpus, or join a larger cluster",
            )
        yield group
    finally:
        remove_placement_group(group)


def shortage(plan: PlacementPlan, total: Mapping[str, float], available: Mapping[str, float]) -> str:
    """Asked, in the cluster and free, per resource, on one line."""
    asked: Counter[str] = Counter()
    for bundle in plan.bundles:
        asked.update(bundle)
    amounts = [
        f"{name}: asked {asked[name]:g}, cluster has {total.get(name, 0):g}, free {available.get(name, 0):g}"
        for name in sorted(asked)
    ]
    pinned = sorted({node for node in plan.nodes if node})
    return ", ".join(amounts) + (f", on the nodes {', '.join(pinned)}" if pinned else "")


def options(place_actors: ActorPlacement, group: PlacementGroup) -> dict:
    """Ray options of the actor at this seat. Never restarted by Ray: a restart would silently run queued calls on a fresh actor."""
    return {
        "name": place_actors.actor,
        "num_cpus": place_actors.num_cpus,
        "num_gpus": place_actors.num_gpus,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=place_actors.bundle
        ),
    }
