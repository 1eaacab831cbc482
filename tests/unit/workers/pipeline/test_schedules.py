"""Steps of training, some of them one ahead, while actors finish in any order, die and hang: whatever happens, the student applies each
sub-batch once and in order.

The pipeline, the student group and both recoveries are real. Actors, rings and waits are played: an actor runs its calls in order, each once
its arguments exist, and a wait lets one thing after another happen, chosen by hypothesis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.config.derive import ring_plan
from distill_rl.config.schema import Config, ParallelConfig, TeacherConfig
from distill_rl.data.batch.collate import BatchPlan
from distill_rl.errors import DistillError, WorkerError
from distill_rl.observe.timing import StepTimer
from distill_rl.types import BatchInfo, Cursor, DocumentBatch
from distill_rl.workers.actors.student import Retryable
from distill_rl.workers.actors.teacher import TeacherStats
from distill_rl.workers.cluster.calls import Overdue
from distill_rl.workers.cluster.hosts import Hosts
from distill_rl.workers.pipeline.pipeline import Pipeline
from distill_rl.workers.pipeline.recovery import StudentRecovery, TeacherRecovery
from distill_rl.workers.pipeline.student_group import StudentGroup
from distill_rl.workers.pipeline.sub_batch import PendingBatch

STEPS, ROWS = 5, 8


@dataclass(eq=False)
class Ref:
    """What a call returns."""

    done: bool = False
    value: Any = None
    error: Exception | None = None

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        self.done, self.value, self.error = True, value, error


@dataclass(eq=False)
class Actor:
    name: str
    alive: bool = True
    hangs: bool = False
    computed: bool = False
    """Its process group has done the first call in its queue, which has only to return."""
    queue: deque[tuple[Callable[..., tuple], Sequence[Any], Sequence[Ref]]] = field(default_factory=deque)

    def call(self, function: Callable[..., tuple], *arguments: Any, values: int = 1) -> list[Ref]:
        refs = [Ref() for _ in range(values)]
        self.queue.append((function, arguments, refs))
        if not self.alive:
            self.die()
        return refs

    def die(self) -> None:
        self.alive = False
        while self.queue:
            for ref in self.queue.popleft()[2]:
                ref.end(error=RuntimeError(f"{self.name} died"))

    @property
    def ready(self) -> bool:
        works = self.alive and not self.hangs and bool(self.queue)
        return works and all(each.done for each in self.queue[0][1] if isinstance(each, Ref))

    def run(self) -> None:
        self.computed = False
        function, arguments, refs = self.queue.popleft()
        errors = [each.error for each in arguments if isinstance(each, Ref) and each.error]
        if errors:  # Ray does not run a call whose arguments failed
            for ref in refs:
                ref.end(error=errors[0])
            return
        for ref, value in zip(refs, function(*(each.value if isinstance(each, Ref) else each for each in arguments))):
            ref.end(value)


@dataclass
class Ring:
    """A replica's memory: the student reads what is there at that moment, not what was there when it was published."""

    opened: int = 0
    is_open: bool = False
    parts: dict[int, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def open(self) -> None:
        self.close()
        self.is_open = True

    def close(self) -> None:
        self.opened, self.is_open = self.opened + 1, False
        self.parts.clear()

    def write(self, slots: Sequence[int], part: str) -> None:
        assert self.is_open
        for slot in slots:
            assert self.parts.get(slot) in {None, part, *self.read}, f"slot {slot} was overwritten before it was read"
            self.parts[slot] = part


class World:
    """All that runs, what may go wrong, and what the student has applied."""

    def __init__(self, random: Random, faults: Sequence[str], teachers: Sequence[TeacherConfig], sub_batches: int):
        self.sub_batches = sub_batches
        self.random, self.faults, self.happened = random, list(faults), 0
        self.student = Group(self, "student", 1, 1)
        self.teachers = [Group(self, each.name, each.parallel.tp, each.parallel.dp) for each in teachers]
        self.aligning: list[PendingBatch] = []
        self.aligned: list[PendingBatch] = []
        self.applied: list[tuple[int, int, tuple[str, ...]]] = []
        """Batch, sub-batch and teachers."""
        self.due = 0, 0
        """Batch and sub-batch that the student takes next."""
        self.called_ahead = 0

    def groups(self) -> list[Group]:
        return [self.student, *self.teachers]

    def happen(self) -> bool:
        """Lets one thing happen; returns whether there was any."""
        self.happened += 1
        assert self.happened < 5000, "it goes on for ever"
        possible: list[Callable[[], object]] = [ranks for group in self.groups() for ranks in group.ready()]
        possible += [lambda each=each: self.align(each) for each in self.aligning]
        if self.faults and self.random.random() < 0.05:
            self.fault(self.faults.pop())
            return True
        if possible:
            self.random.choice(possible)()
        return bool(possible)

    def fault(self, kind: str) -> None:
        group = self.random.choice(self.groups() if kind != "teacher dies" else self.teachers)
        actor = self.random.choice(group.actors)
        if kind == "hangs":
            actor.hangs = True
            return
        actor.die()
        if group is not self.student and self.random.random() < 0.5:  # its memory may be gone with it, or not
            group.rings[group.actors.index(actor) // group.size].close()

    def align(self, pending: PendingBatch) -> None:
        self.aligning.remove(pending)
        index, ranks = pending.documents.index, 1 + sum(len(group.rings) for group in self.teachers)
        pending.info = BatchInfo(index, Cursor(), 0, ROWS, 0, 0, 0, 0.0)
        pending.rows = [(index, rank) for rank in range(ranks)]  # type: ignore[misc]
        self.aligned.append(pending)

    def apply(self, rows: tuple[int, int], index: int, is_last: bool, sizes: Sequence[int], *published: Any) -> tuple:
        """Does what the student does: reads its targets, or says that it cannot, and takes them into its state."""
        if (rows[0], index) != self.due:
            return (Retryable("another one is due"),)
        replicas = iter(published)
        per_teacher = [[next(replicas) for _ in range(size)] for size in sizes]
        assert next(replicas, None) is None
        rank, names = 1, []
        for group, found in zip(self.teachers, per_teacher, strict=True):
            for ring, (opened, slots, part) in zip(group.rings, found):
                if ring.opened != opened:
                    return (Retryable("the ring is gone"),)
                assert {ring.parts[slot] for slot in slots} == {part}
                assert part == f"rows {(rows[0], rank + group.rings.index(ring))} sub-batch {index}"
            rank += len(group.rings)
            names += [group.name] if found else []
        for group, found in zip(self.teachers, per_teacher):
            for ring, (*_, part) in zip(group.rings, found):
                ring.read.add(part)
        assert is_last == (index == self.sub_batches - 1)
        self.applied.append((rows[0], index, tuple(names)))
        self.due = (rows[0] + 1, 0) if is_last else (rows[0], index + 1)
        return ({},)


class Group:
    """Stands for a WorkerGroup: of the student, or of a teacher, `size` ranks of which form a replica."""

    def __init__(self, world: World, name: str, size: int, replicas: int):
        self.world, self.name, self.size = world, name, size
        self.names = [f"{name}-{rank}" for rank in range(size * replicas)]
        self.actors = [Actor(each) for each in self.names]
        self.rings = [Ring() for _ in range(replicas)]

    def ready(self) -> Iterator[Callable[[], object]]:
        """The ranks of a process group work together, and return one by one."""
        for first in range(0, len(self.actors), self.size):
            leader, *others = self.actors[first : first + self.size]
            if all(actor.ready and not actor.computed for actor in (leader, *others)):
                yield lambda leader=leader, others=others: self._compute(leader, others)
            yield from (actor.run for actor in others if actor.ready and actor.computed)

    def _compute(self, leader: Actor, others: Sequence[Actor]) -> None:
        leader.run()
        for actor in others:
            actor.computed = True

    def submit_replicas(
        self, method: str, rows: Mapping[int, Any], sub_batch: int, slots: Any, *, size: int
    ) -> dict[int, tuple[Ref, dict]]:
        return {replica: self._submit_replica(replica, own, sub_batch, slots) for replica, own in rows.items()}

    def _submit_replica(self, replica: int, rows: Any, sub_batch: int, slots: Any) -> tuple[Ref, dict]:
        ring, part = self.rings[replica], f"rows {rows} sub-batch {sub_batch}"

        def forward() -> tuple[Any, TeacherStats]:
            ring.write([slot.index for slot in slots], part)
            return (ring.opened, [slot.index for slot in slots], part), TeacherStats()

        ranks = range(replica * self.size, (replica + 1) * self.size)
        calls = [
            self.actors[rank].call(forward if rank == ranks[0] else lambda: (None, TeacherStats()), values=2)
            for rank in ranks
        ]
        return calls[0][0], {call[1]: self.names[rank] for call, rank in zip(calls, ranks)}

    def submit_each(self, method: str, rows: Sequence[Any], *arguments: Any, ranks: Sequence[int]) -> dict[Ref, str]:
        return {
            self.actors[rank].call(self.world.apply, row, *arguments)[0]: self.names[rank]
            for rank, row in zip(ranks, rows, strict=True)
        }

    def collect(self, refs: list[Ref]) -> list[Ref]:
        return refs

    def start(self, *, size: int, timeout_s: float, ranks: Sequence[int] | None = None) -> dict[Ref, str]:
        chosen = range(len(self.actors)) if ranks is None else ranks
        return {self.actors[rank].call(lambda: (None,))[0]: self.names[rank] for rank in chosen}

    def renew(self, ranks: Sequence[int], timeout_s: float) -> None:
        for rank in ranks:
            self.actors[rank].die()
            self.actors[rank] = Actor(self.names[rank])
            if self is not self.world.student:
                self.rings[rank // self.size].close()

    def settle(self, timeout_s: float) -> None:
        while left := [actor for actor in self.actors if actor.queue]:
            if not self.world.happen():
                raise Overdue(left[0].name, actors=[actor.name for actor in left])
        if dead := [actor for actor in self.actors if not actor.alive]:
            raise WorkerError(dead[0].name, "its process died")

    def end(self, rank: int) -> None:
        self.actors[rank].die()

    def kill(self) -> None:
        for actor in self.actors:
            actor.die()


class Calls:
    """Stands for `Calls`: waits let things happen, and a wait in which nothing can happen any more is overdue."""

    after_death, monitor = "resume", None

    def __init__(self, world: World):
        self.world, self.forgotten = world, set[Actor]()
        self.hosts = Hosts()

    @property
    def everyone(self) -> set[str]:
        return {actor.name for group in self.world.groups() for actor in group.actors}

    def gather(
        self, calls: Mapping[Ref, str], *, what: str, timeout_s: float, meanwhile: Any = None, also: Any = None
    ) -> list[Any]:
        for _ in self._wait(calls):
            if errors := [ref.error for ref in calls if ref.error]:
                raise WorkerError("a worker", f"its process died during {what}", errors[0])
            if meanwhile is not None:
                meanwhile()
        return [ref.value for ref in calls]

    def outcomes(self, calls: Mapping[Ref, str], *, what: str, timeout_s: float) -> dict[Ref, Any]:
        for _ in self._wait(calls):
            pass
        return {ref: ref.error or ref.value for ref in calls}

    def _wait(self, calls: Mapping[Ref, str]) -> Iterator[None]:
        while pending := [name for ref, name in calls.items() if not ref.done]:
            yield
            if not self.world.happen():
                raise Overdue(pending[0], actors=pending)
        yield

    def dead(self, what: str = "") -> dict[str, DistillError]:
        actors = [actor for group in self.world.groups() for actor in group.actors]
        gone = [actor.name for actor in actors if not actor.alive and actor not in self.forgotten]
        return {name: WorkerError(name, "its process died", "killed") for name in gone}

    def lost(self, error: DistillError, among: object, what: str) -> dict[str, DistillError]:
        return (dict.fromkeys(error.actors, error) if isinstance(error, Overdue) else {}) | self.dead()

    def forget(self, actor: Actor) -> None:
        self.forgotten.add(actor)


@dataclass
class Rings:
    """Stands for the connector."""

    world: World

    def reconnect(self, teacher: TeacherConfig, group: Group, first: int) -> None:
        group.rings[first // group.size].open()

    def connect(self, lost: set[str]) -> None:
        for group in self.world.teachers:
            for ring in group.rings:
                ring.open()


@dataclass
class Aligners:
    """Stands for the pool: batches are aligned in any order."""

    world: World
    queue: int = 0
    restarts: int = 0

    def submit(self, batch: DocumentBatch) -> PendingBatch:
        self.world.aligning.append(PendingBatch(batch))
        return self.world.aligning[-1]

    def advance(self) -> list[PendingBatch]:
        aligned, self.world.aligned = self.world.aligned, []
        return aligned

    def awaited(self) -> tuple:
        return ()

    def settle(self, pending: PendingBatch, advance: Callable[[], None]) -> BatchInfo:
        while pending.info is None:
            assert self.world.happen()
            advance()
        advance()
        return pending.info

    def abandon(self) -> None:
        self.world.aligning.clear()
        self.world.aligned.clear()


class Run:
    """What the driver does: trains batch after batch, and from the last checkpoint when the student is restarted."""

    def __init__(self, random: Random, faults: Sequence[str], **of_faults: Any):
        self.config = config = Config()
        config.train.global_batch_size, config.train.micro_batch_size = ROWS, 2
        config.prefetch.depth, config.prefetch.slots = 1, random.choice([None, 2, 3, 4])
        shapes = {"wide": ParallelConfig(1, 2), "many": ParallelConfig(2, 1)}
        config.teachers = [TeacherConfig(name=name, parallel=shape) for name, shape in shapes.items()]
        for name, value in of_faults.items():
            setattr(config.faults, name, value)
        plan, ring = BatchPlan.from_config(config, 0), ring_plan(config)
        self.world = World(random, faults, config.teachers, -(-ROWS // ring.rows_per_sub_batch))
        self.random, self.checkpoint = random, (0, [])
        calls, rings, student = Calls(self.world), Rings(self.world), self.world.student
        teachers: Any = list(zip(config.teachers, self.world.teachers))
        self.pipeline = Pipeline(Aligners(self.world), teachers, plan, ring)  # type: ignore[arg-type]
        parts: Any = (calls, rings, self.pipeline)
        self.recovery = TeacherRecovery(config, teachers, set(student.names), *parts)
        self.restart = StudentRecovery(config, student, *parts, self.recovery)  # type: ignore[arg-type]
        self.student = StudentGroup(config, calls, self.pipeline, self.recovery, student, StepTimer())  # type: ignore[arg-type]
        rings.connect(set())

    def train(self) -> None:
        step = 0
        while step < STEPS:
            ahead = deque(self.submit(index) for index in range(step, min(step + 2, STEPS)))
            try:
                while ahead:
                    saves = self.random.random() < 0.3
                    following = None if saves or len(ahead) < 2 else ahead[1]
                    self.student.train_step(ahead[0], lambda following=following: following)
                    ahead.popleft().release()
                    step += 1
                    if step + len(ahead) < STEPS:
                        ahead.append(self.submit(step + len(ahead)))
                    if saves:
                        assert not self.student.is_within_step
                        self.checkpoint = step, list(self.world.applied)
                    self.world.called_ahead += self.student.is_within_step
            except DistillError as error:
                lost = self.restart.lost(error, f"step {step + 1}")
                for batch in ahead:
                    batch.release()
                step = self.restart.restart(lost, self.load)

    def submit(self, index: int) -> PendingBatch:
        return self.pipeline.submit(DocumentBatch(index, (), Cursor()))

    def load(self) -> int:
        step, self.world.applied = self.checkpoint[0], list(self.checkpoint[1])
        self.world.due, self.student.is_within_step = (step, 0), False
        return step


def whole(world: World) -> bool:
    wanted = [(step, index) for step in range(STEPS) for index in range(world.sub_batches)]
    return [each[:2] for each in world.applied] == wanted


@settings(max_examples=200)
@given(st.randoms(use_true_random=False), st.lists(st.sampled_from(["dies", "teacher dies"]), max_size=4))
def test_deaths_within_the_budget_change_nothing(random, faults):
    run = Run(random, faults, teacher_restarts=8, student_restarts=8)
    run.train()
    assert whole(run.world)
    assert {teachers for *_, teachers in run.world.applied} == {("wide", "many")}
    assert all(ledger.free == ledger.num_slots for ledger in run.pipeline._ledgers.values())


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_one_that_hangs_is_replaced(random):
    run = Run(random, ["hangs"], teacher_restarts=8, student_restarts=8)
    run.train()
    assert whole(run.world)


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_a_run_goes_on_without_a_teacher_whose_budget_is_spent(random):
    run = Run(random, ["teacher dies"], teacher_restarts=0, lost_teacher="drop_and_reweight")
    run.train()
    assert whole(run.world)
    teachers = [teachers for *_, teachers in run.world.applied]
    assert teachers == sorted(teachers, key=len, reverse=True), "a lost teacher never comes back"
    assert len(teachers[-1]) == 2 - len(run.pipeline.lost)
    assert all(ledger.free == ledger.num_slots for ledger in run.pipeline._ledgers.values())


def test_the_student_is_called_one_step_ahead_unless_a_save_comes_between():
    ahead = dict.fromkeys([None, 2, 3, 4], 0)
    for seed in range(20):
        run = Run(Random(seed), [])
        run.train()
        assert whole(run.world)
        assert run.world.called_ahead < STEPS
        ahead[run.config.prefetch.slots] += run.world.called_ahead
    assert ahead[None] > 0
    assert ahead[4] > 0, "on the first of two sub-batches"
    assert ahead[2] == ahead[3] == 0, "a ring for one sub-batch has no room"


@given(st.randoms(use_true_random=False), st.sampled_from(["dies", "hangs"]))
def test_without_a_budget_the_first_fault_ends_the_run(random, fault):
    run = Run(random, [fault], teacher_restarts=0, student_restarts=0)
    try:
        run.train()
    except WorkerError:
        assert not run.world.faults
    else:
        assert run.world.faults, "it happened, and nobody noticed"
    assert len(run.world.applied) == len(set(run.world.applied))
