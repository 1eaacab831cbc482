"""The opened run: its models, tokenizers, stores and data, each opened once, for the checks and for the run itself.

`open_rows` opens what rows are made from and raises what is wrong. The checks open one part after the other
(`OpenedModel.open`, `OpenedRun.open_stores`, `OpenedRun.open_data`), so that what fails becomes a line of `RunFindings` and
the rest is still opened. Weights are never loaded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.config import rules
from distill_rl.config.derive import cross_tokenizer_loss
from distill_rl.config.facts import Facts, ModelFacts, TeacherFacts
from distill_rl.config.paths import described_by
from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.config.walk import MISSING
from distill_rl.data.batch.collate import BatchPlan, pad_id
from distill_rl.data.batch.tokenization import KnownIds
from distill_rl.data.loader import Loader, validation_batches
from distill_rl.data.reading import sources
from distill_rl.data.routing import Routing
from distill_rl.errors import ConfigError, DataError, DistillError, StoreError, first_line, problem
from distill_rl.models import files as model_files
from distill_rl.models.classes import survey
from distill_rl.models.stops import configured_stops
from distill_rl.run.shared_vocabulary import SharedVocabulary, shared_vocabulary, some, tokens_beyond
from distill_rl.store.store import TEACHER, Store, read_manifest, served_identity
from distill_rl.types import DocumentBatch, TrainState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill_rl.data.reading.cache import Cache
    from distill_rl.data.reading.source import Interleaved, Source


@dataclass
class RunFindings:
    """What is wrong (`problems`), could not be checked (`unreachable`) or is worth knowing (`notes`), one line each."""

    problems: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def attempt(self, key: str, read: Callable[[], Any]) -> Any:
        """The result of `read`, or None with its error added to `problems`, or to `unreachable` if the hub does not answer.

        Every exception is caught, because damaged files can raise anything.

        Args:
            key: the setting that the problem is about, with which its lines begin.
        """
        try:
            return read()
        except (sources.HubError, model_files.HubUnreachable) as error:
            self.unreachable.append(str(error))
        except DistillError as error:
            self.problems += [text if text.startswith(key) else f"{key}: {text}" for text in error.problems]
        except Exception as error:
            self.problems.append(problem(key, f"cannot be read ({type(error).__name__})", first_line(error)))
        return None


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a teacher is compared with the student."""

    loss: str | None
    """The cross-tokenizer loss, over chunks of text; None: token by token."""
    shared: SharedVocabulary | None = None
    """Token by token: the vocabulary of both tokenizers, as far as the teacher can read it."""
    by_tokenizer: bool = True
    """Whether it is the tokenizers that limit it, not the teacher's embedding table."""

    @classmethod
    def of(cls, config: Config, student: OpenedModel, teacher: OpenedTeacher) -> Comparison:
        """Compares two tokenizers that are open.

        Raises:
            ConfigError: the settings do not allow such a pair.
        """
        stops = {"student_stops": student.stops, "teacher_stops": teacher.stops}
        same = student.tokenizer_hash == teacher.tokenizer_hash
        shared = shared_vocabulary(student.tokenizer, teacher.tokenizer, same=same, **stops)
        loss = cross_tokenizer_loss(config, teacher.settings, same=shared is not None)
        if shared is None or loss is not None:
            return cls(loss)
        assert teacher.vocabulary_size is not None
        size = min(shared.size, teacher.vocabulary_size)
        return cls(None, replace(shared, size=size), by_tokenizer=size == shared.size)


