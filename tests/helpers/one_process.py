"""A run in this process, on one rank: its loader, aligner, teachers and student, without Ray and without look-ahead.

A run's results do not depend on either, so on one thread it trains as `distill-rl train` does with the same settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from distill_rl.config.schema import Config
from distill_rl.data.batch.document_aligner import AlignedDocument
from distill_rl.losses.targets import target_of
from distill_rl.models.files import tokenizer_of
from distill_rl.observe.metrics import Metric, merge, values
from distill_rl.parallel.mesh import World, close_world, open_world
from distill_rl.run.checkpoints import read, require_same
from distill_rl.run.job import prepare
from distill_rl.run.opened import open_rows
from distill_rl.run.run_directory import paths_of
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.base import TeacherBackend
from distill_rl.teacher.build import build_teacher
from distill_rl.types import BatchInfo, DocumentBatch, RankBatch, Row, row_of
from distill_rl.workers.pipeline.batches import open_builder


@dataclass(frozen=True)
class Batch:
    """One global batch, as the engines read it."""

    documents: DocumentBatch
    info: BatchInfo
    student: list[RankBatch]
    """The student's rows, one entry per sub-batch."""
    teachers: list[list[RankBatch]]
    """The same of each teacher."""


class OneProcess:
    """A run that begins afresh, or goes on from a checkpoint that is verified as `train --resume` does.

    Args:
        config: checked settings.
        world: of one rank.
        checkpoint: a step folder; None: the run begins at step 0.

    Raises:
        CheckpointError: the checkpoint is damaged, or of other data, tokenizers or models.
    """

    def __init__(self, config: Config, world: World, checkpoint: Path | None = None):
        job = prepare(open_rows(config), paths_of(config))
        self.saved = None if checkpoint is None else read(checkpoint).state
        if self.saved is not None:
            job = job.going_on(self.saved.fingerprints)
            require_same(self.saved.fingerprints, job.fingerprints)
        other_tokenizer = [spec is not None for spec in job.cross_tokenizer_specs]
        self.config = config
        self._builder = open_builder(config, job.opened.train.kind, job.plan, other_tokenizer)
        self._loader = job.loader(None if self.saved is None else self.saved.train)
        self.teachers = [
            build_teacher(config, teacher, world, vocabulary_size=known.vocabulary_size or 0)
            for teacher, known in job.facts.by_teacher(config)
        ]
        self.student = StudentEngine(
            config,
            world,
            vocabulary_size=job.facts.vocabulary_size or 0,
            total_steps=self._loader.total_steps,
            cross_tokenizer_specs=job.cross_tokenizer_specs,
        )
        if checkpoint is not None:
            self.student.load(checkpoint / "student")

    def batches(self) -> Iterator[Batch]:
        """The batches from where the run begins."""
        aligned: dict[Row, list[AlignedDocument]] = {}  # a document comes again in every epoch
        for documents in self._loader:
            for document in documents.documents:
                if (row := row_of(document)) not in aligned:
                    aligned[row] = self._builder.align([document])
            parts = [aligned[row_of(document)] for document in documents.documents]
            info, (student,), of_teachers = self._builder.assemble(documents.index, documents.cursor, parts)
            yield Batch(documents, info, student, [of_rank for (of_rank,) in of_teachers])

    def step(self, batch: Batch) -> dict[str, Metric]:
        """Takes one optimizer step and returns the metrics of `StudentEngine.train_step`, merged over sub-batches."""
        parts = []
        for i, rows in enumerate(batch.student):
            targets = _Targets(self.config.loss.temperature, self.teachers, [theirs[i] for theirs in batch.teachers])
            parts.append(self.student.forward_backward(rows, targets, last=i == len(batch.student) - 1))
        return merge([*parts, self.student.optim_step()])


class _Targets:
    """The targets of one sub-batch; a `TargetSource`. All of them are computed before the student begins.

    Args:
        temperature: `loss.temperature`.
        rows: per teacher, the rows of the sub-batch as it reads them.
    """

    def __init__(self, temperature: float, teachers: Sequence[TeacherBackend], rows: Sequence[RankBatch]):
        self._temperature = temperature
        self._by_row: list[dict[int, dict[str, Any]]] = [
            {layout.first_row: tensors for layout, tensors in teacher.forward(part)}
            for teacher, part in zip(teachers, rows, strict=True)
        ]

    @contextmanager
    def __call__(self, first_row: int, num_rows: int) -> Iterator[list[Any]]:
        yield [target_of(tensors[first_row], self._temperature) for tensors in self._by_row]


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch use one thread inside the block, as in a worker of `distill-rl train`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Trained:
    """What a run in this process computed."""

    first_step: int
    metrics: list[dict[str, float]]
    """One entry per step."""
    batches: list[BatchInfo]
    weights: dict[str, Tensor]
    """Those of the export."""

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of one metric, as `command.series` reads it from a run directory."""
        return [(step, each[metric]) for step, each in enumerate(self.metrics, self.first_step) if metric in each]


def train(config: Config, export: Path, checkpoint: Path | None = None) -> Trained:
    """Trains in this process and writes the student to the folder `export`; arguments as of `OneProcess`."""
    with one_thread():
        world = open_world(rank=0, dp=1, tp=1)
        try:
            run = OneProcess(config, world, checkpoint)
            first_step, metrics, infos = run.student.step + 1, [], []
            for batch in run.batches():
                metrics.append(values(run.step(batch)))
                infos.append(batch.info)
            run.student.export(export, tokenizer_of(config.student))
        finally:
            close_world(world)
    return Trained(first_step, metrics, infos, load_file(export / "model.safetensors"))
