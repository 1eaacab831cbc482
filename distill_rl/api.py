"""Runs from Python: `distill`, `capture` and `check` do what `distill-rl train`, `capture` and `check` do.

They return results instead of printing them, and raise instead of giving exit codes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.config.save import escaped
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError, DistillError
from distill_rl.observe.log import console, say, say_of_data
from distill_rl.system.fork_server import ForkServer
from distill_rl.system.signals import EXIT_PREEMPTED, Preempted, Signals
from distill_rl.types import RunPaths

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Source = str | PathLike[str] | Mapping[str, Any] | Config
"""A configuration: the path of a YAML file; settings, nested or by dotted key; or a `Config`."""

_SHORT = {"student": "model", "teachers": "model", "data": "path"}
"""Section → the setting that a text in place of the section gives."""
_IN_PYTHON = {"--resume auto": 'resume="auto"', "--resume": "resume=True", "--clean": "clean=True"}
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Distilled:
    """A finished run."""

    run_dir: Path
    export: Path
    """Folder of the student, with its tokenizer and model card, for `from_pretrained`."""
    metrics: Mapping[str, float | None]
    """The last value of every metric, by name. None: it was not finite."""

    @property
    def report(self) -> Path:
        """The page with the run's curves."""
        return self.run_dir / "report.html"

    def student(self, **keywords: Any) -> PreTrainedModel:
        """Loads the student; keywords are those of `from_pretrained`."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.export, **keywords)

    def tokenizer(self, **keywords: Any) -> PreTrainedTokenizerBase:
        """Loads the student's tokenizer; keywords are those of `from_pretrained`."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.export, **keywords)


@dataclass(frozen=True, slots=True)
class Check:
    """What is known about a run before it starts."""

    config: Config | None
    """With all defaults; None if the file could not be read."""
    problems: tuple[str, ...]
    """Why it could not start, a line each; empty if it could."""
    unreachable: tuple[str, ...]
    """What could not be checked, and why."""
    summary: tuple[str, ...]
    """Derived sizes, estimated memory and notes, a line each; with problems only notes."""

    def __bool__(self) -> bool:
        """Whether a run could start."""
        return not self.problems

    def __str__(self) -> str:
        unreachable = (f"not checked: {line}" for line in self.unreachable)
        return "\n".join([*self.summary, *unreachable, *(f"error: {line}" for line in self.problems)])


def distill(
    config: Source | None = None, /, *, resume: bool | str = False, clean: bool = False, **settings: Any
) -> Distilled:
    """Trains a student to its end, exports it, and returns where it is.

    `distill("my.yaml", train={"steps": 100})`, `distill(student="s", teachers=["t"], data="rows.jsonl", train={…})`. The
    run directory, its contents and the progress lines on stdout are those of `distill-rl train`. Ray is started for the
    run and ended with it. One run at a time per process.

    Ctrl-C raises KeyboardInterrupt after the workers have been ended. SIGTERM, SIGUSR1 and SIGHUP end the run after the current
    step, with a checkpoint. The handlers from before are then back. In another thread than the main one, no signal is
    handled, and the run cannot be interrupted.

    Args:
        config: None: the settings are all there is.
        resume: continue the run in the run directory, from its newest checkpoint; `"auto"`: if it has one. Any other
            text is the path of a step folder.
        clean: delete the contents of the run directory first.
        settings: sections by name, and settings by dotted key (`**{"optimizer.lr": 1e-4}`); they come after `config`. A
            text in place of a section is the model of the student or of a teacher, or the path of the data.

    Raises:
        ConfigError: bad input, with all problems at once (`problems`); nothing was started.
        DistillError: the error that ended the run.
        KeyboardInterrupt: Ctrl-C.
        Preempted: SIGTERM, SIGUSR1 or SIGHUP ended the run; `resume="auto"` continues it.
    """
    from distill_rl.observe.sinks import read_records
    from distill_rl.preflight import gather
    from distill_rl.run import run
    from distill_rl.run.run_directory import paths_of

    if resume:
        settings["checkpoint.resume"] = "latest" if resume is True else resume
    with _alone("distill"):
        try:
            found = gather(_source(config), (), _expanded(settings), clean=clean, say=say_of_data)
            found = replace(found, problems=[_in_python(line) for line in found.problems])
            opened = found.require_run()
            found.say_notes(say)
            paths = RunPaths(paths_of(opened.config).root.absolute())
            code = run.train(opened, found.facts, Signals(embedded=True), clean=clean)
        except DistillError as error:
            error.remedy = _in_python(error.remedy)
            raise
    _require_end(code, f"the run in {paths.root}", 'continue it with resume="auto"')
    metrics: dict[str, float | None] = {}
    for record in read_records(paths.metrics):
        metrics |= {name: value for name, value in record.items() if name not in ("step", "time")}
    return Distilled(paths.root, paths.export, metrics)


