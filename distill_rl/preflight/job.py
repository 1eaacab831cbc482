"""The job: everything that a run is made of, opened before the first process starts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from distill_rl.config.derive import cross_tokenizer_loss
from distill_rl.config.facts import (
    Facts,
    ModelFacts,
    TeacherFacts,
    may_be_quantized,
    only_reads,
    running_teachers,
    runs_model,
    splits_documents,
)
from distill_rl.config.paths import described_by
from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.data.batch.collate import BatchPlan, pad_id
from distill_rl.data.batch.tokenization import KnownIds
from distill_rl.data.loader import Joining, Loader, validation_batches
from distill_rl.data.mixture import Interleaved, Mixture
from distill_rl.data.order import Order
from distill_rl.data.reading.source import Source
from distill_rl.data.reading.sources import open_source, split_validation
from distill_rl.data.routing import Routing
from distill_rl.errors import ConfigError, DataError
from distill_rl.models.files.facts import read_model_facts, teacher_identity
from distill_rl.models.files.hub import read_config, resolve, stops_of, tokenizer_hash, tokenizer_of, vocabulary_size
from distill_rl.preflight.models.lora import trained_weights, with_adapters
from distill_rl.preflight.models.shared_vocabulary import SharedVocabulary, readable_ids, shared_vocabulary
from distill_rl.store.manifest import read_manifest, served_identity
from distill_rl.system.files import sha256
from distill_rl.types import CrossTokenizerSpec, DocumentBatch, RunPaths, TrainState


@dataclass(frozen=True, slots=True)
class Job:
    config: Config
    paths: RunPaths
    train: Source | Mixture
    validation: Source | Interleaved | None
    plan: BatchPlan
    cross_tokenizer_specs: tuple[CrossTokenizerSpec | None, ...]
    """One per running teacher; None for a teacher with the student's tokenizer."""
    facts: Facts
    """Of the models and tokenizers."""
    fingerprints: dict[str, str]
    """Hashes, by name, of everything that must be unchanged when the run is resumed."""

    @property
    def data_format(self) -> str:
        """`text` or `messages`, as found in the data."""
        return self.train.kind

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
        return self.train.order(self.config.run.seed, windowed=windowed)

    def loader(self, start: TrainState | None = None) -> Loader:
        """The training batches, from `start` on; None: from the first."""
        return _loader(self.config, self.train, self.order, start or TrainState())

    def validation_batches(self) -> Iterator[DocumentBatch]:
        """The batches of held-out documents; none without validation data."""
        if self.validation is None:
            return iter(())
        data = self.config.data
        return validation_batches(
            self.validation,
            self.config.train.global_batch_size,
            data.validation.max_documents,
            skip_bad_rows=data.bad_rows == "skip",
            joining=Joining.of(data),
        )


@dataclass(frozen=True, slots=True)
class RowInputs:
    """What a run makes its rows from. To open it, no weights are fetched or read, and no projection is built."""

    config: Config
    train: Source | Mixture
    validation: Source | Interleaved | None
    tokenizer: Any
    """The student's."""
    teacher_tokenizers: tuple[Any, ...]
    """One per running teacher."""
    shared: tuple[SharedVocabulary | None, ...]
    """What each teacher's tokenizer shares with the student's; None if it is another one."""
    methods: tuple[str | None, ...]
    """The cross-tokenizer loss of each teacher; None for one that is compared token by token."""
    num_ids: int
    """Ids that the student and all teachers that are compared token by token have."""
    plan: BatchPlan

    @property
    def other_tokenizer(self) -> list[bool]:
        """Per running teacher, whether it is compared over chunks of text."""
        return [method is not None for method in self.methods]

    def loader(self) -> Loader:
        """The training batches of a new run, from the first."""
        return _loader(self.config, self.train, self.train.order(self.config.run.seed), TrainState())


_ORDER = "order of the data"
"""Name of the fingerprint of the order."""


def _loader(config: Config, source: Source | Mixture, order: Order, start: TrainState) -> Loader:
    """The training batches of a run, from `start` on."""
    train, data = config.train, config.data
    return Loader(
        source,
        batch_size=train.global_batch_size,
        seed=config.run.seed,
        steps=train.steps,
        epochs=train.epochs,
        start=start,
        order=order,
        skip_bad_rows=data.bad_rows == "skip",
        joining=Joining.of(data),
    )


def _order_name(config: Config, *, windowed: bool) -> str:
    """The order of the data, in words: that of all rows, or the first version of shuffled blocks (`data.order`)."""
    return f"run.seed={config.run.seed}{', shuffled blocks, version 1' if windowed else ''}"


