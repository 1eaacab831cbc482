"""Opens models and tokenizers as far as possible, and turns what fails into lines of problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.config.facts import ModelFacts, in_vllm, may_be_quantized, running_teachers, runs_model
from distill_rl.config.paths import described_by, teacher_folder
from distill_rl.config.reading.walk import MISSING
from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.errors import DistillError, first_line, problem
from distill_rl.store.manifest import TEACHER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill_rl.preflight.models.shared_vocabulary import SharedVocabulary
    from distill_rl.store.store import Store


@dataclass
class Opened:
    """What could be opened of one model; None for the rest."""

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
    """Of those that the model can read."""
    tokenizer_hash: str | None = None
    beyond: tuple[str, ...] = ()
    """Added tokens of the tokenizer for which the model has no embedding row, and which no text may contain."""
    stops: tuple[int, ...] = ()
    """Ids by which the model ends an answer, besides those that its tokenizer names."""
    cross_tokenizer_loss: str | None = None
    """For a teacher: its cross-tokenizer loss; None if its tokenizer is the student's."""
    advice: str = ""
    """For a teacher with another tokenizer: which cross-tokenizer loss suits it, by a sample of the training data."""
    store: Store | None = None
    """For a teacher that is read from a store."""
    shared: SharedVocabulary | None = None
    """For a teacher that is compared token by token: the ids that are compared."""

    @property
    def in_vllm(self) -> bool:
        """As of `facts.in_vllm`."""
        return in_vllm(self.settings)


@dataclass
class Findings:
    """What is wrong (`problems`), could not be checked (`unreachable`) or is worth knowing (`notes`), one line each."""

    problems: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    documents: list[Any] = field(default_factory=list)
    """A sample of the training documents, for later checks; empty if they could not be read."""

    def attempt(self, key: str, read: Callable[[], Any], *, let_pass: type[Exception] | tuple[()] = ()) -> Any:
        """The result of `read`, or None with its error added to `problems`.

        Every exception is caught, because damaged files can raise anything.

        Args:
            key: the setting that the problem is about, with which its lines begin.
            let_pass: exceptions that are raised to the caller instead.
        """
        try:
            return read()
        except let_pass:
            raise
        except DistillError as error:
            self.problems += [text if text.startswith(key) else f"{key}: {text}" for text in error.problems]
        except Exception as error:
            self.problems.append(problem(key, f"cannot be read ({type(error).__name__})", first_line(error)))
        return None


def open_models(config: Config, findings: Findings) -> tuple[Opened, list[Opened]]:
    """Opens as much as possible of the student and of every running teacher, in that order, without their weights.

    What fails is added to the findings. `cross_tokenizer_loss` of the teachers is left None (`vocabulary_problems`).
    """
    from distill_rl.preflight.stores.check import open_stores

    student = Opened("student", "student", config.student)
    teachers = [Opened(f"teachers.{i}", f"teacher {t.name}", t) for i, t in enumerate(running_teachers(config))]
    open_stores(config, teachers, findings)
    for model in (student, *teachers):
        settings = model.settings
        if isinstance(settings, TeacherConfig) and settings.backend == "store" and model.store is None:
            continue  # what describes the teacher is in the store
        _open(model, findings)
    return student, teachers


def _open(opened: Opened, findings: Findings) -> None:
    """Fills `opened` from its settings: the model's configuration, stops and sizes, and its tokenizer.

    What fails is added to the findings and stays empty. Missing weights are a problem only in a local folder.
    """
    from distill_rl.models.files.facts import is_adapter
    from distill_rl.preflight.models.shared_vocabulary import readable_ids, some, tokens_beyond

    key, model = opened.key, opened.settings
    path, revision = described_by(model)
    if isinstance(model, TeacherConfig) and (model.backend == "endpoint" or _holds_a_tokenizer_only(opened)):
        _open_tokenizer_only(path, opened, findings)
        return
    folder = _folder(f"{key}.model", path, revision, findings)
    if folder is not None:
        needed = Path(path).expanduser().is_dir() and not _only_described(model)
        _open_weights(f"{key}.model", folder, opened, findings, needed=needed)
        if is_adapter(folder):  # its line says what to do; that it lacks a tokenizer, too, adds nothing
            folder = None
    if model.tokenizer is not None and path == model.model:
        folder = _folder(f"{key}.tokenizer", model.tokenizer, None, findings)
    if folder is not None:
        _open_tokenizer(f"{key}.tokenizer", folder, opened, findings)
    if opened.tokenizer is not None and opened.config is not None:
        columns = opened.config.vocab_size
        opened.beyond = tokens_beyond(opened.tokenizer, columns, stops=opened.stops) or ()
        opened.vocabulary_size = readable_ids(opened.tokenizer, columns, stops=opened.stops)
        if opened.beyond:
            what = f"{opened.name} has {columns:,} embedding rows, and none for added tokens of its tokenizer"
            findings.notes.append(f"{what} ({some(opened.beyond)}); rows that contain one are left out as bad rows")


