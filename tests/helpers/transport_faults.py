"""The contract of transports when processes are killed, calls fail and teachers are replaced. A test class inherits
the parts that apply and names its transport.

class TestSharedMemory(Killed, Queued):
    name = "shared_memory"

    @pytest.fixture
    def stage_of(self): ...  # two processes → a Stage on them
"""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from distill_rl.errors import TransportError
from distill_rl.transport.base import Layout, Ring, Slot
from distill_rl.transport.choose import make
from distill_rl.transport.segment import sweep
from tests.helpers.command import shared_memory, until
from tests.helpers.transports import Process, forget_exports

LAYOUT = Layout(0, 1, 4)
KILLS = 6
WORDS = 1 << 20
"""8 MiB per slot: most of the time is spent on copying, so most kills hit a copy."""


class Killed:
    """For transports whose slots several processes have open."""

    outlives_its_writer = True
    """Whether published content can still be read when its writer is dead."""

    @pytest.fixture
    def processes(self):
        made = [Process(), Process()]
        yield made
        for process in made:
            process.kill()

    def test_writer_killed_while_writing_leaves_unreadable_slot(self, processes, stage_of):
        writer, reader = stage_of(processes).pair(Ring(2, 1 << 20))
        other = writer.publish(Slot(1, 2), {"x": torch.arange(4)}, LAYOUT)
        content = {name: torch.zeros(1 << 16, dtype=torch.uint8) for name in "xy"}
        handle = writer.publish(Slot(0, 2), content, LAYOUT)
        reader.read(handle)

        with pytest.raises(EOFError):
            writer.publish_half_and_die(Slot(0, 4), {name: tensor + 1 for name, tensor in content.items()}, LAYOUT)
        assert processes[0].wait() < 0

        why = (
            r"generation 3 \(being written, or left by a writer that died" if self.outlives_its_writer else "must live"
        )
        for claim in (handle, replace(handle, slot=Slot(0, 4))):
            with pytest.raises(TransportError, match=why):
                reader.read(claim)
        if self.outlives_its_writer:
            assert reader.read(other)["x"].tolist() == [0, 1, 2, 3]
        else:
            with pytest.raises(TransportError, match="its writer must live while it is read"):
                reader.read(other)

    @pytest.mark.parametrize("victim", ["writer", "reader"])
    def test_kill_at_any_point_neither_tears_nor_hangs(self, tmp_path, victim, stage_of):
        sweep()
        before = shared_memory()
        draw = random.Random(0)
        ring = Ring(2, 8 * WORDS)
        for turn in range(KILLS):
            sides = [Process(), Process()]
            stage = stage_of(sides)
            writer, reader = stage.pair(ring)
            address = tmp_path / f"socket-{turn}"
            writer.start("pour", str(address), ring.num_slots, WORDS)
            until(Path(f"{address}-listens").exists, "a writer that listens")
            reader.start("drink", str(address))
            until(Path(f"{address}-met").exists, "a reader that reads")
            time.sleep(draw.uniform(0.0, 0.1))  # the moment of the kill
            if victim == "writer":
                sides[0].kill()
                _, torn = sides[1].answer()
                assert torn == []
            else:
                sides[1].kill()
                sides[0].answer()
                stage.writer(ring).publish(Slot(0, 2), {"x": torch.zeros(1)}, LAYOUT)  # a new ring works
            for side in sides:
                side.kill()
            sweep()
        left = lambda: {name for name in shared_memory() - before if not name.startswith("cuda.")}  # noqa: E731
        until(lambda: not left(), "shared memory given back")  # cuda.*: the driver's own


class Queued:
    """For all transports, with queued calls of real actors."""

    name: str
    device = "cpu"

    @pytest.fixture
    def actors(self, ray_cluster):
        """`actors(cls, *arguments)` starts one; all are killed at the end."""
        made, processes = [], []
        share = {"num_gpus": 0.1} if self.device == "cuda" else {}

        def start(cls, *arguments, **options):
            made.append(ray_cluster.remote(num_cpus=0, **share, **options)(cls).remote(*arguments))
            processes.append(psutil.Process(ray_cluster.get(made[-1].pid.remote(), timeout=60)))
            return made[-1]

        yield start
        for actor in made:
            ray_cluster.kill(actor)
        psutil.wait_procs(processes, timeout=60)
        for process in processes:
            forget_exports(process.pid)

    @pytest.fixture
    def teacher(self, actors):
        """Another one with every call."""
        return lambda ring: actors(Teacher, self.name, self.device, ring)

    @pytest.fixture
    def student(self, actors):
        return actors(Student, self.name, self.device)

    def test_failed_queued_argument_affects_only_its_batch(self, ray_cluster, teacher, student):
        ray, ring = ray_cluster, Ring(3, 4096)
        writer = teacher(ring)
        connect(ray, writer, student)

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
            calls.append(student.train.remote(writer.forward.remote(batch.remote(number), slot)))
        results += [outcome(ray, call) for call in calls[-ring.num_slots :]]
        assert results == [[number] * 4 if number not in (1, 4) else f"batch {number} is bad" for number in range(9)]

    def test_replaced_teacher_runs_no_queued_calls(self, ray_cluster, actors, teacher, student):
        ray, ring = ray_cluster, Ring(3, 4096)
        first, gate = teacher(ring), actors(Gate, max_concurrency=4)
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

        second = teacher(ring)
        connect(ray, second, student)
        calls = [student.train.remote(second.forward.remote(10 + number, Slot(number, 2))) for number in range(3)]
        ray.get(gate.open.remote(), timeout=60)
        assert ray.get(calls, timeout=60) == [[10 + number] * 4 for number in range(3)]
        if self.name != "object_store":  # which has no rings
            with pytest.raises(TransportError, match="replaced by that of a newer writer"):
                ray.get(student.train.remote(stale), timeout=60)


class Worker:
    def pid(self):
        return os.getpid()


class Teacher(Worker):
    def __init__(self, name, device, ring):
        self._device = device
        self._transport = make(name, deadline_s=30, ring=ring, source="teacher", node_id="node", device=device)

    def offer(self, reader):
        return self._transport.offer(reader)

    def accept(self, receipt):
        self._transport.accept(receipt)

    def forward(self, value, slot):
        return (self._transport.publish(slot, {"x": torch.full((4,), value, device=self._device)}, LAYOUT),)


class Student(Worker):
    def __init__(self, name, device):
        self._transport = make(name, deadline_s=30, node_id="node", device=device)

    def open(self, offer):
        return self._transport.open(offer)

    def train(self, published):
        with self._transport.fetch(published[0]) as tensors:
            return tensors["x"].tolist()


class Gate(Worker):
    """Holds calls until the test opens it."""

    def __init__(self):
        self._event = threading.Event()

    def wait(self, value):
        assert self._event.wait(60)
        return value

    def open(self):
        self._event.set()


def connect(ray, teacher, student):
    ray.get(teacher.accept.remote(student.open.remote(teacher.offer.remote(0))), timeout=60)


def outcome(ray, call):
    try:
        return ray.get(call, timeout=60)
    except ValueError as error:
        return str(error.cause)
