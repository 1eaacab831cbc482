"""The student actor: a thin shell around StudentEngine that fetches the targets of its rows."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from distill_rl.config.schema import Config, ScheduleConfig
from distill_rl.errors import TransportError
from distill_rl.observe.metrics import Metric
from distill_rl.scaling.shape import Shape, needed_flops, nominal_flops
from distill_rl.system.memory import peak_gib
from distill_rl.transport.base import Handle, Offer, Receipt, Transport, assemble, plan
from distill_rl.types import CrossTokenizerSpec, RankBatch
from distill_rl.workers.actors.rank import RankWorker, probe_tensors, reporting, this_node
from distill_rl.workers.actors.teacher import Published
from distill_rl.workers.cluster.relay import Failed, Together, each
from distill_rl.workers.cluster.telemetry import Gauges

if TYPE_CHECKING:
    from torch import Tensor

    from distill_rl.student.compared import Target


log = logging.getLogger(__name__)

Result = Published | Failed | Together
"""What a teacher's replica has published, or why it has not; or what several have."""


@dataclass(frozen=True, slots=True)
class Retryable:
    """Returned instead of metrics: the call changed nothing on any rank and may be repeated."""

    reason: str


class StudentWorker(RankWorker):
    """One rank of the student: a StudentEngine, and the transports by which it reads the teachers' targets."""

    def __init__(
        self,
        rank: int,
        config: Config,
        total_steps: int,
        cross_tokenizer_specs: Sequence[CrossTokenizerSpec | None],
        vocabulary_size: int,
        threads: int,
        shape: Shape | None = None,
    ):
        """Stores what `start` needs; joins no process group and loads no model.

        Args:
            rank: dp-major: (dp_rank · sp + sp_rank) · tp + tp_rank.
            total_steps: optimizer steps of the whole run, the horizon of the schedule; see `Schedule`.
            cross_tokenizer_specs: per running teacher; None for one with the student's tokenizer.
            vocabulary_size: ids of the student's tokenizer.
            threads: number of torch threads of this process.
            shape: sizes of the student, for the FLOPs that its steps need; None: not known.
        """
        super().__init__(config, threads)
        self._shape, self._flops = shape, 0.0
        self._nominal_flops: float | None = None
        """Of this rank's card; None: not known, or another rank speaks for these rows."""
        self._rank, self._vocabulary_size, self._total_steps = rank, vocabulary_size, total_steps
        self._cross_tokenizer_specs = cross_tokenizer_specs
        self._gauges = Gauges(config.run.name)
        self._next_sub_batch = 0
        self._step_s = self._fetch_s = 0.0
        self._far_bytes = 0

    def start(self, host: str, port: int, gpu_memory: float = 1.0) -> None:
        """Joins the student's process group and builds the engine, which loads the model. Waits for the other ranks.

        Args:
            host, port: the store through which the ranks meet.
            gpu_memory: share of the GPU's memory that this process may use; 1: no limit.
        """
        from distill_rl.student.engine import StudentEngine

        world = self._join(self._rank, self._config.student.parallel, host, port, gpu_memory)
        self._engine = StudentEngine(
            self._config,
            world,
            vocabulary_size=self._vocabulary_size,
            total_steps=self._total_steps,
            cross_tokenizer_specs=self._cross_tokenizer_specs,
        )
        if self._shape is not None and world.reports and world.device.type == "cuda":
            from torch.cuda import get_device_name

            self._nominal_flops = nominal_flops(get_device_name(world.device))
        log.info("student %s is loaded", self._config.student.model)

    @reporting
    def open_ring(self, offer: Offer) -> Receipt:
        """Opens a teacher's ring for reading, and its transport if needed. Returns the receipt to send back, or a Problem."""
        transport = self._transports.get(offer.transport) or self._open_transport(offer.transport)
        return transport.open(offer)

    @reporting
    def read_probe(self, handle: Handle) -> None:
        """Reads a known tensor through the transport. Returns None if it arrives as it was sent, else a Problem."""
        with self._transports[handle.transport].fetch(handle) as tensors:
            if not bool((tensors["probe"].cpu() == probe_tensors()["probe"]).all()):
                raise TransportError(f"transport {handle.transport}", "the probe must arrive as it was sent")

    def train(
        self, rows: Sequence[RankBatch], sub_batch: int, last: bool, teacher_sizes: Sequence[int], *results: Result
    ) -> dict[str, Metric] | Retryable:
        """Accumulates the gradient of one sub-batch, and takes the optimizer step after the last one.

        All targets of the sub-batch are opened before anything is computed, and the ranks agree on whether to go on. So
        a teacher that dies later does no harm, and one that died earlier leaves all ranks unchanged.

        Args:
            rows: this rank's, of all sub-batches.
            sub_batch: index of the one to train on. It is not run unless it follows the last one that was run: calls on the next
                batch may be waiting when a call fails.
            last: whether it is the last sub-batch of the batch.
            teacher_sizes: how many of `results` belong to each teacher; 0 for a teacher that was lost.
            results: what all teachers published, one entry per replica, teacher by teacher, or these together.

        Returns:
            The sub-batch's metrics, after the last one with those of the optimizer step, of timing and of transport; or
            a Retryable if nothing was done, because the sub-batch is not the one that is due or a rank cannot read its
            targets.
        """
        batch = rows[sub_batch]
        due_batch, due = self._engine.step, self._next_sub_batch
        if (batch.index, sub_batch) != (due_batch, due):
            return Retryable(f"sub-batch {sub_batch} of batch {batch.index} came when {due} of {due_batch} was due")
        start = time.perf_counter()
        with ExitStack() as opened:
            targets = self._open_targets(batch, teacher_sizes, results, opened)
            if isinstance(targets, Retryable):
                return targets
            metrics = self._engine.forward_backward(batch, targets, self._scores(batch, targets.published), last=last)
        if last:
            metrics |= self._engine.optim_step()
        self._next_sub_batch = 0 if last else sub_batch + 1
        if self._shape is not None and self._nominal_flops is not None:
            self._flops += needed_flops(self._shape, batch.rows, frozen=self._config.student.has_adapters)
        self._step_s += time.perf_counter() - start
        self._fetch_s += targets.seconds
        self._far_bytes += targets.far_bytes
        return metrics | self._take_measurements() if last else metrics

    def _open_targets(
        self, batch: RankBatch, sizes: Sequence[int], results: Sequence[Result], opened: ExitStack
    ) -> _FetchedTargets | Retryable:
        """Opens the targets of this rank's rows until `opened` ends, and asks all ranks whether they could."""
        # Collective, unless a teacher has failed, or none has published anything.
        found = each(results)
        if any(isinstance(result, Failed) for result in found):  # all ranks are given the same results
            return Retryable("a teacher has failed")
        remaining = iter(found)
        published = [list(islice(remaining, size)) for size in sizes]
        targets = _FetchedTargets(self._transports, this_node(), self._config.loss.temperature, published)
        if not any(published):
            return targets
        problem = ""
        try:
            targets.open(batch.first_row, batch.rows.shape[0], opened)
        except TransportError as error:
            problem = str(error)
        all_agree = self._engine.world.all_agree(not problem)
        return targets if all_agree else Retryable(problem or "another rank has lost its targets")

    def _take_measurements(self) -> dict[str, Metric]:
        """Returns what was measured since the last call (step time, fetch time, bytes between nodes) and resets it."""
        # The peak of the memory, in GiB, is that of the whole life of this process. Also sends them to this process's
        # gauges, and counts a step there. Times are in seconds.
        self._gauges.set("student_step_seconds", self._step_s)
        self._gauges.set("student_fetch_seconds", self._fetch_s)
        self._gauges.add("student_bytes_between_nodes", self._far_bytes)
        self._gauges.add("student_steps", 1)
        measured = {
            "timing/student/step": Metric(self._step_s, "per_step"),
            "timing/student/fetch": Metric(self._fetch_s, "per_step"),
            "transport/bytes_between_nodes": Metric(self._far_bytes, "sum"),
            "memory/student": Metric(peak_gib(str(self._engine.world.device)), "max"),
        }
        if self._nominal_flops is not None:
            rate = self._engine.world.world_size * self._nominal_flops
            measured["train/ideal_seconds"] = Metric(self._flops / rate, "sum")
        self._step_s, self._fetch_s, self._far_bytes, self._flops = 0.0, 0.0, 0, 0.0
        return measured

    def evaluate(
        self, rows: Sequence[RankBatch], sub_batch: int, last: bool, teacher_sizes: Sequence[int], *results: Result
    ) -> dict[str, Metric] | Retryable:
        """Returns the validation losses (KD and CE) of a sub-batch, computed without a gradient.

        A Retryable if a rank cannot read its targets.

        The arguments are those of `train`; `last` is ignored.
        """
        batch = rows[sub_batch]
        with ExitStack() as opened:
            targets = self._open_targets(batch, teacher_sizes, results, opened)
            if isinstance(targets, Retryable):
                return targets
            return self._engine.evaluate(batch, targets, self._scores(batch, targets.published))

    def _scores(self, batch: RankBatch, published: Sequence[Sequence[Published]]) -> list[float]:
        """Returns a score per running teacher; a higher score lowers that teacher's weight."""
        # An empty list leaves all weights as configured: weights are static, and no teacher was lost.
        # The score is the teacher's CE or entropy per student token that it has targets for, 0 if weights are static,
        # and infinity for a teacher that was lost. All ranks get the same scores, because each has what all replicas
        # published.
        if all(teacher.score == "static" for teacher in self._config.teachers):
            return [0.0 if replicas else math.inf for replicas in published] if not all(published) else []
        scores = []
        for part, replicas in zip(batch.teachers, published, strict=True):
            count = batch.num_labels if part.chunks is None else part.chunks.num_covered
            scores.append(sum(each.score for each in replicas) / max(count, 1) if replicas else math.inf)
        return scores

    def end_at(self, total_steps: int, schedule: ScheduleConfig) -> None:
        """Sets the last step of the run, which the constructor did not know yet, and the schedule, for later steps."""
        from distill_rl.student.optim import Schedule

        self._engine.schedule = Schedule(schedule, peak=self._config.optimizer.lr, total_steps=total_steps)

    def save(self, directory: str, marker: str | None) -> None:
        """Saves weights, optimizer and random state to `directory`; collective.

        Args:
            marker: None: all is on disk on return. A path: a copy is made before the return and written in the
                background; this file appears when that is done.

        Raises:
            CheckpointError: on all ranks, if any of them cannot write, now or in the previous save.
        """
        self._engine.save(directory, marker)

    def finish_saving(self) -> None:
        """Waits until what `save` started is on disk; collective.

        Raises:
            CheckpointError: on all ranks, if any of them could not write.
        """
        self._engine.finish_saving()

    def checkpoint_bytes(self) -> int:
        """Returns the bytes that `save` writes on all ranks together, except a few kilobytes."""
        return self._engine.checkpoint_bytes()

    def stop(self) -> None:
        """Waits for a save in the background, then closes the transports and leaves the process group.

        It waits for the group's other ranks to do so too.
        """
        self._engine.finish_saving()
        super().stop()

    def load(self, directory: str) -> None:
        """Continues from what `save` wrote to `directory`, as `StudentEngine.load`.

        Raises:
            CheckpointError: missing, damaged, or of another model.
        """
        self._engine.load(directory)

    def export(self, directory: str, card: str) -> None:
        """Writes the student as a Hugging Face folder, with its tokenizer and `card` as model card; collective.

        Learned vocabulary projections, if there are any, go to the folder `projections` beside `directory`.
        """
        from distill_rl.models.files import tokenizer_of

        self._engine.export(directory, tokenizer_of(self._config.student), card)
        self._engine.export_projections(Path(directory).with_name("projections"))

    def copy(self, directory: str) -> str | None:
        """Writes the weights and tokenizer to a folder for the evaluator; collective.

        Returns:
            None on success, else the problem (such as a full disk), which is not raised because training can continue
            without the evaluation.
        """
        from distill_rl.models.export import ExportError
        from distill_rl.models.files import tokenizer_of

        try:
            self._engine.export(directory, tokenizer_of(self._config.student))
        except ExportError as error:
            return str(error)
        return None