def capture(config: Source | None = None, /, *, out: str | PathLike[str], **settings: Any) -> Path:
    """Stores the teachers' targets of a run's documents, as `distill-rl capture` does, and returns the store's folder.

    Students are then trained with `teachers=[{"backend": "store", "store": out}]`. What the store has already is not
    computed again.

    Args:
        config, settings: as for `distill`; a student is not needed.
        out: folder of the store, or of one store per teacher.

    Raises:
        ConfigError, DistillError, KeyboardInterrupt, Preempted: as for `distill`; after the last two the same call
            continues.
    """
    from distill_rl.commands.train import gather_capture
    from distill_rl.run import run

    folder = Path(out).expanduser().absolute()
    with _alone("capture"):
        found = gather_capture(_source(config), folder, settings=_expanded(settings))
        opened = found.require_run()
        found.say_notes(say)
        code = run.capture(opened, found.facts, Signals(embedded=True), folder)
    _require_end(code, f"the capture into {folder}", "the same call continues it")
    return folder


def check(config: Source | None = None, /, **settings: Any) -> Check:
    """Checks a run and derives its sizes; starts nothing and downloads no weights or data.

    Args:
        config, settings: as for `distill`.
    """
    from distill_rl.commands.check import summary
    from distill_rl.preflight import gather

    found = gather(_source(config), (), _expanded(settings), clean=None, download=False)
    lines = [] if found.config is None or found.problems else summary(found.config, found.facts)
    lines += [f"note       {note}" for note in found.notes]
    return Check(found.config, tuple(found.problems), tuple(found.unreachable), tuple(lines))


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Lets one call of this module run at a time, with the package's messages on stderr."""
    if not _one_at_a_time.acquire(blocking=False):
        raise ConfigError(name, "runs once at a time in a process", None, "wait for the other call")
    try:
        with console(), ForkServer():
            yield
    finally:
        _one_at_a_time.release()


def _require_end(code: int, what: str, way_on: str) -> None:
    """Raises Preempted or DistillError if a run did not end with exit code 0."""
    if code == EXIT_PREEMPTED:
        raise Preempted(f"{what} was asked to stop, and did; {way_on}")
    if code:
        raise DistillError(what, "must end with code 0", code)


def _source(config: Source | None) -> str | Path | Mapping[str, Any]:
    """The configuration as `gather` takes it."""
    if config is None:
        return {}
    if isinstance(config, Config):
        return escaped(asdict(config))
    if isinstance(config, Mapping):
        return _expanded(config)
    if isinstance(config, str | PathLike):
        return fspath(config)
    rule = "must be the path of a YAML file, a mapping, or a Config"
    raise ConfigError("the configuration", rule, type(config).__name__, "or give the settings as keywords")


def _expanded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with whole sections where a text stands for one, and a list of the teachers."""
    expanded = dict(settings)
    for section, key in _SHORT.items():
        value = expanded.get(section)
        if section != "teachers":
            expanded |= {section: {key: value}} if isinstance(value, str | PathLike) else {}
        elif value is not None:
            entries = value if isinstance(value, list | tuple) else [value]
            expanded[section] = [{key: entry} if isinstance(entry, str | PathLike) else entry for entry in entries]
    return expanded


def _in_python(text: str) -> str:
    """A message with this module's arguments in place of the options of the command line."""
    for option, argument in _IN_PYTHON.items():
        text = text.replace(option, argument)
    return text
