"""Which transport each teacher's targets take, and every reader's ring opened, before the first step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distill_rl.config.derive import RingPlan
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.observe.log import say
from distill_rl.transport.assemble import readers_of
from distill_rl.transport.base import Handle, Layout, Offer
from distill_rl.transport.choose import Choice, choose
from distill_rl.transport.place import Place
from distill_rl.transport.segment import Backing
from distill_rl.workers.actors.probe import Problem
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.pipeline.sub_batch import Refs, Teachers

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
        self._used: dict[str, Route] = {}
        """by source"""

    def connect(self) -> dict[str, Choice]:
        """By teacher rank the transport that it publishes through, proven by a round trip of 1 KiB.

        Raises:
            ConfigError: a transport that was asked for by name does not work from a teacher to a student rank.
        """
        places = self._places(self._student, range(len(self._student.actors)))
        self._join([route for teacher, group in self._teachers for route in self._routes(teacher, group, places)])
        chosen = {source: route.choice for source, route in self._used.items()}
        for choice in dict.fromkeys(chosen.values()):
            say(f"transport {choice.name}: {choice.reason}")
            log.info("it is used by %s", ", ".join(source for source, its in chosen.items() if its == choice))
        return chosen

    def reconnect(self, teacher: TeacherConfig, group: WorkerGroup, rank: int) -> None:
        """The same for the replica of a teacher that begins with this rank and has taken the place of another.

        Raises:
            ConfigError: see `connect`.
        """
        places = self._places(self._student, range(len(self._student.actors)))
        self._join([self._route(teacher, group, rank // teacher.parallel.tp, places)])

    def _join(self, routes: Sequence[Route]) -> None:
        problems = self._open(routes)
        again = [self._second_choice(route, problems[route.source]) for route in routes if route.source in problems]
        self._used |= {route.source: route for route in routes if route.source not in problems}
        if again:  # readers first: what they have opened belongs to the teachers
            for route in again:
                self._used.pop(route.source, None)
            self._close_others(list(self._used.values()))
        for source, problem in self._open(again).items():
            raise ConfigError(
                "transport", f"must work from {source} to the student", problem, "set transport=object_store"
            )
        self._used |= {route.source: route for route in again}

    def _places(self, group: WorkerGroup, ranks: Sequence[int]) -> list[Place]:
        return self._gather(group.submit("place", ranks=ranks))

    def _routes(self, teacher: TeacherConfig, group: WorkerGroup, places: Sequence[Place]) -> list[Route]:
        return [self._route(teacher, group, replica, places) for replica in range(teacher.parallel.dp)]

    def _route(self, teacher: TeacherConfig, group: WorkerGroup, replica: int, places: Sequence[Place]) -> Route:
        dp, rank = teacher.parallel.dp, replica * teacher.parallel.tp
        students = self._config.student.parallel
        (own,) = self._places(group, [rank])
        # Replica r of dp writes rows r … r + 1 of every dp, student rank s of dp' reads rows s … s + 1 of every dp'.
        share = Layout(replica * students.dp, students.dp, 1)
        readers = readers_of(share, 0, dp * students.dp, dp=students.dp, tp=students.tp)
        choice = choose(self._config.transport, own, [places[reader] for reader in readers])
        source, slots = group.names[rank], self._rings.slots[teacher.name]
        on = ", ".join(dict.fromkeys(_short(places[reader]) for reader in readers))
        log.info("%s on %s is read on %s", source, _short(own), on)
        return Route(group, rank, source, readers, slots, choice)

    def _close_others(self, routes: Sequence[Route]) -> None:
        """Lets the student close the transports that none of these routes takes."""
        names = sorted({route.choice.name for route in routes})
        self._student.call("close_others", names, what="connecting", timeout_s=self._timeout_s)

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
        problems: dict[str, str] = {}
        opening = (("open_ring", r.choice.name, r.source, r.num_slots, r.readers, r.backing) for r in routes)
        offers = self._ask(routes, opening, problems)
        receipts = self._tell_readers("open_rings", offers, problems)
        accepted = self._ask(list(receipts), (("accept", found) for found in receipts.values()), problems)
        probes = self._ask(list(accepted), (("publish_probe",) for _ in accepted), problems)
        self._tell_readers("read_probes", {r: [probe] * len(r.readers) for r, probe in probes.items()}, problems)
        return {route.source: problems[route.source] for route in routes if route.source in problems}

    def _ask(
        self, routes: Sequence[Route], questions: Iterable[tuple[Any, ...]], problems: dict[str, str]
    ) -> dict[Route, Any]:
        """Calls the publishing rank of each route, all at the same time; the answers, but for those that are problems.

        Args:
            questions: method and arguments for each route.
        """
        calls: Refs = {}
        for route, (method, *arguments) in zip(routes, questions):
            calls |= route.group.submit(method, *arguments, ranks=[route.rank])
        answers = dict(zip(routes, self._gather(calls)))
        problems |= {route.source: str(answer) for route, answer in answers.items() if isinstance(answer, Problem)}
        return {route: answer for route, answer in answers.items() if not isinstance(answer, Problem)}

    def _tell_readers(
        self, method: str, things: Mapping[Route, Sequence[Offer | Handle]], problems: dict[str, str]
    ) -> dict[Route, list[Any]]:
        """Hands every reader its things; the answers of all readers of a route, unless one is a problem.

        Args:
            things: per route one for each of its readers.
        """
        inbox: dict[int, list[tuple[Route, Offer | Handle]]] = {rank: [] for rank in range(len(self._student.actors))}
        for route, own in things.items():
            for reader, thing in zip(route.readers, own):
                inbox[reader].append((route, thing))
        calls: Refs = {}
        for rank, entries in inbox.items():
            calls |= self._student.submit(method, [thing for _, thing in entries], ranks=[rank])
        answers: dict[Route, list[Any]] = {route: [] for route in things}
        for entries, given in zip(inbox.values(), self._gather(calls)):
            for (route, _), answer in zip(entries, given):
                answers[route].append(answer)
        for route, found in answers.items():
            for problem in found:
                if isinstance(problem, Problem):
                    problems.setdefault(route.source, str(problem))
        return {route: found for route, found in answers.items() if route.source not in problems}

    def _gather(self, calls: Refs) -> list[Any]:
        return self._calls.gather(calls, what="connecting", timeout_s=self._timeout_s)


def _short(place: Place) -> str:
    """Node and device."""
    return f"node {place.node_id} ({place.device})"
