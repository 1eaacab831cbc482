"""The actors of one role as a group that is created, started, called and ended together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distill_rl.errors import DistillError
from distill_rl.workers.actors.rank import Process
from distill_rl.workers.cluster.calls import Called, Calls, Refs
from distill_rl.workers.cluster.placement import PlacementPlan
from distill_rl.workers.cluster.relay import MOST_RANKS, Relay, Request, bound

_STOP_TIMEOUT_S = 15.0

log = logging.getLogger(__name__)


class WorkerGroup:
    """Actors of one class, in rank order; of a student or teacher, rank = (dp_rank · sp + sp_rank) · tp + tp_rank."""

    def __init__(
        self,
        worker: type,
        names: Sequence[str],
        plan: PlacementPlan,
        placement: PlacementGroup,
        calls: Calls,
        *arguments: Any,
    ):
        """Creates one actor per name in its reserved place and registers it with `calls`, without waiting for them.

        Args:
            worker: the actor class; its instances get their rank, then `arguments`.
            names: in rank order.
            plan: has a placement for every name.
            placement: the reserved bundles of `plan`.
        """
        self._remote: Any = ray.remote(worker)
        self._kind = worker.__name__
        self._plan, self._placement, self._arguments = plan, placement, arguments
        self.names = list(names)
        self._calls = calls
        self._replaced: list[tuple[str, Process]] = []
        """Processes that replacements have taken over from."""
        self._renewals = 0
        self._together = 0
        self._relays: dict[int, _Relay] = {}
        """By the first of the ranks that it calls."""
        self.actors: list[Any] = [self._make(rank) for rank in range(len(self.names))]

    def _make(self, rank: int, suffix: str = "") -> Any:
        """Creates and registers the actor of a rank, without waiting for it, and returns its handle."""
        # Ray never restarts it or repeats its calls.
        name = self.names[rank]
        placement = self._plan.placements[name]
        actor = self._remote.options(
            name=name + suffix,
            num_cpus=1,
            num_gpus=placement.num_gpus,
            max_restarts=0,  # queued calls would run on a fresh actor
            max_task_retries=0,
            scheduling_strategy=self._calls.hosts.strategy(self._placement, placement.bundle),
        ).remote(rank, *self._arguments)
        self._calls.register(name, actor)
        return actor

    def submit(self, method: str, *arguments: Any, ranks: Sequence[int] | None = None) -> Refs:
        """Calls a method with the same arguments on all ranks, or on `ranks`, without waiting.

        Returns:
            References to the results with the actors' names, in the order of the ranks.
        """
        return {
            getattr(self.actors[rank], method).remote(*arguments): self.names[rank]
            for rank in (range(len(self.actors)) if ranks is None else ranks)
        }

    def open_relays(self, size: int) -> None:
        """Gives ranks that are neighbours on a node a relay, through which `submit_each` calls them from now on.

        Args:
            size: ranks of a process group; those of two groups do not share a relay, because they fail apart.
        """
        self._together = size
        self._make_relays(range(len(self.actors)))

    def _make_relays(self, ranks: Sequence[int]) -> None:
        """Makes the relays of these ranks, which are whole process groups and run; does nothing if the group has none."""
        if not self._together:
            return
        remote: Any = ray.remote(Relay)
        for (_, node), members in groupby(ranks, lambda rank: (rank // self._together, self._process(rank).node_id)):
            while some := list(islice(members, MOST_RANKS)):
                if len(some) == 1:
                    continue
                leader = self.names[some[0]]
                relay = remote.options(
                    name=f"{leader}.relay.{self._renewals}",
                    num_cpus=0,
                    max_restarts=0,
                    max_task_retries=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                ).remote(self._kind, [(self.names[rank], self.actors[rank]) for rank in some])
                self._calls.register(leader, relay)  # an error of it counts as one of the first of its ranks
                self._relays[some[0]] = _Relay(relay, some)

    def _end_relays(self, ranks: Sequence[int]) -> None:
        """Kills the relays that call any of these ranks; never raises."""
        for first, relay in list(self._relays.items()):
            if set(relay.ranks) & set(ranks):
                self._calls.forget(relay.actor)
                with contextlib.suppress(Exception):
                    ray.kill(relay.actor, no_restart=True)
                del self._relays[first]

    def submit_each(self, method: str, rows: Sequence[Any], *arguments: Any, ranks: Sequence[int]) -> Refs:
        """Calls a method on neighbouring ranks without waiting, through relays if there are any.

        Args:
            rows: the first argument of each rank's call.
            arguments: the others, the same for all.

        Returns:
            References with what they call, in the order of the ranks; `Calls.gather` returns a result for each rank.
        """
        made = self._submit(method, dict(zip(ranks, rows, strict=True)), arguments, values=1)
        return {call: called for (call,), called in made}

    def submit_replica(
        self, method: str, rows: Any, *arguments: Any, ranks: Sequence[int]
    ) -> tuple[ray.ObjectRef, Refs]:
        """Calls a method that returns two values on all ranks of a replica, with the same arguments; otherwise as `submit_each`.

        Returns:
            A reference to the first value of the first rank; and to the second values, with what they call. Of ranks that
            share a relay there is only that of the first one.
        """
        made = list(self._submit(method, dict.fromkeys(ranks, rows), arguments, values=2))
        (first, _), _ = made[0]
        return first, {second: called for (_, second), called in made}

    def _submit(
        self, method: str, rows: dict[int, Any], arguments: Sequence[Any], *, values: int
    ) -> Iterator[tuple[Sequence[ray.ObjectRef], Called]]:
        """Makes the calls of `submit_each` one by one; yields the references to the values of each, and what it calls."""
        for rank in list(rows):
            if rank not in rows:  # its relay has been called
                continue
            if relay := self._relays.get(rank):
                own = [rows.pop(member) for member in relay.ranks]
                call = bound(relay.actor, "call", values, "Relay", self.names[rank])
                made = call.remote(Request(relay.calls, method, values, own, arguments))
                relay.calls += 1
                called: Called = tuple(self.names[member] for member in relay.ranks)
            else:
                call = bound(self.actors[rank], method, values, self._kind, self.names[rank])
                made = call.remote(rows.pop(rank), *arguments)
                called = self.names[rank]
            yield (made if values > 1 else [made]), called

    def collect(self, results: Sequence[ray.ObjectRef]) -> Sequence[ray.ObjectRef]:
        """Returns references to results that every rank is to be given: a single one to all of them if there are relays.

        Otherwise every call of a relay would carry all of them. `each` takes the results apart again. The single one
        fails if any of them does.
        """
        relay = next(iter(self._relays.values()), None)
        return [relay.actor.collect.remote(*results)] if relay and len(results) > 1 else results

    def settle(self, timeout_s: float) -> None:
        """Waits until all ranks have ended the calls that were made so far.

        Raises:
            DistillError: as for `Calls.gather`.
        """
        passed_on: Refs = {
            relay.actor.settle.remote(relay.calls): self.names[first] for first, relay in self._relays.items()
        }
        self._calls.gather(passed_on, what="earlier calls", timeout_s=timeout_s)
        self.call("identify", what="earlier calls", timeout_s=timeout_s)

    def call(self, method: str, *arguments: Any, what: str, timeout_s: float) -> list[Any]:
        """Calls a method with the same arguments on all ranks, and returns their results in rank order.

        Args:
            what: what is waited for, for messages.
            timeout_s: for all ranks together, in seconds.

        Raises:
            DistillError: as for `Calls.gather`.
        """
        return self._calls.gather(self.submit(method, *arguments), what=what, timeout_s=timeout_s)

    def identify(self, timeout_s: float) -> None:
        """Waits until all actors run, and records their processes here and in `calls`.

        Only then can they be monitored and killed.

        Raises:
            WorkerError: an actor does not come up within `timeout_s` seconds.
        """
        processes = self.call("identify", what=f"starting {self.names[0]} and its peers", timeout_s=timeout_s)
        self._calls.processes.update(zip(self.names, processes))

    def _process(self, rank: int) -> Process:
        return self._calls.processes[self.names[rank]]

    def renew(self, ranks: Sequence[int], timeout_s: float) -> None:
        """Kills ranks, creates new actors in their placements, and waits until these run.

        The caller must then start those that have to be started.

        Unfinished calls of the old actors fail. The old processes remain in `processes`, for their logs.

        Raises:
            WorkerError: a new actor does not come up within `timeout_s` seconds, or (HostLost) no node has room for it.
        """
        bundles = {self._plan.placements[self.names[rank]].bundle for rank in ranks}
        self._calls.hosts.move(self._plan, self._placement, bundles, self._calls.poll)
        self._renewals += 1
        self._end_relays(ranks)
        names = [self.names[rank] for rank in ranks]
        are_known = names[0] in self._calls.processes
        for rank in ranks:
            self._calls.forget(self.actors[rank])
            self.end(rank)
            if are_known:
                self._replaced.append((f"{self.names[rank]}.{len(self._replaced)}", self._process(rank)))
        for rank in ranks:  # under a new name, because Ray frees a dead actor's name only some time later
            self.actors[rank] = self._make(rank, suffix=f".{self._renewals}")
        what = f"starting {', '.join(names)} again"
        processes = self._calls.gather(self.submit("identify", ranks=ranks), what=what, timeout_s=timeout_s)
        if are_known:  # otherwise `identify` has to follow
            self._calls.processes.update(zip(names, processes))
        self._make_relays(ranks)

    def replace(self, rank: int, timeout_s: float) -> None:
        """Kills a rank that belongs to no process group, puts a new actor in its place, and starts it.

        Raises:
            DistillError: the new actor does not come up, or its `start` fails or is late (`timeout_s` seconds for
                each).
        """
        self.renew([rank], timeout_s)
        what = f"starting {self.names[rank]} again"
        self._calls.gather(self.submit("start", ranks=[rank]), what=what, timeout_s=timeout_s)

    @property
    def processes(self) -> list[tuple[str, Process]]:
        """Names and processes of the present ranks, then of those that were replaced."""
        return [*self._present, *self._replaced]

    @property
    def worker_ids(self) -> dict[str, str]:
        """Actor names by Ray worker id."""
        return {process.worker_id: name for name, process in self._present}

    @property
    def _present(self) -> list[tuple[str, Process]]:
        known = self._calls.processes
        return [(name, known[name]) for name in self.names if name in known]

    def start(self, *, size: int, timeout_s: float, ranks: Sequence[int] | None = None) -> Refs:
        """Makes all ranks, or `ranks`, join process groups and load their models; does not wait for the models.

        A process group is `size` consecutive ranks, which meet through a store that the first of them serves; that is
        waited for. `ranks` must consist of whole process groups.

        Returns:
            The calls that load the models, for the caller to wait for.

        Raises:
            WorkerError: a store is not served within `timeout_s` seconds.
        """
        members = range(len(self.actors)) if ranks is None else ranks
        leaders = [rank for rank in members if rank % size == 0]
        stores: Refs = {}
        for leader in leaders if size > 1 else ():
            nodes = {self._process(rank).node_id for rank in range(leader, leader + size)}
            stores |= self.submit("serve_store", size, len(nodes) == 1, ranks=[leader])
            if len(nodes) > 1:
                what = (
                    f"{self.names[leader]} and the {size - 1} ranks of its group communicate between {len(nodes)} nodes"
                )
                log.info("%s, unencrypted, and without a token of those that reach their ports", what)
        addresses = dict(zip(leaders, self._calls.gather(stores, what="rendezvous", timeout_s=timeout_s)))
        calls: Refs = {}
        for rank in members:
            host, port = addresses.get(rank - rank % size, ("", 0))
            gpu_memory = self._plan.placements[self.names[rank]].gpu_memory
            calls |= self.submit("start", host, port, gpu_memory, ranks=[rank])
        return calls

    def kill(self) -> None:
        """Kills every rank."""
        self._end_relays(range(len(self.actors)))
        for rank in range(len(self.actors)):
            self.end(rank)

    def end(self, rank: int) -> None:
        """Kills a rank's actor; never raises. It remains in the group, and its calls fail.

        On this node SIGKILL comes first, because ray.kill waits 5 s for a stopped process.
        """
        with contextlib.suppress(Exception):  # ray.kill below handles what fails here
            process = self._process(rank)
            if process.node_id == ray.get_runtime_context().get_node_id():
                process.kill()
        with contextlib.suppress(Exception):
            ray.kill(self.actors[rank], no_restart=True)


@dataclass
class _Relay:
    actor: Any
    ranks: Sequence[int]
    """Those that it calls."""
    calls: int = 0
    """Made of it so far, in the order of their numbers."""


def stop(groups: Sequence[WorkerGroup]) -> None:
    """Calls `stop` on all actors, group by group in this order, so that they leave their process groups.

    Waits 15 s at most for each group; a failure is only logged. The actors still run afterwards: the caller kills them.
    """
    for group in groups:
        try:
            group.call("stop", what="stopping", timeout_s=_STOP_TIMEOUT_S)
        except DistillError as error:
            log.info("%s", error)
