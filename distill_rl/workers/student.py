"""The student actor: a thin shell around StudentEngine that fetches the targets of its rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from distill_rl.config.schema import Config
from distill_rl.observe.metrics import Metric
from distill_rl.transport.assemble import fetch_rows
from distill_rl.transport.base import Handle, Transport
from distill_rl.types import Crossing, RankBatch
from distill_rl.workers.rank import RankWorker
from distill_rl.workers.teacher import Published

if TYPE_CHECKING:
    from distill_rl.student.objective import Target


class StudentWorker(RankWorker):
    def __init__(
        self,
        rank: int,
        config: Config,
        total_steps: int,
        crossings: Sequence[Crossing | None],
        vocabulary_size: int,
        transport: str,
        threads: int,
    ):
        super().__init__(config, transport, threads)
        self._rank, self._vocabulary_size, self._total_steps = rank, vocabulary_size, total_steps
        self._crossings = crossings

    def start(self, host: str, port: int) -> None:
        """Loads the model."""
        from distill_rl.student.engine import StudentEngine

        world = self._join(self._rank, self._config.student.parallel, host, port)
        self._engine = StudentEngine(
            self._config,
            world,
            vocabulary_size=self._vocabulary_size,
            total_steps=self._total_steps,
            crossings=self._crossings,
        )

    def train_step(self, batch: RankBatch, teacher_sizes: Sequence[int], *published: Published) -> dict[str, Metric]:
        """One optimizer step; `published` holds every teacher's results, `teacher_sizes` how many belong to each."""
        start = time.perf_counter()
        targets = _Targets(self._transport, self._config.loss.temperature, teacher_sizes, published)
        metrics = self._engine.train_step(batch, targets, self._scores(batch, teacher_sizes, published))
        if not metrics:
            return {}
        return metrics | {
            "timing/student/step": Metric(time.perf_counter() - start, "max"),
            "timing/student/fetch": Metric(targets.seconds, "max"),
        }

    def evaluate(self, batch: RankBatch, teacher_sizes: Sequence[int], *published: Published) -> dict[str, Metric]:
        """KD and CE of a batch, without a gradient."""
        return self._engine.evaluate(
            batch,
            _Targets(self._transport, self._config.loss.temperature, teacher_sizes, published),
            self._scores(batch, teacher_sizes, published),
        )

    def _scores(self, batch: RankBatch, teacher_sizes: Sequence[int], published: Sequence[Published]) -> list[float]:
        """Per teacher its CE or entropy per student token that it speaks of; empty where shares are fixed.

        Every rank has what all replicas published, so no two ranks can differ.
        """
        if all(teacher.score == "static" for teacher in self._config.teachers):
            return []
        remaining = iter(published)
        sums = [sum(next(remaining).score for _ in range(size)) for size in teacher_sizes]
        shared = batch.chunks or (None,) * len(sums)
        tokens = [batch.num_labels if chunks is None else chunks.num_covered for chunks in shared]
        return [total / max(count, 1) for total, count in zip(sums, tokens)]

    def save(self, directory: str) -> None:
        self._engine.save(directory, {})

    def load(self, directory: str) -> None:
        self._engine.load(directory)

    def export(self, directory: str, card: str) -> None:
        from distill_rl.models.hub import tokenizer_of

        self._engine.export(directory, tokenizer_of(self._config.student), card)


class _Targets:
    """TargetSource over a transport: `targets(first_row, num_rows)` opens the slots that hold these rows."""

    def __init__(
        self, transport: Transport, temperature: float, teacher_sizes: Sequence[int], published: Sequence[Published]
    ):
        self._transport, self._temperature = transport, temperature
        self.seconds = 0.0
        remaining = iter(published)
        self._handles: list[list[Handle]] = [
            [handle for _ in range(size) for handle in next(remaining).handles] for size in teacher_sizes
        ]

    @contextmanager
    def __call__(self, first_row: int, num_rows: int) -> Iterator[list[Target]]:
        from distill_rl.losses.targets import target_of

        start = time.perf_counter()
        with ExitStack() as stack:
            parts = [
                stack.enter_context(fetch_rows(self._transport, handles, first_row, num_rows))
                for handles in self._handles
            ]
            targets = [target_of(tensors, self._temperature) for tensors in parts]
            self.seconds += time.perf_counter() - start
            yield targets
