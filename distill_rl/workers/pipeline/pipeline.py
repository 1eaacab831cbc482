"""Aligners → teachers → student. The driver moves references, and calls a stage once it knows that the one before is done.

So look-ahead needs no threads: the driver waits for the student alone, and whenever aligners finish something meanwhile,
its wait is interrupted for `advance`, which gives the next stage its work.

How one batch moves (`SubBatch` lists the states):

1. `submit` hands the batch to the aligners.
2. `advance` takes batches that are aligned and queues their sub-batches: as many as their rows need.
3. It takes queued sub-batches in order. As soon as every teacher's ring has room, it assigns slots and calls the
   teachers. No call ever waits for a slot, so a full ring cannot deadlock a forward pass.
4. `settle` makes the batch the current one and waits for its alignment. The current batch comes first in the queue.
5. The student group calls the student on each sub-batch whose teachers have been called, and waits for it. Ray runs the
   call once the targets exist.
6. `finish` gives the slots back: every reader has returned, so they can be overwritten. That makes room for step 3.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ray

from distill_rl.config.derive import RingPlan
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.data.batch.collate import BatchPlan
from distill_rl.errors import ConfigError
from distill_rl.observe.log import say
from distill_rl.transport.base import Handle, Layout, Offer, Place, Slot, readers_of
from distill_rl.transport.choose import TransportChoice, choose
from distill_rl.transport.segment import Backing
from distill_rl.types import BatchInfo, DocumentBatch
from distill_rl.workers.actors.rank import Problem
from distill_rl.workers.cluster.calls import Calls, Refs
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.pipeline.aligner_pool import AlignerPool
from distill_rl.workers.pipeline.sub_batch import PendingBatch, ReplicaCalls, SlotLedger, State, SubBatch, Teachers

FALLBACK = "object_store"

log = logging.getLogger(__name__)


@dataclass
class Pipeline:
    """Submits batches to the aligners and, as far as their rings have room, to the teachers.

    The batch being trained on has priority. Later batches always leave it room for one sub-batch, so it can always
    continue; a validation batch becomes the current one and needs no ring of its own.
    """

    aligners: AlignerPool
    _teachers: Teachers
    _plan: BatchPlan
    _rings: RingPlan
    """The number of slots per ring, and how many of them a sub-batch takes."""
    _method: Literal["forward", "store_targets"] = "forward"
    """Of the teachers. `store_targets` publishes nothing: slots then bound how many calls wait, and nothing else."""
    lost: set[str] = field(default_factory=set)
    """Teachers that the run continues without."""

    def __post_init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._current: PendingBatch | None = None
        self._queue: list[tuple[PendingBatch, SubBatch]] = []
        """QUEUED sub-batches in the order in which their teachers will be called."""
        self._open: list[SubBatch] = []
        """Sub-batches that hold slots, in the order in which their teachers were called."""
        self._ledgers = {teacher.name: SlotLedger(self._rings.slots[teacher.name]) for teacher, _ in self._teachers}

    def submit(self, batch: DocumentBatch) -> PendingBatch:
        """Hands a batch to the aligners, and to the teachers as soon as `advance` finds it aligned. Does not wait.

        The caller must release the returned batch in the end (`PendingBatch.lease`).
        """
        pending = self.aligners.submit(batch)
        self.advance()
        return pending

    def settle(self, pending: PendingBatch) -> BatchInfo:
        """Makes a batch the current one, which goes first from now on, and waits for its alignment.

        Raises:
            DistillError: as for `AlignerPool.settle`.
        """
        self._current = pending
        self.advance()
        return self.aligners.settle(pending, self.advance)

    def awaited(self) -> Sequence[ray.ObjectRef]:
        """Returns the calls after which there is something to do for `advance`."""
        return self.aligners.awaited()

    def advance(self) -> None:
        """Calls the teachers on what is aligned, as far as their rings have room, and lets the aligners go on.

        Call it in every long wait, at intervals and when one of `awaited` has ended: it also finds aligners that hang.
        """
        for pending in self.aligners.advance():
            self._split(pending)
        self._queue.sort(key=lambda entry: entry[0] is not self._current)  # current batch first; the sort is stable
        while self._queue and self._has_room(self._queue[0][0]):
            self._call_teachers(self._queue.pop(0)[1])

    def finish(self, sub_batch: SubBatch) -> None:
        """Gives back the slots of a sub-batch whose readers have all returned, and drops its references.

        Then calls the teachers on queued sub-batches that there is room for.
        """
        self._open = [other for other in self._open if other is not sub_batch]
        for name, slots in sub_batch.release().items():
            self._ledgers[name].give_back(slots)
        self.advance()

    def resubmit(self, name: str, replica: int) -> None:
        """Calls the replacement of a teacher's replica on every open sub-batch that the student is not done with.

        The calls keep their order and slots, which exist in the new ring too. Of sub-batches that the student is done
        with, only the call of the replica's first rank is kept; it had succeeded.

        Args:
            name: of the teacher.
        """
        t = self._index(name)
        for sub_batch in self._open:
            if sub_batch.state is State.DONE:
                sub_batch.teacher_calls[t][replica] = _of_leader(sub_batch.teacher_calls[t][replica])
            else:
                sub_batch.teacher_calls[t][replica] = self._call(t, [replica], sub_batch, sub_batch.slots[name])[0]

    def lose(self, name: str) -> None:
        """Continues without a teacher: it is not called any more, and its slots are free.

        Sub-batches that the student is not done with keep the other teachers' targets; the student must be called on
        them again. Of the others only the calls of the replicas' first ranks are kept, as in `resubmit`.
        """
        self.lost.add(name)
        t = self._index(name)
        for sub_batch in self._open:
            done = sub_batch.state is State.DONE
            sub_batch.teacher_calls[t] = [_of_leader(calls) for calls in sub_batch.teacher_calls[t]] if done else []
            self._ledgers[name].give_back(sub_batch.slots.pop(name, ()))
        self.advance()

    def abandon(self) -> None:
        """Forgets all batches, which the caller has released. Every ring must be opened anew before the next `submit`.

        Teachers that have been called go on, and nobody reads what they publish.
        """
        self.aligners.abandon()
        self._forget()

    def occupancy(self) -> dict[str, float]:
        """Returns, by teacher, the largest share (0 to 1) of its ring in use since the last call."""
        return {name: ledger.occupancy() for name, ledger in self._ledgers.items()}

    def _split(self, pending: PendingBatch) -> None:
        """Makes the sub-batches of a batch that is aligned, and queues them."""
        assert pending.info is not None
        rows = iter(pending.rows)
        student = [next(rows) for _ in range(self._plan.student.dp)]
        teachers = [[next(rows) for _ in range(sharding.dp)] for sharding in self._plan.teachers]
        pending.sub_batches = [
            SubBatch(i, list(student), [list(replicas) for replicas in teachers])
            for i in range(-(-pending.info.num_rows // self._rings.rows_per_sub_batch))
        ]
        self._queue += [(pending, sub_batch) for sub_batch in pending.sub_batches]

    def _has_room(self, pending: PendingBatch) -> bool:
        """Returns whether every ring has free slots for one more sub-batch of this batch."""
        # For a batch other than the current one, room for a sub-batch of the current one must remain. Lost teachers do
        # not count.
        current = self._current.sub_batches if self._current else []
        for name, ledger in self._ledgers.items():
            if name in self.lost:
                continue
            needed = self._rings.slots_per_sub_batch[name]
            if ledger.free < needed:
                return False
            held_by_later = ledger.held - sum(len(sub_batch.slots.get(name, ())) for sub_batch in current)
            if pending is not self._current and held_by_later + needed > ledger.num_slots - needed:
                return False  # the current batch must always find room for one sub-batch
        return True

    def _call_teachers(self, sub_batch: SubBatch) -> None:
        """Takes slots for a sub-batch, calls all teachers that are not lost on it, and adds it to the open ones."""
        # Every ring must have room (`_has_room`).
        slots: dict[str, tuple[Slot, ...]] = {}
        calls: list[list[ReplicaCalls]] = []
        for t, (teacher, _) in enumerate(self._teachers):
            if teacher.name in self.lost:
                calls.append([])
                continue
            taken = self._ledgers[teacher.name].take(self._rings.slots_per_sub_batch[teacher.name])
            slots[teacher.name] = taken
            calls.append(self._call(t, range(teacher.parallel.dp), sub_batch, taken))
        sub_batch.call_teachers(slots, calls)
        self._open.append(sub_batch)

    def _call(self, t: int, replicas: Sequence[int], sub_batch: SubBatch, slots: Sequence[Slot]) -> list[ReplicaCalls]:
        """Calls all ranks of replicas of teacher `t`, without waiting."""
        teacher, group = self._teachers[t]
        rows, size = {replica: sub_batch.teachers[t][replica] for replica in replicas}, teacher.ranks_per_replica
        made = group.submit_replicas(self._method, rows, sub_batch.index, slots, size=size)
        return [ReplicaCalls(*made[replica]) for replica in replicas]

    def _index(self, name: str) -> int:
        return [teacher.name for teacher, _ in self._teachers].index(name)


def _of_leader(calls: ReplicaCalls) -> ReplicaCalls:
    """The call of the first rank alone: it has published, and the other ranks' calls, which may have failed, are not needed."""
    return replace(calls, calls={calls.leader: calls.calls[calls.leader]})


