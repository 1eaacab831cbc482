"""The teacher actor: a thin shell around a TeacherBackend that publishes its targets."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distill_rl.config.facts import row_width
from distill_rl.config.schema import Config, ParallelConfig, TeacherConfig
from distill_rl.system.memory import peak_gib
from distill_rl.transport.base import Handle, Offer, Receipt, Ring, Slot, readers_of
from distill_rl.transport.segment import Backing
from distill_rl.types import RankBatch
from distill_rl.workers.actors.rank import PROBE_LAYOUT, RankWorker, probe_tensors, reporting, see_assigned_gpus
from distill_rl.workers.cluster.telemetry import Gauges
from distill_rl.workers.pipeline.sub_batch import FIRST_GENERATION

if TYPE_CHECKING:
    from distill_rl.teacher.stored import StoredTeacher

log = logging.getLogger(__name__)
_SLACK = 4096
"""Bytes of a slot for the gaps between its tensors."""


@dataclass(frozen=True, slots=True)
class TeacherStats:
    """Measurements of one teacher rank for one sub-batch."""

    num_bytes: int = 0
    num_positions: int = 0
    """Positions of the rows, padding included."""
    forward_s: float = 0.0
    """Time of the whole call."""
    publish_s: float = 0.0
    peak_gib: float = 0.0
    """The most memory that the rank has held so far; see `peak_memory`."""
    tokens_read: int = 0
    """Tokens whose targets came from a store."""
    tokens_computed: int = 0
    """Tokens whose targets a store lacked."""


@dataclass(frozen=True, slots=True)
class Published:
    """What one teacher rank published for one sub-batch. Only the student reads it; the driver passes it on unopened."""

    handles: tuple[Handle, ...] = ()
    score: float = 0.0
    """Sum over the supervised tokens of its part of the batch; see `TeacherBackend.score`."""


Returned = tuple[Published, TeacherStats]
"""Two values of a call, each with a reference of its own."""


class TeacherWorker(RankWorker):
    """One rank of one replica. `rank` counts over all replicas; each replica is a separate process group.

    Args:
        on_gpu: whether the run uses GPUs; a rank that only reads a store has none even so.
        token: of the teacher's server; None: it has none. It comes as an argument because actors do not see secrets of
            the driver's environment.
    """

    def __init__(
        self,
        rank: int,
        config: Config,
        teacher: TeacherConfig,
        vocabulary_size: int,
        threads: int,
        on_gpu: bool = False,
        token: str | None = None,
    ):
        super().__init__(config, threads)
        self._rank, self._teacher, self._vocabulary_size = rank, teacher, vocabulary_size
        self._on_gpu, self._token = on_gpu, token
        self._gauges = Gauges(config.run.name)

    def start(self, host: str, port: int, gpu_memory: float = 1.0) -> None:
        """Joins the process group of this replica and builds the engine, which loads the model or opens the store.

        Waits for the replica's other ranks.

        Args:
            host, port: the store through which the ranks of the replica meet.
            gpu_memory: share of the GPU's memory that this process may use; 1: no limit.
        """
        from distill_rl.teacher.build import build_teacher

        ranks, is_engine = self._teacher.ranks_per_replica, bool(self._teacher.origin.engine)
        if is_engine:
            see_assigned_gpus()
        parallel = ParallelConfig(dp=1, tp=ranks) if is_engine else replace(self._teacher.parallel, dp=1)
        world = self._join(self._rank % ranks, parallel, host, port, gpu_memory, on_host=is_engine)
        self._engine = build_teacher(
            self._config,
            self._teacher,
            world,
            vocabulary_size=self._vocabulary_size,
            gpu_share=gpu_memory,
            threads=self._threads,
            token=self._token,
        )
        log.info("teacher %s is loaded: %s", self._teacher.name, self._teacher.model)

    @reporting
    def open_ring(
        self, transport: str, source: str, num_slots: int, readers: tuple[int, ...], backing: Backing
    ) -> list[Offer]:
        """Creates the ring of slots that this rank publishes to, and closes an earlier one.

        Each slot holds one micro-batch.

        Args:
            transport: its name.
            source: name of this teacher rank.
            readers: student ranks that read from it.
            backing: kind of memory behind a ring in shared memory.

        Returns:
            An Offer for each reader, in the order of `readers`, with which it opens the ring; a Problem if the ring
            cannot be made.
        """
        self.close_others([transport])
        divisor = self._config.width_divisor
        width = row_width(self._config.length_of(self._teacher), on_gpu=self._on_gpu, divisor=divisor)
        positions = self._engine.micro_batch_size * width
        ring = Ring(num_slots, positions * self._engine.bytes_per_token + _SLACK, readers)
        self._ring = self._open_transport(transport, ring, source, backing)
        return [self._ring.offer(reader) for reader in readers]

    @reporting
    def accept(self, receipts: Sequence[Receipt]) -> None:
        """Completes the hand-shake with the readers' receipts.

        Returns None, or a Problem if the transport refuses one.
        """
        for receipt in receipts:
            self._ring.accept(receipt)

    @reporting
    def publish_probe(self) -> Handle:
        """Publishes the known content of `probe_tensors` in the first slot, for all readers.

        Returns its Handle, or a Problem.
        """
        return self._ring.publish(Slot(0, FIRST_GENERATION), probe_tensors(self._world.device), PROBE_LAYOUT)

    def forward(self, rows: Sequence[RankBatch], sub_batch: int, slots: Sequence[Slot]) -> Returned:
        """Computes the targets of this replica's rows of a sub-batch, and publishes each micro-batch in a slot.

        All ranks of a replica must be called with the same arguments; only the first one publishes.

        Args:
            rows: this replica's, of all sub-batches.
            sub_batch: the index of the one to compute.
            slots: at least as many as it has micro-batches; no reader may still use them.

        Returns:
            On the first rank the handles with the sum of scores, and times and sizes; on the others both are empty.
        """
        import torch

        start, batch = time.perf_counter(), rows[sub_batch]
        replica, size = self._rank // self._teacher.ranks_per_replica, batch.rows.shape[0]
        # First row and number of rows of the whole sub-batch, of which every replica has `size` rows.
        whole = (batch.first_row - replica * size, size * self._teacher.parallel.dp)
        handles, publish_s = [], 0.0
        for i, (layout, tensors) in enumerate(self._engine.forward(batch)):
            if not self._world.reports:
                continue
            began = time.perf_counter()
            parallel = self._config.student.parallel
            readers = readers_of(layout, *whole, dp=parallel.dp, per_row=parallel.ranks_per_row)
            handles.append(self._ring.publish(slots[i], tensors, replace(layout, readers=readers)))
            publish_s += time.perf_counter() - began
        if self._world.device.type == "cuda":  # otherwise only the launch would be timed
            torch.cuda.synchronize(self._world.device)
        self._gauges.set("teacher_forward_seconds", time.perf_counter() - start)
        if not self._world.reports:
            return Published(), TeacherStats()
        measured = TeacherStats(
            sum(handle.num_bytes for handle in handles),
            sum(handle.layout.num_rows * handle.layout.tokens_per_row for handle in handles),
            time.perf_counter() - start,
            publish_s,
            peak_gib(str(self._world.device)),
            *self._used(),
        )
        self._gauges.set("teacher_publish_seconds", publish_s)
        self._gauges.add("teacher_bytes", measured.num_bytes)
        self._gauges.add("teacher_positions", measured.num_positions)
        return Published(tuple(handles), self._engine.score), measured

    def store_targets(self, rows: Sequence[RankBatch], sub_batch: int, slots: Sequence[Slot]) -> Returned:
        """Computes and stores what the store lacks of this replica's rows of a sub-batch; publishes nothing.

        Arguments as of `forward`; the slots, which only bound how many calls wait, are not used.
        """
        began, batch = time.perf_counter(), rows[sub_batch]
        self._storing().fill(batch)
        seconds = time.perf_counter() - began
        if not self._world.reports:
            return Published(), TeacherStats()
        self._gauges.set("teacher_forward_seconds", seconds)
        peak = peak_gib(str(self._world.device))
        return Published(), TeacherStats(0, batch.rows.num_positions, seconds, 0.0, peak, *self._used())

    def _used(self) -> tuple[int, int]:
        """Tokens read and computed since the last call; 0 and 0 for a teacher without a store."""
        from distill_rl.teacher.build import unrouted

        use = getattr(unrouted(self._engine), "use", None)
        if use is None:
            return 0, 0
        counts = use.read, use.computed
        use.read = use.computed = 0
        return counts

    def finish_store(self) -> int:
        """Writes what is waiting to be stored, and returns the bytes of all that this rank has written."""
        engine = self._storing()
        engine.flush()
        return 0 if engine.writer is None else engine.writer.bytes_written

    def stop(self) -> None:
        """Closes the backend, which writes what is waiting to be stored; then does as every rank does."""
        self._engine.close()
        super().stop()

    def _storing(self) -> StoredTeacher:
        """The engine of a teacher with a store."""
        from distill_rl.teacher.build import unrouted
        from distill_rl.teacher.stored import StoredTeacher

        engine = unrouted(self._engine)
        assert isinstance(engine, StoredTeacher)
        return engine