@dataclass
class OpenedModel:
    """What is open of one model; None for the rest."""

    key: str
    """`student`, or `teachers.0`: where its settings are."""
    name: str
    """`student`, or `teacher NAME`."""
    settings: StudentConfig | TeacherConfig
    config: Any = None
    """The configuration of transformers."""
    folder: Path | None = None
    """Where `config` is from."""
    facts: ModelFacts | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    vocabulary_size: int | None = None
    """Of the ids that the model can read."""
    tokenizer_hash: str = ""
    beyond: tuple[str, ...] = ()
    """Added tokens of the tokenizer for which the model has no embedding row, and which no text may contain."""
    stops: tuple[int, ...] = ()
    """Ids by which the model ends an answer, besides those that its tokenizer names."""

    @property
    def runs(self) -> bool:
        """Whether the run loads the model."""
        return self.settings.origin.runs_model

    @property
    def has_config(self) -> bool:
        """Whether the model's configuration is there, not its tokenizer alone."""
        return True

    @property
    def needs_weights(self) -> bool:
        """Whether a local folder of the model must have weights."""
        return True

    @property
    def columns(self) -> int:
        """Columns of the output layer; of a model whose layer nobody here knows, the ids of the tokenizer."""
        if self.config is not None:
            return self.config.vocab_size
        assert self.tokenizer is not None
        return model_files.vocabulary_size(self.tokenizer)

    @cached_property
    def headers(self) -> Mapping[str, Any]:
        """What the headers of the weights' files say, by tensor."""
        assert self.folder is not None
        return model_files.read_headers(self.folder)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors in the files; empty if these are not on this machine or damaged."""
        return {} if self.facts is None else {name: tuple(entry["shape"]) for name, entry in self.headers.items()}

    def read(self) -> None:
        """Reads the tokenizer and what decides which of its ids count, unless they are open.

        Raises:
            ConfigError: they cannot be read.
        """
        if self.tokenizer is not None:
            return
        tokenizer, described = model_files.tokenizer_of(self.settings), described_by(self.settings)
        self.stops = configured_stops(*described)
        self.folder = model_files.resolve(*described)
        if self.has_config and (self.folder / "config.json").is_file():
            self.config = model_files.read_config(*described, quantized=self.settings.may_be_quantized)
        self._take(tokenizer)

    def fetch(self) -> None:
        """Downloads the weights of a hub model and reads their headers, if the checks could not.

        Raises:
            ConfigError: they cannot be read.
        """
        if not self.runs:
            return
        folder = model_files.resolve(self.settings.model, self.settings.revision, weights=True)
        if self.facts is None:
            self.folder = folder
            self._measure()

    def open(self, findings: RunFindings) -> None:
        """Opens as much as possible. What fails is added to the findings; missing weights only of a local folder."""
        model, key = self.settings, f"{self.key}.tokenizer"
        path, revision = described_by(model)
        if not self.has_config:
            if (folder := _located(key, path, None, findings)) is not None:
                self.folder = folder
                self.stops = findings.attempt(key, partial(configured_stops, folder)) or ()
                self._open_tokenizer(folder, findings)
            return
        folder = _located(f"{self.key}.model", path, revision, findings)
        if folder is not None:
            self._open_weights(folder, findings, needed=Path(path).expanduser().is_dir() and self.needs_weights)
            if model_files.is_adapter(folder):  # its line says what to do; that it lacks a tokenizer, too, adds nothing
                folder = None
        if model.tokenizer is not None and path == model.model:
            folder = _located(key, model.tokenizer, None, findings)
        if folder is not None:
            self._open_tokenizer(folder, findings)
        if self.beyond:
            what = f"{self.name} has {self.columns:,} embedding rows, and none for added tokens of its tokenizer"
            findings.notes.append(f"{what} ({some(self.beyond)}); rows that contain one are left out as bad rows")

    def _open_weights(self, folder: Path, findings: RunFindings, *, needed: bool) -> None:
        """Reads config.json and the headers of the weights, which are a problem only if they are `needed`."""
        key = f"{self.key}.model"
        in_folder = model_files.folder_problems(key, folder, weights=needed)
        in_folder = in_folder or model_files.architecture_problems(key, folder)
        findings.problems += in_folder
        if in_folder:
            return
        self.folder = folder
        read = partial(model_files.read_config, folder, quantized=self.settings.may_be_quantized)
        self.config = findings.attempt(key, read)
        self.stops = findings.attempt(key, partial(configured_stops, folder)) or ()
        if self.config is not None and not getattr(self.config, "num_attention_heads", None):
            rule = f"must be a model with attention; {self.config.model_type} has no attention heads"
            findings.problems.append(problem(key, rule, None, "use a transformer, such as Llama, Qwen or Mistral"))
            self.config = None
        if self.config is not None:
            findings.notes += model_files.tower_note(key, folder, self.config)
            if not model_files.folder_problems(key, folder):
                findings.attempt(key, self._measure)

    def _measure(self) -> None:
        assert self.folder is not None
        self.facts = model_files.read_model_facts(self.folder, self.config, self.headers)

    def _open_tokenizer(self, folder: Path, findings: RunFindings) -> None:
        tokenizer = findings.attempt(f"{self.key}.tokenizer", lambda: model_files.read_tokenizer(folder))
        if tokenizer is not None:
            self._take(tokenizer)

    def _take(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.tokenizer_hash = tokenizer, model_files.tokenizer_hash(tokenizer)
        self.beyond = tokens_beyond(tokenizer, self.columns, stops=self.stops) or ()
        # All ids of the tokenizer, but for added ones beyond the model's table.
        self.vocabulary_size = self.columns if self.beyond else model_files.vocabulary_size(tokenizer)


@dataclass
class OpenedTeacher(OpenedModel):
    settings: TeacherConfig
    comparison: Comparison | None = None
    """None: not known."""
    advice: str = ""
    """With another tokenizer: which cross-tokenizer loss suits it, by a sample of the training data."""
    store: Store | None = None
    """That it is read from."""

    @property
    def has_config(self) -> bool:
        # A store that was filled by a server has a tokenizer alone.
        if self.store is not None and not (self.store.folder / TEACHER / "config.json").is_file():
            return False
        return not self.settings.origin.is_served

    @property
    def needs_weights(self) -> bool:
        # The model may be a store's, which describes it alone.
        return self.runs and self.settings.model != self.settings.store.teacher_folder

    @property
    def cross_tokenizer_loss(self) -> str | None:
        """None if the teacher is compared token by token."""
        return None if self.comparison is None else self.comparison.loss

    @property
    def shared(self) -> SharedVocabulary | None:
        """What a teacher that is compared token by token shares with the student."""
        return None if self.comparison is None else self.comparison.shared

    @property
    def identity(self) -> str:
        """What makes the targets: the hash of the weights or, if the model does not run here, what its store or name says."""
        if self.settings.origin.is_served:
            return served_identity(self.settings)
        if self.settings.origin.only_reads:
            store = Path(self.settings.store.path or "")
            return (read_manifest(store) if self.store is None else self.store.manifest).weights
        assert self.folder is not None
        return model_files.teacher_identity(self.settings, self.folder)


def _located(key: str, name: str, revision: str | None, findings: RunFindings) -> Path | None:
    """The local folder of a model or tokenizer, which may be in the hub's cache; None, with a line, if there is none."""
    if name == MISSING or not name.strip():  # the rules of the configuration report it
        return None
    return findings.attempt(key, partial(model_files.locate, key, name, revision))


