"""The actors of one role as a group that is created, started, called and ended together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distill_rl.errors import DistillError
from distill_rl.workers.actors.rank import Process, this_node
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
        """Those that the driver calls, by every rank that they call."""
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
        """Gives ranks that are neighbours on a node a relay, through which `submit_each` and `submit_replicas` call them from now on.

        Args:
            size: ranks of a process group.
        """
        self._together = size
        self._make_relays(range(len(self.actors)))

    def _make_relays(self, ranks: Sequence[int]) -> None:
        """Makes the relays of these ranks, which are whole process groups and run; does nothing if the group has none."""
        size = self._together
        if not size:
            return
        # Groups that have room in a relay are not divided, unless they are on several nodes.
        fits = size <= MOST_RANKS
        most = MOST_RANKS // size * size if fits else MOST_RANKS
        made: list[_Relay] = []
        for _, members in groupby(ranks, lambda rank: (fits or rank // size, self._process(rank).node_id)):
            while some := list(islice(members, most)):
                if len(some) > 1:
                    made.append(self._make_relay(some))
        # Relays have a relay, too, unless several process groups are divided among them: an error of one would keep the others waiting.
        groups = [{rank // size for rank in relay.ranks} for relay in made]
        if len(ranks) == size or sum(map(len, groups)) == len(set().union(*groups)):
            several = (made[start : start + MOST_RANKS] for start in range(0, len(made), MOST_RANKS))
            made = [self._make_relay(some) if len(some) > 1 else some[0] for some in several]
        for relay in made:
            self._relays |= dict.fromkeys(relay.ranks, relay)

    def _make_relay(self, members: Sequence[int | _Relay]) -> _Relay:
        """Makes a relay of ranks, or of relays, on the node of the first of them."""
        relay = _Relay(self._together, dict(enumerate(members)))
        kind, called = ("relay", self._kind), []
        for member in members:
            if isinstance(member, _Relay):
                kind = "relays", "Relay"
                called.append((self.names[member.ranks[0]], member.actor))
            else:
                called.append((self.names[member], self.actors[member]))
        leader = relay.ranks[0]
        remote: Any = ray.remote(Relay)
        relay.actor = remote.options(
            name=f"{self.names[leader]}.{kind[0]}.{self._renewals}",
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self._process(leader).node_id, soft=False),
        ).remote(kind[1], called)
        self._calls.register(self._called(relay.ranks), relay.actor)
        return relay

    def _end_relays(self, ranks: Collection[int]) -> None:
        """Makes relays forget these ranks, and kills those that call no others; never raises."""
        for relay in dict.fromkeys(self._relays.values()):
            self._end_relay(relay, ranks)
        for rank in ranks:
            self._relays.pop(rank, None)

    def _end_relay(self, relay: _Relay, ranks: Collection[int]) -> bool:
        """Makes a relay forget these ranks; returns whether it has been killed."""
        for place, member in list(relay.members.items()):
            if self._end_relay(member, ranks) if isinstance(member, _Relay) else member in ranks:
                del relay.members[place]
        if relay.members:
            self._calls.register(self._called(relay.ranks), relay.actor)
            return False
        self._calls.forget(relay.actor)
        with contextlib.suppress(Exception):
            ray.kill(relay.actor, no_restart=True)
        return True

    def submit_each(self, method: str, rows: Sequence[Any], *arguments: Any, ranks: Sequence[int]) -> Refs:
        """Calls a method on neighbouring ranks without waiting, through relays if there are any.

        Args:
            rows: the first argument of each rank's call.
            arguments: the others, the same for all.

        Returns:
            References with what they call, in the order of the ranks; `Calls.gather` returns a result for each rank.
        """
        made = self._submit(method, dict(zip(ranks, rows, strict=True)), arguments, values=1)
        return {call: self._called(called) for (call,), called in made}

    def submit_replicas(
        self, method: str, rows: Mapping[int, Any], *arguments: Any, size: int
    ) -> dict[int, tuple[ray.ObjectRef, Refs]]:
        """Calls a method that returns two values on all ranks of replicas, otherwise as `submit_each`.

        Args:
            rows: the first argument by replica, the same for all of its ranks.
            size: ranks of a replica.

        Returns:
            By replica: a reference to the first value of its first rank; and to the second values, with what they call. Of ranks
            that share a relay there is only that of the first one.
        """
        first_ranks = {replica: replica * size for replica in rows}
        of_ranks = {rank: rows[i] for i, first in first_ranks.items() for rank in range(first, first + size)}
        made: dict[int, tuple[ray.ObjectRef, Refs]] = {}
        for (first, second), called in self._submit(method, of_ranks, arguments, values=2):
            made.setdefault(called[0] // size, (first, {}))[1][second] = self._called(called)
        return made

    def _submit(
        self, method: str, rows: Mapping[int, Any], arguments: Sequence[Any], *, values: int
    ) -> Iterator[tuple[Sequence[ray.ObjectRef], Sequence[int]]]:
        """Makes calls one by one; yields references to values, with the ranks for which they stand."""
        left = dict(rows)
        while left:
            rank = next(iter(left))
            if relay := self._relays.get(rank):
                request, parts = relay.request(method, values, left, arguments)
                made = bound(relay.actor, "call", request.returns, "Relay", self.names[rank]).remote(request)
            else:
                parts = [[rank]]
                call = bound(self.actors[rank], method, values, self._kind, self.names[rank])
                made = call.remote(left[rank], *arguments)
            references = iter(made if isinstance(made, list) else [made])
            for called in parts:
                yield list(islice(references, values)), called
                for each in called:
                    del left[each]

    def _called(self, ranks: Sequence[int]) -> Called:
        names = tuple(self.names[rank] for rank in ranks)
        return names if len(names) > 1 else names[0]

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
        relays = [each for relay in dict.fromkeys(self._relays.values()) for each in relay.all]
        passed_on: Refs = {each.actor.settle.remote(each.calls): self._called(each.ranks) for each in relays}
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
        known = self._calls.processes
        return [*((name, known[name]) for name in self.names if name in known), *self._replaced]

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
                what = f"{self.names[leader]} and the {size - 1} ranks of its group communicate between {len(nodes)}"
                log.info("%s nodes, unencrypted, and without a token of those that reach their ports", what)
        addresses = dict(zip(leaders, self._calls.gather(stores, what="rendezvous", timeout_s=timeout_s)))
        calls: Refs = {}
        for rank in members:
            host, port = addresses.get(rank - rank % size, ("", 0))
            calls |= self.submit("start", host, port, self._plan.placements[self.names[rank]].gpu_memory, ranks=[rank])
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
            if process.node_id == this_node():
                process.kill()
        with contextlib.suppress(Exception):
            ray.kill(self.actors[rank], no_restart=True)


@dataclass(eq=False)
class _Relay:
    """A relay of ranks, or of relays."""

    size: int
    """Ranks of a process group."""
    members: dict[int, int | _Relay]
    """What it calls, by their place."""
    actor: Any = None
    calls: int = 0
    """Made of it so far, in the order of their numbers."""

    @property
    def all(self) -> list[_Relay]:
        """This one and those that it calls."""
        return [self, *(member for member in self.members.values() if isinstance(member, _Relay))]

    @property
    def ranks(self) -> list[int]:
        """Those that it calls, or that its relays call."""
        return [rank for each in self.members.values() for rank in (each.ranks if isinstance(each, _Relay) else [each])]

    def request(
        self, method: str, values: int, rows: Mapping[int, Any], arguments: Sequence[Any]
    ) -> tuple[Request, list[list[int]]]:
        """What to call it with next, so that it calls those of its ranks that have rows; and these ranks by process group."""
        parts: list[dict[int, Any]] = []
        called: list[list[int]] = []
        for place, member in self.members.items():
            if isinstance(member, _Relay):
                if rows.keys().isdisjoint(member.ranks):
                    continue
                own, ranks = member.request(method, values, rows, arguments)
            elif member in rows:
                own, ranks = rows[member], [[member]]
            else:
                continue
            if called and called[-1][-1] // self.size == ranks[0][0] // self.size:
                parts[-1][place] = own
                called[-1] += ranks[0]
            else:
                parts.append({place: own})
                called += ranks
        self.calls += 1
        return Request(self.calls - 1, method, values, parts, arguments), called


def stop(groups: Sequence[WorkerGroup]) -> None:
    """Calls `stop` on all actors, group by group in this order, so that they leave their process groups.

    Waits 15 s at most for each group; a failure is only logged. The actors still run afterwards: the caller kills them.
    """
    for group in groups:
        try:
            group.call("stop", what="stopping", timeout_s=_STOP_TIMEOUT_S)
        except DistillError as error:
            log.info("%s", error)
