"""What makes rows from documents in a run: the tokenizers of the student and of the teachers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.data.batch.collate import BatchPlan
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher, StoredTargets
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.models.files import tokenizer_of
from distill_rl.models.stops import stops_of
from distill_rl.store.store import Store

Reader = tuple[Any, Sequence[int]]
"""A model's tokenizer, and the ids by which the model ends an answer."""


def open_builder(config: Config, data_format: str, plan: BatchPlan, other_tokenizer: Sequence[bool]) -> BatchBuilder:
    """Loads the tokenizers of a run and prepares its aligners.

    Args:
        data_format: `text` or `messages`.
        plan: how rows are laid out and divided.
        other_tokenizer: per running teacher, whether its tokenizer differs from the student's.

    Raises:
        StoreError: a store that decides what is trained on cannot be opened.
    """

    def read(model: StudentConfig | TeacherConfig) -> Reader:
        return tokenizer_of(model), stops_of(model)

    teachers = zip(config.running_teachers, other_tokenizer, strict=True)
    readers = [read(settings) if other else None for settings, other in teachers]
    return make_builder(config, data_format, plan, read(config.student), readers)


def make_builder(
    config: Config, data_format: str, plan: BatchPlan, student: Reader, teachers: Sequence[Reader | None]
) -> BatchBuilder:
    """As `open_builder`, of tokenizers that are open; None for a teacher that reads the student's tokens."""
    tokenizer, stops = student
    tokenization = Tokenization(tokenizer, config.data, format=data_format, stops=stops)
    others: list[CrossTokenizerTeacher | None] = []
    for settings, reader in zip(config.running_teachers, teachers, strict=True):
        teacher = None
        if reader is not None:
            of_teacher, its_stops = reader
            teacher = CrossTokenizerTeacher.of(
                settings.name, tokenizer, of_teacher, config.aligner, student_stops=stops, stops=its_stops
            )
            teacher.aligner.warm_up()
        others.append(teacher)
    return BatchBuilder(tokenization, plan, others, stored=_stored_targets(config))


def _stored_targets(config: Config) -> StoredTargets:
    """The teachers whose targets are read or stored, and the stores that decide what is trained on."""
    teachers = [*enumerate(config.running_teachers)]
    required = {
        i: Store(Path(teacher.origin.folder)).has
        for i, teacher in teachers
        if teacher.origin.skips_missing and teacher.origin.folder
    }
    return StoredTargets(frozenset(i for i, teacher in teachers if teacher.targets_store is not None), required)
