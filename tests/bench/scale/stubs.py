"""Ranks that compute nothing: the actors of a run, with their calls, rings and handles, around engines without a model.

A rank has no process group. It holds a few integers per position in place of a teacher's targets, which travel through
the real transport.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distill_rl.observe.metrics import Metric
from distill_rl.transport.base import Layout
from distill_rl.types import RankBatch
from distill_rl.workers.actors.rank import RankWorker
from distill_rl.workers.actors.student import StudentWorker
from distill_rl.workers.actors.teacher import TeacherWorker


@dataclass(frozen=True, slots=True)
class StubWorld:
    """What an actor asks of its `World`."""

    reports: bool
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def all_agree(self, mine: bool) -> bool:
        return mine


class StubTeacherEngine:
    """Yields position numbers as targets, micro-batch by micro-batch."""

    bytes_per_token = 4
    score = 0.0

    def __init__(self, micro_batch_size: int):
        self.micro_batch_size = micro_batch_size

    def forward(self, batch: RankBatch) -> Iterator[tuple[Layout, dict[str, Tensor]]]:
        rows, width = batch.rows.shape
        for first in range(0, rows, self.micro_batch_size):
            count = min(self.micro_batch_size, rows - first)
            tensors = {"probe": torch.arange(count * width, dtype=torch.int32)}
            yield Layout(batch.first_row + first, count, width), tensors

    def close(self) -> None:
        """Nothing was opened."""


IDLE, ENDED = "bench/idle", "bench/ended"
"""Metrics of a step: seconds that the rank was idle before it, and the Unix time at which it ended; both of the slowest rank."""


class StubStudentEngine:
    """Returns the metrics of a student that learns nothing, after `seconds` in which it sleeps."""

    def __init__(self, world: StubWorld, num_teachers: int, seconds: float = 0.0):
        self.world, self._num_teachers, self._seconds = world, num_teachers, seconds
        self.step, self._began, self._ended = 0, 0.0, 0.0

    def forward_backward(
        self, batch: RankBatch, targets: object, scores: Sequence[float], *, last: bool
    ) -> dict[str, Metric]:
        self._began = time.time()
        time.sleep(self._seconds)
        names = ["loss", "kl_loss", "ce_loss", "teacher_mass", *(f"kl_loss/{i}" for i in range(self._num_teachers))]
        means = {f"train/{name}": Metric(1.0, "mean", batch.num_labels) for name in names}
        return means | {"train/tokens": Metric(batch.num_labels, "sum")}

    def optim_step(self) -> dict[str, Metric]:
        self.step += 1
        idle, self._ended = self._began - (self._ended or self._began), time.time()
        times = {IDLE: Metric(idle, "max"), ENDED: Metric(self._ended, "max")}
        norms = {name: Metric(1.0, "last") for name in ("train/grad_norm", "train/lr")}
        return times | norms | {name: Metric(0.0, "max") for name in ("train/skipped", "train/unlabelled")}


class _Stub(RankWorker):
    """A rank without a process group."""

    def serve_store(self, world_size: int, one_node: bool) -> tuple[str, int]:
        return "", 0

    def stop(self) -> None:
        self.close_others(())


class StubTeacher(_Stub, TeacherWorker):
    def start(self, host: str, port: int, gpu_memory: float = 1.0) -> None:
        per_row = self._teacher.parallel.ranks_per_row
        self._world: Any = StubWorld(reports=self._rank % self._teacher.ranks_per_replica % per_row == 0)
        self._engine: Any = StubTeacherEngine(self._config.train.micro_batch_size)


class StubStudent(_Stub, StudentWorker):
    seconds = 0.0
    """Of a step."""

    def start(self, host: str, port: int, gpu_memory: float = 1.0) -> None:
        self._world: Any = StubWorld(reports=self._rank % self._config.student.parallel.ranks_per_row == 0)
        self._engine: Any = StubStudentEngine(self._world, len(self._config.teachers), self.seconds)

    def save(self, directory: str, marker: str | None) -> None:
        """Nothing has been learnt."""


def sleeping_student(seconds: float) -> type[StubStudent]:
    """The class of ranks whose steps take so long."""
    return type("StubStudent", (StubStudent,), {"seconds": seconds})
