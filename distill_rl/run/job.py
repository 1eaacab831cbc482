"""The job: everything that a run is made of, before the first process starts; and the stores that it fills."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill_rl.align.projection import cached_projection
from distill_rl.config.facts import Facts
from distill_rl.config.paths import described_by
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.data.batch.collate import BatchPlan
from distill_rl.data.loader import Loader
from distill_rl.data.order import Order
from distill_rl.errors import ConfigError
from distill_rl.models.files import fingerprint_model, resolve
from distill_rl.run.checkpoints import FROZEN
from distill_rl.run.opened import OpenedRun, OpenedTeacher, held_out_batches, with_adapters
from distill_rl.store.store import SERVED, Manifest, make_store
from distill_rl.system.files import sha256
from distill_rl.types import CrossTokenizerSpec, DocumentBatch, RunPaths, TrainState

_ORDER = "order of the data"
"""Name of the fingerprint of the order."""


@dataclass(frozen=True, slots=True)
class Job:
    config: Config
    paths: RunPaths
    opened: OpenedRun
    plan: BatchPlan
    cross_tokenizer_specs: tuple[CrossTokenizerSpec | None, ...]
    """One per running teacher; None for a teacher with the student's tokenizer."""
    facts: Facts
    """Of the models and tokenizers."""
    fingerprints: dict[str, str]
    """Hashes, by name, of everything that must be unchanged when the run is resumed."""

    def going_on(self, saved: Mapping[str, str]) -> Job:
        """This job in the order of the data of a checkpoint, given its fingerprints.

        Checkpoints of large data from before these had an order of their own go on in the order of all rows, which is
        slow for Parquet: a row group is read for almost every row.
        """
        former = _order_name(self.config, windowed=False)
        if saved and saved.get(_ORDER, former) == former:
            return replace(self, fingerprints=self.fingerprints | {_ORDER: former})
        return self

    @property
    def order(self) -> Order:
        """The global order of the training documents."""
        windowed = self.fingerprints[_ORDER] != _order_name(self.config, windowed=False)
        return self.opened.train.order(self.config.run.seed, windowed=windowed)

    def loader(self, start: TrainState | None = None) -> Loader:
        """The training batches, from `start` on; None: from the first."""
        return Loader(self.opened.train, self.config, start or TrainState(), self.order)

    def validation_batches(self) -> Iterator[DocumentBatch]:
        """The batches of held-out documents; none without validation data."""
        return held_out_batches(self.config, self.opened.validation)


def prepare(run: OpenedRun, paths: RunPaths) -> Job:
    """Makes the job of a run whose tokenizers and data are open: computes fingerprints, builds missing projections.

    Downloads the weights of hub models, so that all workers find them in the cache; none are loaded. Projections are
    kept in `run.dir/.projections`.

    Raises:
        ConfigError: a projection that cannot be built.
    """
    config, plan = run.config, run.plan
    for model in run.models:
        model.fetch()
    assert run.student.folder is not None
    identities = {"student": sha256(run.student.folder / "config.json")}
    if config.student.has_adapters:
        identities[FROZEN] = fingerprint_model(run.student.folder)
    identities |= {teacher.name: teacher.identity for teacher in run.teachers}
    specs = {teacher.name: _cross_tokenizer_spec(run, teacher) for teacher in run.crossing}
    assert run.student.facts is not None
    run.student.facts = with_adapters(config, run.student.facts)
    return Job(
        config,
        paths,
        run,
        plan,
        cross_tokenizer_specs=tuple(specs.get(teacher.name) for teacher in run.teachers),
        facts=run.with_models(Facts()),
        fingerprints={
            "data": run.train.fingerprint,
            _ORDER: _order_name(config, windowed=run.train.windowed),
            "tokenizer": run.student.tokenizer_hash,
            "trained weights": _trained_weights(config),
            **({} if plan.num_ids is None else {"compared ids": str(plan.num_ids)}),
            **_template_fingerprints(run),
            **identities,
            **_pair_fingerprints(run, specs),
        },
    )


def _order_name(config: Config, *, windowed: bool) -> str:
    """The order of the data, in words: that of all rows, or the first version of shuffled blocks (`data.order`)."""
    return f"run.seed={config.run.seed}{', shuffled blocks, version 1' if windowed else ''}"