def prepare(config: Config, paths: RunPaths, checked: Facts | None = None) -> Job:
    """Makes the job of a checked configuration: opens the data, computes fingerprints, builds missing projections.

    Downloads hub models and data, projections are kept in `run.dir/.projections`, and no weights are loaded.

    Args:
        checked: what the checks found, so that it need not be found again.

    Raises:
        ConfigError: a projection that cannot be built, or tokenizers that the settings do not allow.
    """
    rows = open_rows(config)
    train, tokenizer = rows.train, rows.tokenizer
    teachers, teacher_tokenizers = running_teachers(config), rows.teacher_tokenizers
    models = _model_fingerprints(config)
    specs = tuple(
        None if method is None else _cross_tokenizer_spec(config, teacher, tokenizer, other, method)
        for teacher, other, method in zip(teachers, teacher_tokenizers, rows.methods)
    )
    token_by_token = [vocabulary if spec is None else None for vocabulary, spec in zip(rows.shared, specs)]
    num_ids, limit = rows.num_ids, rows.plan.num_ids
    crossing = [
        (t.name, other, spec) for t, other, spec in zip(teachers, teacher_tokenizers, specs) if spec is not None
    ]
    return Job(
        config,
        paths,
        train,
        rows.validation,
        rows.plan,
        cross_tokenizer_specs=specs,
        facts=Facts(
            vocabulary_size=num_ids,
            student=with_adapters(config, _model_facts(config.student), checked or Facts()),
            teachers=tuple(
                _teacher_facts(*of_teacher, num_ids)
                for of_teacher in zip(teachers, teacher_tokenizers, specs, token_by_token)
            ),
        ),
        fingerprints=_fingerprints(config, train, tokenizer, crossing, limit, models),
    )


def open_rows(config: Config) -> RowInputs:
    """Opens the data and the tokenizers of a checked configuration.

    Downloads hub data and the small files of hub models.

    Raises:
        DistillError: data or tokenizers that cannot be read, all of them at once; tokenizers that the settings do not allow.
    """
    problems: list[str] = []

    def attempt(read: Callable[[], Any]) -> Any:
        """What `read` returns; None if it raises a ConfigError or DataError, whose lines are kept."""
        try:
            return read()
        except (ConfigError, DataError) as error:
            problems.extend(error.problems)
            return None

    routing, teachers = Routing.of(config), running_teachers(config)
    source = attempt(lambda: open_source(config.data, routing=routing))
    models: list[StudentConfig | TeacherConfig] = [config.student, *teachers]
    tokenizer, *others = [attempt(partial(tokenizer_of, model)) for model in models]
    if problems:
        raise ConfigError.many(dict.fromkeys(problems))
    train, validation = split_validation(source, config.data, config.run.seed, routing=routing)
    stops = stops_of(config.student)
    shared = tuple(
        shared_vocabulary(tokenizer, other, student_stops=stops, teacher_stops=stops_of(teacher))
        for teacher, other in zip(teachers, others)
    )
    methods = tuple(
        cross_tokenizer_loss(config, teacher, same=vocabulary is not None)
        for teacher, vocabulary in zip(teachers, shared)
    )
    own_ids = vocabulary_size(tokenizer)
    known = [KnownIds(readable_ids(tokenizer, _columns(config.student, tokenizer), stops=stops), "the student")]
    for teacher, other, vocabulary, method in zip(teachers, others, shared, methods):
        if vocabulary and method is None:
            rows, name = (
                readable_ids(other, _columns(teacher, other), stops=stops_of(teacher)),
                f"teacher {teacher.name}",
            )
            known.append(KnownIds(min(rows, vocabulary.size), name, by_tokenizer=rows >= vocabulary.size))
    num_ids = min(each.count for each in known)
    plan = BatchPlan.from_config(
        config,
        pad_id(tokenizer, num_ids),
        known_ids=[each for each in known if each.count < own_ids],
        split=splits_documents(config, train.kind),
    )
    return RowInputs(config, train, validation, tokenizer, tuple(others), shared, methods, num_ids, plan)


def _model_facts(model: StudentConfig | TeacherConfig) -> ModelFacts:
    """Sizes of a model, from its configuration and the headers of its weights; downloads a hub model."""
    config = read_config(model.model, model.revision, quantized=may_be_quantized(model))
    return read_model_facts(resolve(model.model, model.revision, weights=True), config)


def _teacher_facts(
    teacher: TeacherConfig,
    tokenizer: Any,
    spec: CrossTokenizerSpec | None,
    shared: SharedVocabulary | None,
    num_ids: int,
) -> TeacherFacts:
    """What the files of a teacher contain.

    Args:
        spec: how it is compared over chunks of text; None: token by token, over the `num_ids` ids of `shared`.
    """
    model = _model_facts(teacher) if runs_model(teacher) else None
    if spec is not None:
        return TeacherFacts(model, vocabulary_size(tokenizer), spec.method)
    return TeacherFacts(model, num_ids, tokens_apart=str(shared))


