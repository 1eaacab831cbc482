"""The timeline of real actors: named rows, calls in the row of their actor, visible overlap."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from distill_rl.workers.cluster.telemetry import write_timeline

pytestmark = pytest.mark.ray


class Worker:
    def worker_id(self):
        from distill_rl.workers.cluster.telemetry import ray

        return ray.get_runtime_context().get_worker_id()

    def meet(self, pipe: Path, mode: str) -> None:
        """Returns once two actors are in this call: opening a named pipe waits for its other end."""
        pipe.open(mode).close()

    def alone(self) -> None:
        pass


@pytest.fixture
def actor_ids(ray_cluster, tmp_path):
    """The ids of three actors that have worked: the first two at the same time, then the first alone."""
    actors = [ray_cluster.remote(Worker).options(num_cpus=0).remote() for _ in range(3)]
    ids = ray_cluster.get([actor.worker_id.remote() for actor in actors], timeout=60)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    both = [actor.meet.remote(pipe, mode) for actor, mode in zip(actors, ("rb", "wb"))]
    ray_cluster.get([*both, actors[2].alone.remote()], timeout=60)
    ray_cluster.get(actors[0].alone.remote(), timeout=60)
    yield ids
    for actor in actors:
        ray_cluster.kill(actor)


def calls(trace: dict, row: str, name: str) -> list[tuple[float, float]]:
    """(start, end) of one actor's calls of a method, in microseconds."""
    (thread,) = (e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["args"]["name"] == row)
    boxes = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == thread and e["name"] == name]
    return [(box["ts"], box["ts"] + box["dur"]) for box in boxes]


def test_calls_are_in_their_actors_row_and_show_overlap(actor_ids, tmp_path):
    path = tmp_path / "logs" / "timeline.json"
    write_timeline(path, {actor_ids[0]: "teacher/dp0-tp0", actor_ids[1]: "student-dp0-tp0"})
    trace = json.loads(path.read_text())
    assert [file.name for file in path.parent.iterdir()] == ["timeline.json"]
    ((teacher_start, teacher_end),) = calls(trace, "teacher/dp0-tp0", "meet")
    ((student_start, student_end),) = calls(trace, "student-dp0-tp0", "meet")
    assert max(teacher_start, student_start) < min(teacher_end, student_end)
    ((alone_start, _),) = calls(trace, "teacher/dp0-tp0", "alone")
    assert alone_start >= teacher_end
    assert not calls(trace, "student-dp0-tp0", "alone")


def test_only_requested_rows_and_the_driver_are_written_in_order(actor_ids, tmp_path):
    write_timeline(tmp_path / "timeline.json", {actor_ids[1]: "second", actor_ids[0]: "first"})
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert sorted(rows.values(), key={name: order[tid] for tid, name in rows.items()}.get) == [
        "driver", "second", "first",
    ]  # fmt: skip
    assert {event["tid"] for event in events} == set(rows)
    assert all(isinstance(event["pid"], int) and isinstance(event["tid"], int) for event in events)
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0


def test_a_timeline_that_cannot_be_written_is_a_warning(actor_ids, tmp_path, caplog):
    (tmp_path / "logs").write_text("a file")
    with caplog.at_level(logging.WARNING, "distill_rl"):
        write_timeline(tmp_path / "logs" / "timeline.json", {actor_ids[0]: "teacher"})
    assert "timeline.json could not be written: " in caplog.text