@dataclass
class OpenedRun:
    config: Config
    student: OpenedModel
    teachers: list[OpenedTeacher]
    """The running ones."""
    sources: list[tuple[str, Source | None]] = field(default_factory=list)
    """Every source of the data with the setting that names it; None for one that could not be opened."""
    train: Any = None
    """Source | Mixture: the documents to train on; None if not all data could be opened."""
    validation: Any = None
    """Source | Interleaved: those to validate on; None if there are none."""

    @classmethod
    def of(cls, config: Config) -> OpenedRun:
        """A run of which nothing is open yet."""
        running = enumerate(config.running_teachers)
        teachers = [OpenedTeacher(f"teachers.{i}", f"teacher {t.name}", t) for i, t in running]
        return cls(config, OpenedModel("student", "student", config.student), teachers)

    @property
    def models(self) -> list[OpenedModel]:
        return [self.student, *self.teachers]

    @property
    def crossing(self) -> list[OpenedTeacher]:
        """The teachers that are compared over chunks of text."""
        return [teacher for teacher in self.teachers if teacher.cross_tokenizer_loss is not None]

    @cached_property
    def rules(self) -> list[str]:
        """What the configuration's own rules have against it, one line each."""
        return [*rules.problems(self.config)]

    @property
    def num_ids(self) -> int | None:
        """Ids of the student's tokenizer that every teacher which is compared token by token has, too; None: not known."""
        if self.student.vocabulary_size is None:
            return None
        shared = [teacher.shared for teacher in self.teachers if teacher.shared is not None]
        return min([self.student.vocabulary_size, *(vocabulary.size for vocabulary in shared)])

    def ids_of(self, teacher: OpenedTeacher) -> int | None:
        """Ids over which a teacher's probabilities are: those that the run compares token by token, else all of its own."""
        return teacher.vocabulary_size if teacher.shared is None else self.num_ids

    @property
    def plan(self) -> BatchPlan:
        """How rows are laid out and divided; the tokenizers and the data must be open."""
        tokenizer, num_ids = self.student.tokenizer, self.num_ids
        assert tokenizer is not None
        assert num_ids is not None
        assert self.student.vocabulary_size is not None
        known = [KnownIds(self.student.vocabulary_size, "the student")]
        for teacher in self.teachers:
            if teacher.comparison is not None and teacher.shared is not None:
                known.append(KnownIds(teacher.shared.size, teacher.name, teacher.comparison.by_tokenizer))
        own_ids = model_files.vocabulary_size(tokenizer)
        return BatchPlan.from_config(
            self.config,
            pad_id(tokenizer, num_ids),
            known_ids=[each for each in known if each.count < own_ids],
            split=self.config.splits_documents(self.train.kind),
        )

    def loader(self) -> Loader:
        """The training batches of a new run, from the first."""
        return Loader(self.train, self.config, TrainState(), self.train.order(self.config.run.seed))

    def with_models(self, facts: Facts) -> Facts:
        """Facts, with what is known of the models."""
        teachers = []
        for teacher in self.teachers:
            size, apart = self.ids_of(teacher), "" if teacher.shared is None else str(teacher.shared)
            teachers.append(TeacherFacts(teacher.facts, size, teacher.cross_tokenizer_loss, teacher.advice, apart))
        return replace(facts, vocabulary_size=self.num_ids, student=self.student.facts, teachers=tuple(teachers))

    def release(self) -> None:
        """Forgets tokenizers and configurations, which may take hundreds of MiB, once the job is made."""
        for model in self.models:
            model.tokenizer = model.config = None

    def open_stores(self, findings: RunFindings) -> None:
        """Opens the stores that teachers are read from. What fails is added to the findings."""
        for teacher in self.teachers:
            if folder := teacher.settings.origin.folder:
                teacher.store = findings.attempt(f"{teacher.key}.store", partial(Store, Path(folder)))

    def open_models(self, findings: RunFindings) -> None:
        """Opens the models, after the stores, in which a teacher may be described. What fails is added to the findings."""
        self.student.open(findings)
        for teacher in self.teachers:
            if not teacher.settings.origin.is_store or teacher.store is not None:
                teacher.open(findings)

    def open_data(self, findings: RunFindings, cache: Cache) -> None:
        """Opens the data as far as possible. What fails is added to the findings.

        Args:
            cache: if nothing may be written, hub data sets are not downloaded, and only their existence is checked.
        """
        routing = Routing.of(self.config)
        for key, settings in sources.each_source(self.config.data):
            path, source = settings.path, None
            if path is None or path == MISSING or not path.strip():
                pass
            elif not cache.write and sources.is_hub_name(path):
                missing, reason = model_files.find_data_set(key, path)
                findings.problems += filter(None, [missing])
                findings.unreachable += filter(None, [reason])
            else:
                source = findings.attempt(key, partial(sources.open_one, key, settings, cache=cache, routing=routing))
            self.sources.append((key, source))
        if all(source is not None for _, source in self.sources):
            self._divide(findings, cache, routing)

    def _divide(self, findings: RunFindings, cache: Cache, routing: Routing | None) -> None:
        data = self.config.data
        opened = [source for _, source in self.sources if source is not None]
        train: Any = opened[0]
        if data.sources:
            if any(entry.weight <= 0 for entry in data.sources):  # reported as settings
                return
            train = findings.attempt("data.sources", lambda: sources.mixture_of(data, opened))
        if train is not None:
            split = partial(sources.split_validation, train, data, self.config.run.seed, cache=cache, routing=routing)
            unreachable = len(findings.unreachable)
            divided = findings.attempt("data.validation", split)
            if len(findings.unreachable) == unreachable:
                self.train, self.validation = divided or (train, None)


