"""The teacher actor: a thin shell around TeacherEngine that publishes what the engine computes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from distill_rl.config.schema import Config, ParallelConfig, TeacherConfig
from distill_rl.observe.metrics import Metric
from distill_rl.transport.base import Handle, Slot
from distill_rl.types import RankBatch
from distill_rl.workers.rank import RankWorker


@dataclass(frozen=True, slots=True)
class Published:
    """What one teacher rank wrote for one batch."""

    handles: tuple[Handle, ...]
    metrics: dict[str, Metric]
    score: float = 0.0
    """summed over the supervised tokens of its part of the batch; see `TeacherEngine.score`"""


class TeacherWorker(RankWorker):
    """One rank of one replica: `rank` counts over all replicas, each replica is a process group of its own."""

    def __init__(
        self, rank: int, config: Config, teacher: TeacherConfig, vocabulary_size: int, transport: str, threads: int
    ):
        super().__init__(config, transport, threads)
        self._rank, self._teacher, self._vocabulary_size = rank, teacher, vocabulary_size

    def start(self, host: str, port: int) -> None:
        """Loads the model."""
        from distill_rl.teacher.engine import TeacherEngine

        tp = self._teacher.parallel.tp
        world = self._join(self._rank % tp, ParallelConfig(dp=1, tp=tp), host, port)
        self._engine = TeacherEngine(self._config, self._teacher, world, vocabulary_size=self._vocabulary_size)

    def forward(self, batch: RankBatch, first_slot: int, generation: int) -> Published:
        """Publishes one micro-batch per slot, from `first_slot` on. All ranks of a replica compute; the first publishes."""
        start = time.perf_counter()
        handles = []
        for offset, (layout, tensors) in enumerate(self._engine.forward(batch)):
            if self._world.tp_rank == 0:
                handles.append(self._transport.publish(Slot(first_slot + offset, generation), tensors, layout))
        if self._world.tp_rank:
            return Published((), {})
        seconds = Metric(time.perf_counter() - start, "max")
        num_bytes = Metric(float(sum(handle.num_bytes for handle in handles)), "sum")
        return Published(
            tuple(handles),
            {f"timing/{self._teacher.name}/forward": seconds, "transport/bytes": num_bytes},
            self._engine.score,
        )