def _cross_tokenizer_spec(run: OpenedRun, teacher: OpenedTeacher) -> CrossTokenizerSpec:
    """How the student learns from a teacher over chunks of text: by `projection.path`, or one that is built and kept."""
    config, student, loss = run.config, run.student, teacher.cross_tokenizer_loss
    assert loss is not None
    if config.projection.path is not None:
        return CrossTokenizerSpec(loss, os.fspath(Path(config.projection.path).expanduser().absolute()))
    try:
        path = cached_projection(
            Path(config.run.dir).expanduser().absolute() / ".projections",
            student.tokenizer,
            teacher.tokenizer,
            student_columns=student.columns,
            teacher_columns=teacher.columns,
            student_stops=student.stops,
            teacher_stops=teacher.stops,
        )
        return CrossTokenizerSpec(loss, os.fspath(path))
    except (ValueError, OSError) as error:
        raise ConfigError(teacher.name, "must have a projection from the student's vocabulary", str(error)) from error


def _trained_weights(config: Config) -> str:
    lora = config.student.lora
    if lora is None:
        return "all weights"
    targets = "all linear layers" if lora.targets is None else ", ".join(sorted(lora.targets))
    whole = f", and {', '.join(sorted(lora.modules_to_save))} whole" if lora.modules_to_save else ""
    base = f", beside weights in {config.student.quantization}" if config.student.quantization else ""
    return f"LoRA of rank {lora.rank}, alpha {lora.scale * lora.rank:g}, on {targets}{whole}{base}"


def _pair_fingerprints(run: OpenedRun, specs: Mapping[str, CrossTokenizerSpec]) -> dict[str, str]:
    learnt = ", learnt" if run.config.projection.learnable else ""
    return {
        f"tokenizer pair with {teacher.name}": (
            f"tokenizer {teacher.tokenizer_hash}, loss {spec.method}, projection {sha256(spec.projection)}{learnt}"
        )
        for teacher in run.crossing
        for spec in (specs[teacher.name],)
    }


def _template_fingerprints(run: OpenedRun) -> dict[str, str]:
    if run.train.kind != "messages":
        return {}
    tokenizers: dict[str, Any] = {"chat template": run.student.tokenizer}
    tokenizers |= {f"chat template of {teacher.name}": teacher.tokenizer for teacher in run.crossing}
    texts = {name: json.dumps(tokenizer.chat_template, sort_keys=True) for name, tokenizer in tokenizers.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def manifest_of(
    config: Config,
    teacher: TeacherConfig,
    *,
    weights: str,
    tokenizer: str,
    vocabulary_size: int,
    on_gpu: bool,
    captures: bool,
) -> Manifest:
    """What the store of a teacher's targets says of itself, without the files that describe the teacher.

    Args:
        weights, tokenizer, vocabulary_size: see `Manifest`.
        on_gpu: whether the run uses GPUs, which decides `wire_dtype: auto`.
        captures: whether `capture.format` counts; a cache is exact.
    """
    return Manifest(
        format=config.capture.format if captures else "exact",
        kind=teacher.export,
        entries=config.loss.draws if teacher.export == "sampled" else min(config.loss.top_k, vocabulary_size),
        temperature=config.loss.temperature,
        wire_dtype=teacher.sent_dtype(on_gpu=on_gpu),
        dtype=SERVED if teacher.origin.is_served else teacher.dtype,
        model=teacher.model,
        revision=teacher.revision,
        weights=weights,
        tokenizer=tokenizer,
        vocabulary_size=vocabulary_size,
        mass=config.capture.mass if captures and config.capture.format == "compact" else None,
    )


def make_stores(job: Job, *, on_gpu: bool, captures: bool) -> None:
    """Makes the store of every teacher whose targets the run stores, or checks that one which exists fits.

    Args:
        on_gpu, captures: as for `manifest_of`.

    Raises:
        StoreError: it holds other targets, or cannot be written.
    """
    for opened, (teacher, known) in zip(job.opened.teachers, job.facts.by_teacher(job.config)):
        if teacher.cache is None:
            continue
        assert known.vocabulary_size is not None
        manifest = manifest_of(
            job.config,
            teacher,
            weights=job.fingerprints[opened.name],
            tokenizer=opened.tokenizer_hash,
            vocabulary_size=known.vocabulary_size,
            on_gpu=on_gpu,
            captures=captures,
        )
        sources = [resolve(*described_by(teacher))]
        if teacher.tokenizer is not None and not teacher.origin.is_served:
            sources.append(resolve(teacher.tokenizer))
        make_store(Path(teacher.cache), manifest, sources)