def _holds_a_tokenizer_only(opened: Opened) -> bool:
    """Whether the store of a teacher was filled by a server, of whose model only the tokenizer is known."""
    return opened.store is not None and not (opened.store.folder / TEACHER / "config.json").is_file()


def _open_tokenizer_only(path: str, opened: Opened, findings: Findings) -> None:
    """Fills what a tokenizer's folder says of a model that does not run here: all but its configuration and sizes."""
    from distill_rl.models.files.hub import configured_stops

    key = f"{opened.key}.tokenizer"
    folder = _folder(key, path, None, findings)
    if folder is not None:
        opened.folder = folder
        opened.stops = findings.attempt(key, lambda: configured_stops(folder)) or ()
        _open_tokenizer(key, folder, opened, findings)


def _only_described(model: StudentConfig | TeacherConfig) -> bool:
    """Whether the model's folder need not have weights: nobody loads it, or it is a store's that lacks its model."""
    if isinstance(model, StudentConfig):
        return False
    return not runs_model(model) or model.model == teacher_folder(model.store or "")


def _open_weights(key: str, folder: Path, opened: Opened, findings: Findings, *, needed: bool) -> None:
    """Fills `config`, `stops` and `facts` of `opened` from config.json and the headers of the weights.

    What fails is added to the findings. If the folder itself has a problem, nothing is filled.

    Args:
        key: the setting, for messages.
        needed: whether missing or damaged weights are a problem. If not (those of a hub model may still have to be
            downloaded), they only leave `facts` None.
    """
    from distill_rl.models.files.facts import folder_problems, read_model_facts
    from distill_rl.models.files.hub import architecture_problems, configured_stops, read_config, tower_note

    in_folder = folder_problems(key, folder, weights=needed) or architecture_problems(key, folder)
    findings.problems += in_folder
    if in_folder:
        return
    opened.folder = folder
    opened.config = findings.attempt(key, lambda: read_config(folder, quantized=may_be_quantized(opened.settings)))
    opened.stops = findings.attempt(key, lambda: configured_stops(folder)) or ()
    if opened.config is not None and not getattr(opened.config, "num_attention_heads", None):
        rule = f"must be a model with attention; {opened.config.model_type} has no attention heads"
        findings.problems.append(problem(key, rule, None, "use a transformer, such as Llama, Qwen or Mistral"))
        opened.config = None
    if opened.config is not None:
        findings.notes += tower_note(key, folder, opened.config)
    if opened.config is not None and not folder_problems(key, folder):
        opened.facts = findings.attempt(key, lambda: read_model_facts(folder, opened.config))


def _folder(key: str, name: str, revision: str | None, findings: Findings) -> Path | None:
    """The local folder of a model or tokenizer, which may be in the hub's cache; None if there is none.

    The findings say why, except for a name that is missing (`???`) or blank, which the rules of the configuration
    report.

    Args:
        key: the setting that holds the name, for messages.
        revision: of a hub repository; None: its default.
    """
    from distill_rl.models.files.facts import locate

    if name == MISSING or not name.strip():
        return None
    location = locate(key, name, revision)
    findings.problems += filter(None, [location.problem])
    findings.unreachable += filter(None, [location.unreachable])
    return location.folder


def _open_tokenizer(key: str, folder: Path, opened: Opened, findings: Findings) -> None:
    """Fills `tokenizer`, `vocabulary_size` and `tokenizer_hash` of `opened` from the files in a folder.

    If the tokenizer cannot be read, they stay None and the findings say why.
    """
    from distill_rl.models.files.hub import read_tokenizer, tokenizer_hash, vocabulary_size

    opened.tokenizer = findings.attempt(key, lambda: read_tokenizer(folder))
    if opened.tokenizer is not None:
        opened.vocabulary_size = vocabulary_size(opened.tokenizer)
        opened.tokenizer_hash = tokenizer_hash(opened.tokenizer)
