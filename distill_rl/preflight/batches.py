"""What makes rows from documents in a run: the tokenizers of the student and of the teachers, opened together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distill_rl.config.facts import running_teachers, targets_store
from distill_rl.config.schema import Config
from distill_rl.data.batch.collate import BatchPlan
from distill_rl.data.batch.cross_tokenizer_batch import BatchBuilder
from distill_rl.data.batch.document_aligner import CrossTokenizerTeacher
from distill_rl.data.batch.pieces import StoredTargets
from distill_rl.data.batch.tokenization import Tokenization
from distill_rl.models.files.hub import stops_of, tokenizer_of
from distill_rl.store.store import Store


def open_builder(config: Config, data_format: str, plan: BatchPlan, other_tokenizer: Sequence[bool]) -> BatchBuilder:
    """Loads the tokenizers of a run and prepares its aligners.

    Args:
        data_format: `text` or `messages`.
        plan: how rows are laid out and divided.
        other_tokenizer: per running teacher, whether its tokenizer differs from the student's.

    Raises:
        StoreError: a store that decides what is trained on cannot be opened.
    """
    tokenizer = tokenizer_of(config.student)
    tokenization = Tokenization.of(tokenizer, config.data, format=data_format, stops=stops_of(config.student))
    teachers: list[CrossTokenizerTeacher | None] = []
    for settings, other in zip(running_teachers(config), other_tokenizer, strict=True):
        if not other:
            teachers.append(None)
            continue
        teacher = CrossTokenizerTeacher.of(
            settings.name,
            tokenizer,
            tokenizer_of(settings),
            config.aligner,
            student_stops=stops_of(config.student),
            stops=stops_of(settings),
        )
        teacher.aligner.warm_up()
        teachers.append(teacher)
    return BatchBuilder(tokenization, plan, teachers, stored=_stored_targets(config))


def _stored_targets(config: Config) -> StoredTargets:
    """The teachers whose targets are read or stored, and the stores that decide what is trained on.

    Raises:
        StoreError: such a store cannot be opened.
    """
    teachers = [*enumerate(running_teachers(config))]
    required = {
        i: Store(Path(teacher.store)).has
        for i, teacher in teachers
        if teacher.backend == "store" and teacher.store and teacher.missing == "skip"
    }
    return StoredTargets(frozenset(i for i, teacher in teachers if targets_store(teacher) is not None), required)