@dataclass
class _FetchedTargets:
    """The targets of one sub-batch, read through the transports; a TargetSource for the engine.

    `open` fetches every slot that holds some of this rank's rows; nothing is read before it. After that
    `targets(first_row, num_rows)` gives the targets of a micro-batch from those slots.

    Attributes:
        published: by every replica of each teacher; nothing by one that was lost.
        far_bytes: of the slots that were written on another node.
    """

    _transports: Mapping[str, Transport]
    """By name; they include those of all handles whose rows are opened."""
    _node_id: str
    """Of this rank, to count the bytes that come from other nodes."""
    _temperature: float
    """At which the targets were computed."""
    published: Sequence[Sequence[Published]]
    seconds: float = 0.0
    far_bytes: int = 0
    _open: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Tensors of the open slots, by the id of their handle."""

    def __post_init__(self) -> None:
        self._handles = [[handle for each in replicas for handle in each.handles] for replicas in self.published]

    def open(self, first_row: int, num_rows: int, stack: ExitStack) -> None:
        """Opens every slot that holds one of these rows of the global batch; they stay readable until `stack` ends.

        Adds to `seconds` and `far_bytes`.

        Raises:
            TransportError: a slot can no longer be read.
        """
        start = time.perf_counter()
        for handles in self._handles:
            if not handles:  # a teacher that was lost
                continue
            pieces = plan([handle.layout for handle in handles], first_row, num_rows)
            for source in sorted({piece.source for piece in pieces}):
                handle = handles[source]
                self._open[id(handle)] = stack.enter_context(self._transports[handle.transport].fetch(handle))
                self.far_bytes += handle.num_bytes if handle.node_id != self._node_id else 0
        self.seconds += time.perf_counter() - start

    @contextmanager
    def __call__(self, first_row: int, num_rows: int) -> Iterator[list[Target | None]]:
        """Yields the targets of rows of the global batch, one entry per teacher, None for a teacher that was lost.

        The rows must have been opened by `open`, whose stack must not have ended. Tensors are flattened to [num_rows·S,
        …] and read-only.
        """
        from distill_rl.losses.targets import target_of

        def of_teacher(handles: Sequence[Handle]) -> Target:
            rows = assemble(lambda handle: self._open[id(handle)], handles, first_row, num_rows)
            return target_of(rows, self._temperature)

        start = time.perf_counter()
        targets = [of_teacher(handles) if handles else None for handles in self._handles]
        self.seconds += time.perf_counter() - start
        yield targets
