"""Which transport each teacher's targets take, and every reader's ring opened, before the first step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distill_rl.config.derive import RingPlan
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.observe.log import say
from distill_rl.transport.assemble import readers_of
from distill_rl.transport.base import Handle, Layout, Offer, Receipt
from distill_rl.transport.choose import Choice, Place, choose
from distill_rl.transport.segment import Backing
from distill_rl.workers.calls import Calls
from distill_rl.workers.group import WorkerGroup
from distill_rl.workers.pipeline import Refs, Teachers

FALLBACK = "object_store"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """From one teacher rank that publishes to the student ranks that read it."""

    group: WorkerGroup
    rank: int
    source: str
    readers: tuple[int, ...]
    num_slots: int
    choice: Choice
    backing: Backing = "memfd"


class Connector:
    """Opens the rings of all teachers.

    Args:
        teachers: started.
        student: started.
    """

    def __init__(
        self,
        config: Config,
        teachers: Teachers,
        student: WorkerGroup,
        rings: RingPlan,
        calls: Calls,
    ):
        self._config, self._teachers, self._student, self._rings, self._calls = config, teachers, student, rings, calls
        self._timeout_s = config.ray.start_timeout_s

    def connect(self) -> dict[str, Choice]:
        """By teacher rank the transport that it publishes through, proven by a round trip of 1 KiB.

        Raises:
            ConfigError: a transport that was asked for by name does not work from a teacher to a student rank.
        """
        places: list[Place] = self._student.call("place", what="connecting", timeout_s=self._timeout_s)
        routes = [route for teacher, group in self._teachers for route in self._routes(teacher, group, places)]
        problems = self._open(routes)
        again = [self._second_choice(route, problems[route.source]) for route in routes if route.source in problems]
        for source, problem in self._open(again).items():
            raise ConfigError(
                "transport", f"must work from {source} to the student", problem, "set transport=object_store"
            )
        chosen = {route.source: route.choice for route in (*routes, *again)}
        for choice in dict.fromkeys(chosen.values()):
            say(f"transport {choice.name}: {choice.reason}")
            log.info("it is used by %s", ", ".join(source for source, its in chosen.items() if its == choice))
        return chosen

    def _routes(self, teacher: TeacherConfig, group: WorkerGroup, places: Sequence[Place]) -> list[Route]:
        dp, tp = teacher.parallel.dp, teacher.parallel.tp
        students = self._config.student.parallel
        routes = []
        own: list[Place] = group.call("place", what="connecting", timeout_s=self._timeout_s)
        for replica in range(dp):
            # Replica r of dp writes rows r … r + 1 of every dp, student rank s of dp' reads rows s … s + 1 of every dp'.
            share = Layout(replica * students.dp, students.dp, 1)
            readers = readers_of(share, 0, dp * students.dp, dp=students.dp, tp=students.tp)
            choice = choose(self._config.transport, own[replica * tp], [places[reader] for reader in readers])
            source, slots = group.names[replica * tp], self._rings.slots[teacher.name]
            on = ", ".join(dict.fromkeys(_short(places[reader]) for reader in readers))
            log.info("%s on %s is read on %s", source, _short(own[replica * tp]), on)
            routes.append(Route(group, replica * tp, source, readers, slots, choice))
        return routes

    def _second_choice(self, route: Route, problem: str) -> Route:
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
        return replace(route, choice=Choice(FALLBACK, reason))

    def _open(self, routes: Sequence[Route]) -> dict[str, str]:
        """Opens the rings and sends the probes; what is in the way, by source, in the order of the routes."""
        offers = self._ask(
            [
                (route, ("open_ring", route.choice.name, route.source, route.num_slots, route.readers, route.backing))
                for route in routes
            ]
        )
        receipts, problems = self._tell_readers("open_rings", routes, offers)
        good = [route for route in routes if route.source not in problems]
        self._ask([(route, ("accept", receipts[route.source])) for route in good])
        probes: list[Handle] = self._ask([(route, ("publish_probe",)) for route in good])
        _, unread = self._tell_readers(
            "read_probes", good, [[probe] * len(r.readers) for r, probe in zip(good, probes)]
        )
        problems |= unread
        return {route.source: problems[route.source] for route in routes if route.source in problems}

    def _ask(self, questions: Sequence[tuple[Route, tuple]]) -> list:
        """Calls the publishing rank of each route, all at the same time."""
        calls: Refs = {}
        for route, (method, *arguments) in questions:
            calls |= route.group.submit(method, *arguments, ranks=[route.rank])
        return self._calls.gather(calls, what="connecting", timeout_s=self._timeout_s)

    def _tell_readers(
        self, method: str, routes: Sequence[Route], things: Sequence[Sequence[Offer | Handle]]
    ) -> tuple[dict[str, list[Receipt]], dict[str, str]]:
        """Hands every reader its things, one per route that it reads; by source the receipts, and the first problem.

        Args:
            things: per route one for each of its readers.
        """
        inbox: dict[int, list[tuple[str, Offer | Handle]]] = {rank: [] for rank in range(len(self._student.actors))}
        for route, own in zip(routes, things):
            for reader, thing in zip(route.readers, own):
                inbox[reader].append((route.source, thing))
        calls: Refs = {}
        for rank, entries in inbox.items():
            calls |= self._student.submit(method, [thing for _, thing in entries], ranks=[rank])
        answers = self._calls.gather(calls, what="connecting", timeout_s=self._timeout_s)
        receipts: dict[str, list[Receipt]] = {route.source: [] for route in routes}
        problems: dict[str, str] = {}
        for entries, given in zip(inbox.values(), answers):
            for (source, _), answer in zip(entries, given):
                if isinstance(answer, Receipt):
                    receipts[source].append(answer)
                elif answer:
                    problems.setdefault(source, answer)
        return receipts, problems


def _short(place: Place) -> str:
    """Node and device."""
    return f"node {place.node_id} ({place.device})"