def open_rows(config: Config) -> OpenedRun:
    """Opens what a run makes its rows from: the data and the tokenizers of a checked configuration.

    Downloads hub data and the small files of hub models. No weights are fetched or read, and no projection is built.

    Raises:
        DistillError: data or tokenizers that cannot be read, all of them at once; tokenizers that the settings do not allow.
    """
    run, routing = OpenedRun.of(config), Routing.of(config)
    source, problems = None, list[str]()
    try:
        source = sources.open_source(config.data, routing=routing)
    except (ConfigError, DataError) as error:
        problems += error.problems
    for model in run.models:
        try:
            if folder := model.settings.origin.folder:
                read_manifest(Path(folder))  # a store describes its teacher
            model.read()
        except (ConfigError, DataError, StoreError) as error:
            problems += error.problems
    if problems:
        raise ConfigError.many(dict.fromkeys(problems))
    assert source is not None
    run.train, run.validation = sources.split_validation(source, config.data, config.run.seed, routing=routing)
    for teacher in run.teachers:
        teacher.comparison = Comparison.of(config, run.student, teacher)
    return run


def with_adapters(config: Config, facts: ModelFacts) -> ModelFacts:
    """The facts of the student with what is trained, if it has adapters and these are not counted yet."""
    if not config.student.has_adapters or facts.adapters is not None:
        return facts
    folder = model_files.resolve(config.student.model, config.student.revision)
    return replace(facts, adapters=survey(folder, config.student))


def held_out_batches(config: Config, source: Source | Interleaved | None) -> Iterator[DocumentBatch]:
    """The batches of held-out documents; none without validation data."""
    return iter(()) if source is None else validation_batches(source, config)
