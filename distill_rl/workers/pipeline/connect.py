"""Chooses the transport for each teacher's targets, and opens and proves every ring before the first step.

For each teacher rank that publishes, the hand-shake is:

1. The teacher makes a ring and returns one offer per student rank that reads it.
2. Those readers open the ring and return receipts, which the teacher accepts.
3. The teacher publishes a probe of 1 KiB, and the readers check that it arrives as it was sent.

A rank that fails a stage returns a `Problem` instead of raising, so that a second choice can be tried: shared memory
as a file, otherwise, with `transport: auto`, the object store. A second choice that fails too is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distill_rl.config.derive import RingPlan
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.observe.log import say
from distill_rl.transport.base import Handle, Layout, Offer, Place, readers_of
from distill_rl.transport.choose import TransportChoice, choose
from distill_rl.transport.segment import Backing
from distill_rl.workers.actors.rank import Problem
from distill_rl.workers.cluster.calls import Calls, Refs
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.pipeline.sub_batch import Teachers

FALLBACK = "object_store"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """From one teacher rank that publishes to the student ranks that read it."""

    group: WorkerGroup
    rank: int
    source: str
    """Name of the teacher rank."""
    readers: tuple[int, ...]
    num_slots: int
    choice: TransportChoice
    backing: Backing = "memfd"


class Connector:
    """Opens the rings of all teachers.

    Args:
        teachers, student: groups that have started.
    """

    def __init__(self, config: Config, teachers: Teachers, student: WorkerGroup, rings: RingPlan, calls: Calls):
        self._config, self._teachers, self._student, self._rings, self._calls = config, teachers, student, rings, calls
        self._timeout_s = config.ray.start_timeout_s
        self._used: dict[str, Route] = {}
        """Routes whose probe arrived, by source."""

    def connect(self, lost: Collection[str] = ()) -> dict[str, TransportChoice]:
        """Opens and proves all rings, with a second choice where the first fails, and prints the transports in use.

        Args:
            lost: teachers that the run goes on without.

        Returns:
            The proven transport of each teacher rank that publishes, by its name.

        Raises:
            ConfigError: no transport that the settings allow works from a teacher to a student rank.
        """
        places = self._places(self._student)
        routes = [
            self._route(teacher, group, replica, places)
            for teacher, group in self._teachers
            if teacher.name not in lost
            for replica in range(teacher.parallel.dp)
        ]
        self._used.clear()
        self._join(routes)
        chosen = {source: route.choice for source, route in self._used.items()}
        for choice in dict.fromkeys(chosen.values()):
            say(f"transport {choice.name}: {choice.reason}")
            log.info("it is used by %s", ", ".join(source for source, other in chosen.items() if other == choice))
        return chosen

    def reconnect(self, teacher: TeacherConfig, group: WorkerGroup, rank: int) -> None:
        """Opens and proves the ring of a replacement replica, whose first rank is `rank`.

        Raises:
            ConfigError: as for `connect`.
        """
        self._join([self._route(teacher, group, rank // teacher.ranks_per_replica, self._places(self._student))])

    def _join(self, routes: Sequence[Route]) -> None:
        """Opens and proves routes, tries those that fail once more by their second choice, and records them in `_used`."""
        # Before the second try, the student closes all transports that no other route uses.
        problems = self._open(routes)
        failed = [route for route in routes if route.source in problems]
        retries = [self._second_choice(route, problems[route.source]) for route in failed]
        self._used |= {route.source: route for route in routes if route.source not in problems}
        if retries:
            for route in retries:
                self._used.pop(route.source, None)
            # Readers close first: what they have opened belongs to the teachers.
            names = sorted({route.choice.name for route in self._used.values()})
            self._student.call("close_others", names, what="connecting", timeout_s=self._timeout_s)
        for source, problem in self._open(retries).items():
            raise ConfigError(
                "transport", f"must work from {source} to the student", problem, "set transport=object_store"
            )
        self._used |= {route.source: route for route in retries}

    def _places(self, group: WorkerGroup, ranks: Sequence[int] | None = None) -> list[Place]:
        """Asks all ranks of a group, or `ranks`, where they run, and returns the answers in that order."""
        return self._gather(group.submit("place", ranks=ranks))

    def _route(self, teacher: TeacherConfig, group: WorkerGroup, replica: int, places: Sequence[Place]) -> Route:
        """Plans the route from the first rank of a teacher's replica to the student ranks that read its rows."""
        # Opens nothing.
        dp, rank = teacher.parallel.dp, replica * teacher.ranks_per_replica
        students = self._config.student.parallel
        (place,) = self._places(group, [rank])
        # Divide the batch into dp · dp' equal parts. Replica r of the teacher's dp writes parts r·dp' to (r + 1)·dp';
        # rank s of the student's dp' reads parts s·dp to (s + 1)·dp. `readers_of` finds the ranks whose parts overlap.
        written = Layout(replica * students.dp, students.dp, 1)
        readers = readers_of(written, 0, dp * students.dp, dp=students.dp, per_row=students.ranks_per_row)
        choice = choose(self._config.transport, place, [places[reader] for reader in readers])
        source, num_slots = group.names[rank], self._rings.slots[teacher.name]
        on = ", ".join(dict.fromkeys(_node_and_device(places[reader]) for reader in readers))
        log.info("%s on %s is read on %s", source, _node_and_device(place), on)
        return Route(group, rank, source, readers, num_slots, choice)

    def _second_choice(self, route: Route, problem: str) -> Route:
        """Returns the route to try after `route` has failed: shared memory as a file, for others the object store."""
        if route.choice.name == "shared_memory":
            log.info("%s: shared memory is tried as a file: %s", route.source, problem)
            return replace(route, backing="file")
        if self._config.transport != "auto" or route.choice.name == FALLBACK:
            raise ConfigError(
                "transport",
                f"{route.choice.name} must work from {route.source} to the student",
                problem,
                "set transport=auto, which takes one that does",
            )
        reason = f"{route.choice.name} does not work: {problem}"
        return replace(route, choice=TransportChoice(FALLBACK, reason))

    def _open(self, routes: Sequence[Route]) -> dict[str, str]:
        """Runs the hand-shake on all routes, stage by stage."""
        # A route that fails a stage takes no part in the later ones.
        problems: dict[str, str] = {}
        opening: dict[Route, tuple[Any, ...]] = {
            route: (route.choice.name, route.source, route.num_slots, route.readers, route.backing) for route in routes
        }
        offers = self._call_teachers("open_ring", opening, problems)
        receipts = self._call_readers("open_rings", offers, problems)
        accepted = self._call_teachers(
            "accept", {route: (from_readers,) for route, from_readers in receipts.items()}, problems
        )
        probes = self._call_teachers("publish_probe", dict.fromkeys(accepted, ()), problems)
        copies = {route: [probe] * len(route.readers) for route, probe in probes.items()}
        self._call_readers("read_probes", copies, problems)
        return {route.source: problems[route.source] for route in routes if route.source in problems}

    def _call_teachers(
        self, method: str, arguments: Mapping[Route, tuple[Any, ...]], problems: dict[str, str]
    ) -> dict[Route, Any]:
        """Calls a method on the publishing rank of each route, all at the same time, and waits for the answers."""
        calls: Refs = {}
        for route, route_arguments in arguments.items():
            calls |= route.group.submit(method, *route_arguments, ranks=[route.rank])
        answers = dict(zip(arguments, self._gather(calls)))
        problems |= {route.source: str(answer) for route, answer in answers.items() if isinstance(answer, Problem)}
        return {route: answer for route, answer in answers.items() if not isinstance(answer, Problem)}

    def _call_readers(
        self, method: str, items: Mapping[Route, Sequence[Offer | Handle]], problems: dict[str, str]
    ) -> dict[Route, list[Any]]:
        """Calls a method once on every student rank, with the list of its items of all routes."""
        # Waits for the answers.
        inboxes: list[list[tuple[Route, Offer | Handle]]] = [[] for _ in self._student.actors]
        for route, route_items in items.items():
            for reader, item in zip(route.readers, route_items):
                inboxes[reader].append((route, item))
        calls: Refs = {}
        for rank, inbox in enumerate(inboxes):
            calls |= self._student.submit(method, [item for _, item in inbox], ranks=[rank])
        answers: dict[Route, list[Any]] = {route: [] for route in items}
        for inbox, rank_answers in zip(inboxes, self._gather(calls)):
            for (route, _), answer in zip(inbox, rank_answers):
                answers[route].append(answer)
                if isinstance(answer, Problem):
                    problems.setdefault(route.source, str(answer))
        return {route: route_answers for route, route_answers in answers.items() if route.source not in problems}

    def _gather(self, calls: Refs) -> list[Any]:
        return self._calls.gather(calls, what="connecting", timeout_s=self._timeout_s)


def _node_and_device(place: Place) -> str:
    """A place, for messages."""
    return f"node {place.node_id} ({place.device})"
