"""All that a run is made of, opened and checked before the first process starts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill_rl.config.derive import cross_tokenizer_loss
from distill_rl.config.facts import ModelFacts, running_teachers
from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.data.collate import BatchPlan, pad_id
from distill_rl.data.sources import Source, open_source, split_validation
from distill_rl.errors import ConfigError
from distill_rl.models.facts import fingerprint_model, read_model_facts
from distill_rl.models.hub import read_config, resolve, stops_of, tokenizer_hash, tokenizer_of, vocabulary_size
from distill_rl.system.files import sha256
from distill_rl.types import CrossTokenizerSpec, RunPaths


@dataclass(frozen=True, slots=True)
class Job:
    config: Config
    paths: RunPaths
    train: Source
    validation: Source | None
    plan: BatchPlan
    vocabulary_size: int
    """ids of the student's tokenizer"""
    cross_tokenizer_specs: tuple[CrossTokenizerSpec | None, ...]
    """per running teacher, None for one that has the student's tokenizer"""
    teacher_vocabularies: tuple[int, ...]
    """ids of each running teacher's tokenizer"""
    teacher_facts: tuple[ModelFacts, ...]
    """of each running teacher"""
    student_facts: ModelFacts
    fingerprints: dict[str, str]
    """What a resumed run must find unchanged: name → hash."""

    @property
    def data_format(self) -> str:
        """`text` or `messages`, as the data turned out to be."""
        return self.train.kind


def prepare(config: Config, paths: RunPaths) -> Job:
    """Opens the data of a configuration that preflight found good; builds the projections that are not there yet."""
    source = open_source(config.data)
    train, validation = split_validation(source, config.data, config.run.seed)
    tokenizer = tokenizer_of(config.student)
    running = running_teachers(config)
    tokenizers = [tokenizer_of(teacher) for teacher in running]
    models = _models(config)
    cross_tokenizer_specs = tuple(
        _cross_tokenizer_spec(config, teacher, tokenizer, its) for teacher, its in zip(running, tokenizers)
    )
    others = [(each, its) for each, its, found in zip(running, tokenizers, cross_tokenizer_specs) if found is not None]
    return Job(
        config,
        paths,
        train,
        validation,
        BatchPlan.from_config(config, pad_id(tokenizer), padded=any(cross_tokenizer_specs)),
        vocabulary_size=vocabulary_size(tokenizer),
        cross_tokenizer_specs=cross_tokenizer_specs,
        teacher_vocabularies=tuple(vocabulary_size(its) for its in tokenizers),
        teacher_facts=tuple(_facts(teacher) for teacher in running),
        student_facts=_facts(config.student),
        fingerprints={
            "data": train.fingerprint,
            "order of the data": f"run.seed={config.run.seed}",
            "tokenizer": tokenizer_hash(tokenizer),
            **_chat_templates(train, {"": tokenizer} | {f" of teacher {each.name}": its for each, its in others}),
            **models,
            **{
                f"tokenizer pair with teacher {teacher.name}": (
                    f"tokenizer {tokenizer_hash(its)}, loss {found.method}, projection {sha256(found.projection)}"
                    f"{', learnt' if config.projection.learnable else ''}"
                )
                for teacher, its, found in zip(running, tokenizers, cross_tokenizer_specs)
                if found is not None
            },
        },
    )


def _facts(model: StudentConfig | TeacherConfig) -> ModelFacts:
    return read_model_facts(
        resolve(model.model, model.revision, weights=True), read_config(model.model, model.revision)
    )


def _cross_tokenizer_spec(config: Config, teacher: TeacherConfig, ours: Any, theirs: Any) -> CrossTokenizerSpec | None:
    method = cross_tokenizer_loss(config, teacher, same=tokenizer_hash(ours) == tokenizer_hash(theirs))
    if method is None:
        return None
    if config.projection.path is not None:
        return CrossTokenizerSpec(method, os.fspath(Path(config.projection.path).expanduser().absolute()))
    from distill_rl.align.projection import cached_projection

    folder = Path(config.run.dir).expanduser().absolute() / ".projections"
    student_columns = read_config(config.student.model, config.student.revision).vocab_size
    teacher_columns = read_config(teacher.model, teacher.revision).vocab_size
    try:
        path = cached_projection(
            folder, ours, theirs, student_columns=student_columns, teacher_columns=teacher_columns,
            student_stops=stops_of(config.student), teacher_stops=stops_of(teacher),
        )  # fmt: skip
        return CrossTokenizerSpec(method, os.fspath(path))
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"teacher {teacher.name}", "must have a projection from the student's vocabulary", str(error)
        ) from error


def _chat_templates(source: Source, tokenizers: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprints of the templates that make text of chats; of none where the data are plain text."""
    if source.kind != "messages":
        return {}
    texts = {whose: json.dumps(tokenizer.chat_template, sort_keys=True) for whose, tokenizer in tokenizers.items()}
    return {f"chat template{whose}": hashlib.sha256(text.encode()).hexdigest() for whose, text in texts.items()}


def _models(config: Config) -> dict[str, str]:
    """Fingerprints of the student's shape and of every running teacher; hub models are fetched here, once, not by every worker."""
    student = resolve(config.student.model, config.student.revision, weights=True)
    teachers = {
        f"teacher {teacher.name}": fingerprint_model(resolve(teacher.model, teacher.revision, weights=True))
        for teacher in running_teachers(config)
    }
    return {"student": sha256(student / "config.json"), **teachers}
