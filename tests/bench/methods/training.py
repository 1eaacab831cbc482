"""One training in this process: the loader, aligner, engines and losses of a run, without Ray and without look-ahead.

A run's results do not depend on either, so `distill-rl train` with the same settings, on one thread, trains the same student.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill_rl.config.rules.validate import problems
from distill_rl.config.schema import Config
from distill_rl.data.batch.document_aligner import AlignedDocuments
from distill_rl.errors import ConfigError
from distill_rl.losses.targets import target_of
from distill_rl.models.files.hub import tokenizer_of
from distill_rl.observe.metrics import Metrics, merge
from distill_rl.parallel.mesh import World, close_world, open_world
from distill_rl.preflight.batches import open_builder
from distill_rl.preflight.job import Job, prepare
from distill_rl.preflight.run_directory import paths_of
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.backends.base import TeacherBackend
from distill_rl.teacher.build import build_teacher
from distill_rl.types import RankBatch, Row, row_of
from tests.bench.record import peak_bytes

MASS = "train/teacher_mass"


@dataclass(frozen=True, slots=True)
class Trained:
    """What is known of a training besides its student."""

    steps: int
    skipped_steps: int
    """Steps without an update, because loss or gradient were not finite, or were a spike."""
    labels: int
    """Tokens that were trained on, repetitions included."""
    seconds: float
    """Of all steps, with alignment and teachers."""
    one_to_one: float | None
    """Share of the chunks that are one token on either side; None with one tokenizer."""
    peak_mib: float
    """Of the resident memory of the process that trained, since its start."""
    teacher_mass: float | None = None
    """Mean probability of the columns that the first teacher sent; None without a teacher of the student's tokenizer."""


def train(config: Config, export: Path) -> Trained:
    """Trains on one rank as `distill-rl train` does, and writes the student to the folder `export`.

    Raises:
        ConfigError: the settings break a rule, all of them at once.
    """
    if broken := problems(config):
        raise ConfigError.many(broken)
    world = open_world(rank=0, dp=1, tp=1)
    try:
        return _train(prepare(config, paths_of(config)), world, export)
    finally:
        close_world(world)


def _train(job: Job, world: World, export: Path) -> Trained:
    config = job.config
    builder = open_builder(config, job.data_format, job.plan, [spec is not None for spec in job.cross_tokenizer_specs])
    loader = job.loader()
    teachers = [
        build_teacher(config, teacher, world, vocabulary_size=known.vocabulary_size or 0)
        for teacher, known in job.facts.by_teacher(config)
    ]
    student = StudentEngine(
        config,
        world,
        vocabulary_size=job.facts.vocabulary_size or 0,
        total_steps=loader.total_steps,
        cross_tokenizer_specs=job.cross_tokenizer_specs,
    )
    aligned: dict[Row, AlignedDocuments] = {}  # a document comes again in every epoch
    skipped, labels, chunks, one_to_one = 0, 0, 0, 0
    masses: list[Metrics] = []
    began = time.perf_counter()
    for batch in loader:
        for document in batch.documents:
            if (row := row_of(document)) not in aligned:
                aligned[row] = builder.align([document])
        parts = [aligned[row_of(document)] for document in batch.documents]
        info, (sub_batches,), of_teachers = builder.assemble(batch.index, batch.cursor, parts)
        theirs = [of_rank for (of_rank,) in of_teachers]
        for i, rows in enumerate(sub_batches):
            targets = _Targets(config.loss.temperature, teachers, [of_rank[i] for of_rank in theirs])
            metrics = student.forward_backward(rows, targets, last=i == len(sub_batches) - 1)
            masses.append({name: metric for name, metric in metrics.items() if name == MASS})
        skipped += int(student.optim_step()["train/skipped"].value)
        labels += info.num_labels
        chunks += sum(alignment.num_chunks for alignment in info.alignments)
        one_to_one += sum(alignment.num_one_to_one for alignment in info.alignments)
    seconds = time.perf_counter() - began
    student.export(export, tokenizer_of(config.student))
    share = one_to_one / chunks if chunks else None
    mass = merge(masses).get(MASS)
    return Trained(
        student.step, skipped, labels, seconds, share, peak_bytes() / 2**20, None if mass is None else mass.value
    )


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
