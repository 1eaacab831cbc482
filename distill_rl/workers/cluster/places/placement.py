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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distill_rl.config.layout import evaluator_problem, evaluators
from distill_rl.config.schema import Config, ParallelConfig, TeacherConfig
from distill_rl.errors import ConfigError
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
        ranks_by_bundle = _colocated(groups)
    num_gpus_split = {name: float(engines[name].gpus_per_rank) if gpus else 0.0 for name in split}
    aligner_share = config.aligner.num_gpus if gpus and ranks_by_bundle else 0.0
    gpus_used = len(ranks_by_bundle) + sum(num_gpus_split.values())
    evaluator_guests, other_evaluators = _place_evaluators(config, gpus, len(ranks_by_bundle), gpus_used)

    for i, all_ranks in enumerate(ranks_by_bundle):
        own_aligners = aligners[i :: len(ranks_by_bundle)] if aligner_share else []
        guests = dict.fromkeys(own_aligners, aligner_share)
        if evaluates := i < len(evaluator_guests):
            guests[evaluator_guests[i]] = config.evaluate.gpu_share
        placements |= _place_in_bundle(i, all_ranks, guests, engines, needs, gpus=gpus, evaluates=evaluates)
        bundles.append(_bundle(len(all_ranks) + len(guests), 1.0 if gpus else 0.0))
    for name, num_gpus in num_gpus_split.items():
        placements[name] = ActorPlacement(len(bundles), num_gpus, engines[name].origin.share_of_gpu(shared=False))
        bundles.append(_bundle(1, num_gpus))
    num_rank_bundles = len(bundles)

    others = dict.fromkeys([*readers, *([] if aligner_share else aligners)], 0.0) | other_evaluators
    for name, num_gpus in others.items():
        placements[name] = ActorPlacement(len(bundles), num_gpus)
        bundles.append(_bundle(1, num_gpus))

    pinned = _pinned_nodes(config, bundles[:num_rank_bundles], len(student), nodes)
    by_bundle = (*pinned, *[None] * (len(bundles) - len(pinned))) if pinned else ()
    return PlacementPlan(tuple(bundles), placements, by_bundle)


def _place_in_bundle(
    bundle: int,
    all_ranks: Sequence[str],
    guests: Mapping[str, float],
    engines: Mapping[str, TeacherConfig],
    needs: Mapping[str, float] | None,
    *,
    gpus: float,
    evaluates: bool,
) -> dict[str, ActorPlacement]:
    """Places ranks and their guests in a bundle with one GPU, if there are any; engines beside others become guests."""
    shared = [name for name in all_ranks if name in engines] if gpus and len(all_ranks) > 1 else []
    shares = dict(guests) | {name: engines[name].origin.share_of_gpu(shared=True) for name in shared}
    ranks = [name for name in all_ranks if name not in shared]
    left = 1.0 - sum(shares.values())
    if left < 0 or (ranks and left == 0):
        aligners_share = len(guests) > evaluates
        raise _no_gpu_left(shares, aligners_share=aligners_share, evaluates=evaluates, engines=bool(shared))
    memory = _memory_shares(ranks, left, needs) if evaluates or shared else {}
    placed = {}
    for name in ranks:
        of_memory = memory.get(name, engines[name].origin.share_of_gpu(shared=False) if name in engines else 1.0)
        placed[name] = ActorPlacement(bundle, left / len(ranks) if gpus else 0.0, of_memory)
    for name, share in shares.items():
        placed[name] = ActorPlacement(bundle, share, share if name in shared else 1.0)
    return placed


def _place_evaluators(
    config: Config, gpus: float, num_bundles: int, gpus_used: float
) -> tuple[list[str], dict[str, float]]:
    """Returns the evaluators that are guests of the first bundles, and the others with their numbers of GPUs."""
    if too_few := evaluator_problem(config, gpus):
        raise ConfigError.many([too_few])
    names = evaluator_names(EVALUATOR, evaluators(config)) if config.evaluate.suites else []
    gpus_each = config.evaluate.parallel.tp / max(1, len(names)) if gpus else 0.0
    are_guests = 0 < gpus < gpus_used + gpus_each * len(names)
    guests = names[:num_bundles] if are_guests else []
    return guests, dict.fromkeys(names[len(guests) :], gpus_each)


def _colocated(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns the names in bundle i: the i-th rank of every group that has so many, for each i."""
    return [[group[i] for group in groups if i < len(group)] for i in range(max(map(len, groups)))]


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


def _no_gpu_left(guests: Mapping[str, float], *, aligners_share: bool, evaluates: bool, engines: bool) -> ConfigError:
    """Returns the error for guests that take a whole GPU or more, naming the settings to lower."""
    keys = ["aligner.num_gpus"] if aligners_share else []
    if evaluates:
        keys.append("evaluate.gpu_share")
    if engines:
        keys.append("teachers[].vllm.gpu_share")
    return ConfigError(
        " and ".join(keys),
        "actors that share a GPU with ranks must leave them some of it",
        f"{', '.join(guests)} with {sum(guests.values()):g} of one GPU",
        "lower it",
    )


def _pinned_nodes(
    config: Config, bundles: Sequence[Mapping[str, float]], num_student: int, nodes: Sequence[Node]
) -> Sequence[str] | None:
    """Returns the node id for each of the first bundles; None or empty if Ray may put every bundle where it likes."""
    # Disaggregated runs separate student and teachers; otherwise the ranks of a student replica are kept on one node.
    if config.ray.placement != "disaggregated":
        return _replica_nodes(bundles, config.student.parallel, nodes)
    separate = _separate_nodes(bundles, num_student, nodes)
    if separate:
        require_between_nodes(config.transport)
    return separate


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
        needed: Counter[str] = Counter()
        for bundle in bundles[first : first + size]:
            needed.update(bundle)  # type: ignore[arg-type]
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
