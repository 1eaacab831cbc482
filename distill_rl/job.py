"""All that a run is made of, opened and checked before the first process starts."""

from __future__ import annotations

from dataclasses import dataclass

from distill_rl.config.derive import running_teachers
from distill_rl.config.schema import Config
from distill_rl.data.collate import BatchPlan, pad_id
from distill_rl.data.sources import Source, open_source, split_validation
from distill_rl.files import sha256
from distill_rl.models.facts import fingerprint_model
from distill_rl.models.hub import resolve, tokenizer_hash, tokenizer_of, vocabulary_size
from distill_rl.types import RunPaths


@dataclass(frozen=True, slots=True)
class Job:
    config: Config
    paths: RunPaths
    train: Source
    validation: Source | None
    plan: BatchPlan
    vocabulary_size: int
    fingerprints: dict[str, str]
    """What a resumed run must find unchanged: name → hash."""

    @property
    def data_format(self) -> str:
        """`text` or `messages`, as the data turned out to be."""
        return self.train.kind


def prepare(config: Config, paths: RunPaths) -> Job:
    """Opens the data of a configuration that preflight found good."""
    source = open_source(config.data)
    train, validation = split_validation(source, config.data, config.run.seed)
    tokenizer = tokenizer_of(config.student)
    return Job(
        config,
        paths,
        train,
        validation,
        BatchPlan.from_config(config, pad_id(tokenizer)),
        vocabulary_size=vocabulary_size(tokenizer),
        fingerprints={
            "data": train.fingerprint,
            "order of the data": f"run.seed={config.run.seed}",
            "tokenizer": tokenizer_hash(tokenizer),
            **_models(config),
        },
    )


def _models(config: Config) -> dict[str, str]:
    """Fingerprints of the student's shape and of every running teacher; hub models are fetched here, once, not by every worker."""
    student = resolve(config.student.model, config.student.revision, weights=True)
    teachers = {
        f"teacher {teacher.name}": fingerprint_model(resolve(teacher.model, teacher.revision, weights=True))
        for teacher in running_teachers(config)
    }
    return {"student": sha256(student / "config.json"), **teachers}