# The rings between teachers and student.


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
    """Chooses the transport for each teacher's targets, and opens and proves every ring before the first step.

    For each teacher rank that publishes, the hand-shake is:

    1. The teacher makes a ring and returns one offer per student rank that reads it.
    2. Those readers open the ring and return receipts, which the teacher accepts.
    3. The teacher publishes a probe of 1 KiB, and the readers check that it arrives as it was sent.

    A rank that fails a stage returns a `Problem` instead of raising, so that a second choice can be tried: shared memory
    as a file, otherwise, with `transport: auto`, the object store. A second choice that fails too is an error.

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
        retries = [self._second_choice(route, problems[route.source]) for route in routes if route.source in problems]
        self._used |= {route.source: route for route in routes if route.source not in problems}
        if retries:
            for route in retries:
                self._used.pop(route.source, None)
            # Readers close first: what they have opened belongs to the teachers.
            names = sorted({route.choice.name for route in self._used.values()})
            self._student.call("close_others", names, what="connecting", timeout_s=self._timeout_s)
        for source, problem in self._open(retries).items():
            rule = f"must work from {source} to the student"
            raise ConfigError("transport", rule, problem, "set transport=object_store")
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
            rule = f"{route.choice.name} must work from {route.source} to the student"
            raise ConfigError("transport", rule, problem, "set transport=auto, which takes one that does")
        return replace(route, choice=TransportChoice(FALLBACK, f"{route.choice.name} does not work: {problem}"))

    def _open(self, routes: Sequence[Route]) -> dict[str, str]:
        """Runs the hand-shake on all routes, stage by stage."""
        # A route that fails a stage takes no part in the later ones.
        problems: dict[str, str] = {}

        def teachers(method: str, arguments: Mapping[Route, tuple[Any, ...]]) -> dict[Route, Any]:
            calls = [(route, route.group, route.rank, of_route) for route, of_route in arguments.items()]
            return {route: answer for route, (answer,) in self._call(method, calls, problems).items()}

        def readers(method: str, items: Mapping[Route, Sequence[Offer | Handle]]) -> dict[Route, list[Any]]:
            calls = [
                (route, self._student, reader, (item,))
                for route, of_route in items.items()
                for reader, item in zip(route.readers, of_route)
            ]
            return self._call(method, calls, problems)

        rings = {each: (each.choice.name, each.source, each.num_slots, each.readers, each.backing) for each in routes}
        receipts = readers("open_ring", teachers("open_ring", rings))
        accepted = teachers("accept", {route: (of_route,) for route, of_route in receipts.items()})
        probes = teachers("publish_probe", dict.fromkeys(accepted, ()))
        readers("read_probe", {route: [probe] * len(route.readers) for route, probe in probes.items()})
        return problems

    def _call(
        self, method: str, calls: Sequence[tuple[Route, WorkerGroup, int, tuple[Any, ...]]], problems: dict[str, str]
    ) -> dict[Route, list[Any]]:
        """Calls a method on ranks, each for a route, all at the same time; returns the answers for routes without a problem."""
        submitted: Refs = {}
        for _, group, rank, arguments in calls:
            submitted |= group.submit(method, *arguments, ranks=[rank])
        answers: dict[Route, list[Any]] = {}
        for (route, *_), answer in zip(calls, self._gather(submitted)):
            answers.setdefault(route, []).append(answer)
            if isinstance(answer, Problem):
                problems.setdefault(route.source, str(answer))
        return {route: of_route for route, of_route in answers.items() if route.source not in problems}

    def _gather(self, calls: Refs) -> list[Any]:
        return self._calls.gather(calls, what="connecting", timeout_s=self._timeout_s)


def _node_and_device(place: Place) -> str:
    """A place, for messages."""
    return f"node {place.node_id} ({place.device})"
