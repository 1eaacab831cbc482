"""Writers and readers that are killed, calls that fail, teachers that are replaced."""

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distill_rl.errors import TransportError
from distill_rl.transport.base import Layout, Ring, Slot
from distill_rl.transport.choose import make
from distill_rl.transport.segment import sweep
from tests.helpers.command import shared_memory, until
from tests.helpers.transports import Process, Stage

pytestmark = pytest.mark.ray

LAYOUT = Layout(0, 1, 4)
KILLS = 6
WORDS = 1 << 20
"""8 MiB a slot: most of the time goes into copying, so most kills meet one"""


@pytest.fixture
def processes():
    made = [Process(), Process()]
    yield made
    for process in made:
        process.kill()


@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_a_writer_that_dies_in_mid_copy_leaves_a_slot_that_cannot_be_read(processes, tmp_path, backing):
    stage = Stage("shared_memory", processes, backing=backing)
    writer, reader = stage.pair(Ring(2, 1 << 20))
    other = writer.publish(Slot(1, 2), {"x": torch.arange(4)}, LAYOUT)
    handle = writer.publish(Slot(0, 2), {"x": torch.zeros(1 << 16, dtype=torch.uint8)}, LAYOUT)
    reader.read(handle)

    (tmp_path / "data").write_bytes(b"\1" * (1 << 16))
    with pytest.raises(EOFError):
        writer.publish_and_die(Slot(0, 4), tmp_path / "data", LAYOUT)
    assert processes[0].wait() < 0

    for claim in (handle, replace(handle, slot=Slot(0, 4))):
        with pytest.raises(TransportError, match=r"generation 3 \(being written, or left by a writer that died"):
            reader.read(claim)
    assert reader.read(other)["x"].tolist() == [0, 1, 2, 3]
    processes[1].kill()


@pytest.mark.parametrize("victim", ["writer", "reader"])
@pytest.mark.parametrize("backing", ["memfd", "file"])
def test_a_kill_at_any_point_tears_nothing_hangs_nobody_and_leaves_nothing(tmp_path, victim, backing):
    sweep()
    before = shared_memory()
    draw = random.Random(0)
    ring = Ring(2, 8 * WORDS)
    for turn in range(KILLS):
        sides = [Process(), Process()]
        writer, reader = Stage("shared_memory", sides, backing=backing).pair(ring)
        address = tmp_path / f"socket-{turn}"
        writer.start("pour", str(address), ring.num_slots, WORDS)
        until(address.exists, "a writer that listens")
        reader.start("drink", str(address))
        until(Path(f"{address}-met").exists, "a reader that reads")
        time.sleep(draw.uniform(0.0, 0.1))  # the point itself, not a wait for it
        if victim == "writer":
            sides[0].kill()
            _, torn = sides[1].answer()
            assert torn == []
        else:
            sides[1].kill()
            last = sides[0].answer()
            writer.release(last)
            writer.publish(Slot(last.index, last.generation + 2), {"x": torch.zeros(1)}, LAYOUT)
        for side in sides:
            side.kill()
        sweep()
    assert shared_memory() == before


class Teacher:
    def __init__(self, name, ring):
        self._transport = make(name, deadline_s=30, ring=ring, source="teacher", node_id="node")

    def offer(self, reader):
        return self._transport.offer(reader)

    def accept(self, receipt):
        self._transport.accept(receipt)

    def forward(self, value, slot):
        return (self._transport.publish(slot, {"x": torch.full((4,), value)}, LAYOUT),)


class Student:
    def __init__(self, name):
        self._transport = make(name, deadline_s=30, node_id="node")

    def open(self, offer):
        return self._transport.open(offer)

    def train(self, published):
        with self._transport.fetch(published[0]) as tensors:
            return tensors["x"].tolist()


class Gate:
    """Lets a call wait until the test says go."""

    def __init__(self):
        import threading

        self._event = threading.Event()

    def wait(self, value):
        assert self._event.wait(60)
        return value

    def open(self):
        self._event.set()


@pytest.fixture
def actors(ray_cluster):
    """`actors(cls, *arguments)` starts one; all are killed at the end."""
    made = []

    def start(cls, *arguments, **options):
        made.append(ray_cluster.remote(num_cpus=0, **options)(cls).remote(*arguments))
        return made[-1]

    yield start
    for actor in made:
        ray_cluster.kill(actor)


def connect(ray, teacher, student):
    ray.get(teacher.accept.remote(student.open.remote(teacher.offer.remote(0))), timeout=60)


@pytest.mark.parametrize("name", ["object_store", "shared_memory"])
def test_a_failed_argument_in_mid_queue_spoils_its_own_batch_only(ray_cluster, actors, name):
    ray, ring = ray_cluster, Ring(3, 4096)
    teacher, student = actors(Teacher, name, ring), actors(Student, name)
    connect(ray, teacher, student)

    @ray.remote(num_cpus=0)
    def batch(number):
        if number in (1, 4):
            raise ValueError(f"batch {number} is bad")
        return number

    calls, results = [], []
    for number in range(9):
        if number >= ring.num_slots:  # the rule that frees a slot: its readers' calls have returned
            results.append(outcome(ray, calls[number - ring.num_slots]))
        slot = Slot(number % ring.num_slots, 2 * number + 2)
        calls.append(student.train.remote(teacher.forward.remote(batch.remote(number), slot)))
    results += [outcome(ray, call) for call in calls[-ring.num_slots :]]
    assert results == [[number] * 4 if number not in (1, 4) else f"batch {number} is bad" for number in range(9)]


def outcome(ray, call):
    try:
        return ray.get(call, timeout=60)
    except ValueError as error:
        return str(error.cause)


@pytest.mark.parametrize("name", ["object_store", "shared_memory"])
def test_a_replaced_teacher_runs_none_of_the_calls_that_waited_for_the_first(ray_cluster, actors, name):
    ray, ring = ray_cluster, Ring(3, 4096)
    first, student, gate = actors(Teacher, name, ring), actors(Student, name), actors(Gate, max_concurrency=4)
    connect(ray, first, student)
    published = first.forward.remote(0, Slot(0, 2))
    assert ray.get(student.train.remote(published), timeout=60) == [0] * 4
    waiting = [
        student.train.remote(first.forward.remote(gate.wait.remote(number), Slot(number, 2))) for number in (1, 2)
    ]
    stale = ray.get(published, timeout=60)
    ray.kill(first)
    for call in waiting:
        with pytest.raises(ray.exceptions.RayActorError) as raised:
            ray.get(call, timeout=60)
        assert raised.value.actor_id == first._actor_id.hex()

    second = actors(Teacher, name, ring)
    connect(ray, second, student)
    calls = [student.train.remote(second.forward.remote(10 + number, Slot(number, 2))) for number in range(3)]
    ray.get(gate.open.remote(), timeout=60)
    assert ray.get(calls, timeout=60) == [[10 + number] * 4 for number in range(3)]
    if name == "shared_memory":
        with pytest.raises(TransportError, match="replaced by that of a newer writer"):
            ray.get(student.train.remote(stale), timeout=60)
