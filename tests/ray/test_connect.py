"""Choosing, trying out and giving up a transport, with real workers in this process instead of in Ray actors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill_rl.config.derive import ring_plan
from distill_rl.config.schema import Config, ParallelConfig, TeacherConfig
from distill_rl.errors import ConfigError, TransportError
from distill_rl.transport.choose import TransportChoice
from distill_rl.transport.segment import Segment
from distill_rl.workers.actors.student import StudentWorker
from distill_rl.workers.actors.teacher import TeacherWorker
from distill_rl.workers.pipeline import pipeline
from distill_rl.workers.pipeline.pipeline import Connector

pytestmark = pytest.mark.ray


class Group:
    """Workers that are called one after another; `submit` returns their answers at once."""

    def __init__(self, names: list[str], workers: list[Any]):
        self.names, self.actors = names, workers

    def submit(self, method: str, *arguments: Any, ranks: list[int] | None = None) -> dict[Any, str]:
        return {
            Answer(getattr(self.actors[rank], method)(*arguments)): self.names[rank]
            for rank in ranks or range(len(self.actors))
        }

    def call(self, method: str, *arguments: Any, **_: Any) -> list[Any]:
        return [getattr(worker, method)(*arguments) for worker in self.actors]


class Answer:
    def __init__(self, value: Any):
        self.value = value


class Calls:
    def gather(self, calls: dict[Answer, str], **_: Any) -> list[Any]:
        return [answer.value for answer in calls]


def config(transport: str, *, student=(1, 1), teacher=(1, 1)) -> Config:
    settings = Config(transport=transport)
    settings.student.parallel = ParallelConfig(*student)
    settings.teachers = [TeacherConfig(name="big", parallel=ParallelConfig(*teacher))]
    settings.data.max_length, settings.train.global_batch_size, settings.train.micro_batch_size = 8, 8, 1
    return settings


@pytest.fixture
def build(ray_cluster):
    opened: list[Any] = []

    def build_connector(settings: Config) -> Connector:
        teacher = settings.teachers[0]
        world = SimpleNamespace(device=torch.device("cpu"), tp_rank=0)
        teachers = []
        for rank in range(teacher.parallel.dp * teacher.parallel.tp):
            worker = TeacherWorker(rank, settings, teacher, 100, 1)
            worker._engine = SimpleNamespace(micro_batch_size=1, bytes_per_token=64)
            teachers.append(worker)
        students = [
            StudentWorker(rank, settings, 1, (), 100, 1)
            for rank in range(settings.student.parallel.dp * settings.student.parallel.tp)
        ]
        for worker in (*teachers, *students):
            worker._world = world
        opened.extend((*students, *teachers))
        names = [f"big/dp{i // teacher.parallel.tp}-tp{i % teacher.parallel.tp}" for i in range(len(teachers))]
        student = Group([f"student-{i}" for i in range(len(students))], students)
        return Connector(settings, [(teacher, Group(names, teachers))], student, ring_plan(settings), Calls())

    yield build_connector
    for worker in opened:
        worker.close_others(())


def names(chosen: dict[str, TransportChoice]) -> dict[str, str]:
    return {source: choice.name for source, choice in chosen.items()}


@pytest.mark.parametrize("transport", ["auto", "object_store", "shared_memory"])
def test_every_replica_reaches_its_readers(build, transport, capsys):
    connector = build(config(transport, student=(2, 2), teacher=(4, 1)))
    expected = "object_store" if transport == "auto" else transport
    assert names(connector.connect()) == {f"big/dp{replica}-tp0": expected for replica in range(4)}
    assert f"transport {expected}: " in capsys.readouterr().out
    for rank, worker in enumerate(connector._student.actors):
        assert list(worker._transports) == [expected]
        if expected == "shared_memory":
            replicas = (0, 1) if rank < 2 else (2, 3)
            assert set(worker._transports[expected]._opened) == {f"big/dp{replica}-tp0" for replica in replicas}


def test_auto_reports_and_drops_a_transport_that_fails(build, monkeypatch, capsys):
    """CUDA IPC is chosen although there is no GPU."""
    monkeypatch.setattr(pipeline, "choose", lambda *_: TransportChoice("cuda_ipc", "they are on one GPU"))
    connector = build(config("auto"))
    assert names(connector.connect()) == {"big/dp0-tp0": "object_store"}
    assert "transport object_store: cuda_ipc does not work: " in capsys.readouterr().out
    ((_, teachers),) = connector._teachers
    assert [list(worker._transports) for worker in (*teachers.actors, *connector._student.actors)] == [
        ["object_store"]
    ] * 2


def test_shared_memory_falls_back_to_a_file(build, monkeypatch):
    """As in containers whose processes cannot see each other."""
    attach = Segment.attach

    def only_files(address, what):
        if not address.folder:
            raise TransportError(what, "its shared memory must be there to open", "no such file")
        return attach(address, what)

    monkeypatch.setattr(Segment, "attach", only_files)
    connector = build(config("shared_memory"))
    assert names(connector.connect()) == {"big/dp0-tp0": "shared_memory"}


@pytest.mark.parametrize("transport", ["shared_memory", "auto"])
def test_a_named_or_last_transport_that_fails_is_an_error(build, monkeypatch, transport):
    def refuse(self, offer):
        raise TransportError("ring", "must be there", "not there")

    for medium in ("shared_memory.SharedMemoryTransport", "object_store.ObjectStoreTransport"):
        monkeypatch.setattr(f"distill_rl.transport.{medium}.open", refuse)
    with pytest.raises(
        ConfigError, match=r"transport: (\w+ )?must work from big/dp0-tp0 to the student; got ring: must be"
    ):
        build(config(transport)).connect()
