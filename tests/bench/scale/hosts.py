"""Several ranks in one process, because a machine with few cores cannot hold hundreds of processes.

The driver makes the same calls with the same references, and gets the same results; only who answers differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distill_rl.workers.actors.rank import Worker
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.cluster.placement import PlacementPlan

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


class RankHost(Worker):
    """The actor of several neighbouring ranks of a group.

    Args:
        first: rank.
        count: ranks of a process, if there are so many.
        size: ranks of the group.
        worker: their class.
        arguments: of each of them, after its rank.
    """

    def __init__(self, first: int, count: int, size: int, worker: type, arguments: Sequence[Any]):
        self._workers = {rank: worker(rank, *arguments) for rank in range(first, min(first + count, size))}

    def call(self, rank: int, method: str, *arguments: Any) -> Any:
        """Calls a method of a rank."""
        return getattr(self._workers[rank], method)(*arguments)


class HostedMethod:
    """Stands for a method of the actor of one rank."""

    def __init__(self, method: Any, rank: int, name: str):
        self._method, self._rank, self._name = method, rank, name

    def options(self, **options: Any) -> HostedMethod:
        return HostedMethod(self._method.options(**options), self._rank, self._name)

    def remote(self, *arguments: Any) -> Any:
        return self._method.remote(self._rank, self._name, *arguments)


class HostedRank:
    """Stands for the actor of one rank."""

    def __init__(self, host: Any, rank: int):
        self._host, self._rank, self._actor_id = host, rank, host._actor_id

    def __getattr__(self, name: str) -> HostedMethod:
        if name.startswith("_"):  # asked for while it is unpickled
            raise AttributeError(name)
        return HostedMethod(self._host.call, self._rank, name)


class HostedGroup(WorkerGroup):
    """A group with `per_process` neighbouring ranks in each process.

    Args:
        worker: class of the ranks.
        names, plan, placement, calls, arguments: as of `WorkerGroup`. A process takes the place of its first rank.
    """

    def __init__(
        self,
        per_process: int,
        worker: type,
        names: Sequence[str],
        plan: PlacementPlan,
        placement: PlacementGroup,
        calls: Calls,
        *arguments: Any,
    ):
        self._per_process, self._hosts = per_process, dict[int, Any]()
        super().__init__(RankHost, names, plan, placement, calls, per_process, len(names), worker, arguments)

    def _make(self, rank: int, suffix: str = "") -> Any:
        first = rank - rank % self._per_process
        if rank == first:
            self._hosts[first] = super()._make(rank, suffix)
        return HostedRank(self._hosts[first], rank)