def _cross_tokenizer_spec(
    config: Config, teacher: TeacherConfig, student_tokenizer: Any, teacher_tokenizer: Any, method: str
) -> CrossTokenizerSpec:
    """How the student learns from one teacher by a loss over chunks of text.

    The projection is that of `projection.path`, or one for the two tokenizers that is built once and kept in
    `run.dir/.projections`.

    Raises:
        ConfigError: the projection cannot be built or written.
    """
    if config.projection.path is not None:
        return CrossTokenizerSpec(method, os.fspath(Path(config.projection.path).expanduser().absolute()))
    from distill_rl.align.projection import cached_projection

    folder = Path(config.run.dir).expanduser().absolute() / ".projections"
    student_columns = read_config(config.student.model, config.student.revision).vocab_size
    teacher_columns = _columns(teacher, teacher_tokenizer)
    try:
        path = cached_projection(
            folder,
            student_tokenizer,
            teacher_tokenizer,
            student_columns=student_columns,
            teacher_columns=teacher_columns,
            student_stops=stops_of(config.student),
            teacher_stops=stops_of(teacher),
        )
        return CrossTokenizerSpec(method, os.fspath(path))
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"teacher {teacher.name}", "must have a projection from the student's vocabulary", str(error)
        ) from error


def _columns(model: StudentConfig | TeacherConfig, tokenizer: Any) -> int:
    """Columns of a model's output layer; of a served one, whose layer nobody here knows, the ids of its tokenizer."""
    path, revision = described_by(model)
    served = isinstance(model, TeacherConfig) and model.backend == "endpoint"
    if served or not (resolve(path, revision) / "config.json").is_file():
        return vocabulary_size(tokenizer)
    return read_config(path, revision, quantized=may_be_quantized(model)).vocab_size


def _fingerprints(
    config: Config,
    train: Source | Mixture,
    tokenizer: Any,
    crossing: Sequence[tuple[str, Any, CrossTokenizerSpec]],
    limit: int | None,
    models: Mapping[str, str],
) -> dict[str, str]:
    """What must be unchanged when a run goes on, by name.

    Args:
        tokenizer: the student's.
        crossing: name, tokenizer and comparison of each teacher that is compared over chunks of text.
        limit: ids that are compared; None: all of the student's.
        models: the part that `_model_fingerprints` gives.
    """
    templates = {"chat template": tokenizer}
    templates |= {f"chat template of teacher {name}": other for name, other, _ in crossing}
    return {
        "data": train.fingerprint,
        _ORDER: _order_name(config, windowed=train.windowed),
        "tokenizer": tokenizer_hash(tokenizer),
        "trained weights": trained_weights(config),
        **({} if limit is None else {"compared ids": str(limit)}),
        **_template_fingerprints(train, templates),
        **models,
        **_pair_fingerprints(config, crossing),
    }


def _pair_fingerprints(config: Config, crossing: Sequence[tuple[str, Any, CrossTokenizerSpec]]) -> dict[str, str]:
    """What must be unchanged of each teacher's tokenizer, and of how it is compared.

    Args:
        crossing: name, tokenizer and comparison of each teacher that is compared over chunks of text.
    """
    learnt = ", learnt" if config.projection.learnable else ""
    return {
        f"tokenizer pair with teacher {name}": (
            f"tokenizer {tokenizer_hash(tokenizer)}, loss {spec.method}, projection {sha256(spec.projection)}{learnt}"
        )
        for name, tokenizer, spec in crossing
    }


def _template_fingerprints(source: Source | Mixture, tokenizers: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprint name → sha256 (hex) of the tokenizer's chat template; empty if the data are plain text.

    Args:
        tokenizers: by the name of the fingerprint.
    """
    if source.kind != "messages":
        return {}
    texts = {name: json.dumps(tokenizer.chat_template, sort_keys=True) for name, tokenizer in tokenizers.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def _weights(teacher: TeacherConfig) -> str:
    """The hash of a teacher's weights, from its model or, if that does not run, from its store; its name if it is served."""
    if teacher.backend == "endpoint":
        return served_identity(teacher)
    if only_reads(teacher):
        assert teacher.store is not None
        return read_manifest(Path(teacher.store)).weights
    return teacher_identity(teacher, resolve(teacher.model, teacher.revision, weights=True))


def _model_fingerprints(config: Config) -> dict[str, str]:
    """Hashes, by name, of the student's config.json and of every running teacher's model folder.

    Downloads hub models, weights included, so that all workers find them in the cache.
    """
    student = resolve(config.student.model, config.student.revision, weights=True)
    teachers = {f"teacher {teacher.name}": _weights(teacher) for teacher in running_teachers(config)}
    return {"student": sha256(student / "config.json"), **teachers}
