"""Checks a pair of models and a text, and settles how they are trained: all problems at once, in the words of the command."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distill_rl.config.facts import TOKENS, Facts, ModelFacts
from distill_rl.config.load import read_config
from distill_rl.config.rules.validate import problems as rules
from distill_rl.config.schema import Config
from distill_rl.demo import choose, files
from distill_rl.demo.choose import Fit, Known, Settings
from distill_rl.demo.measure import Reading
from distill_rl.errors import ConfigError, problem
from distill_rl.models.attention import installed
from distill_rl.models.files.facts import gpu_bytes, read_model_facts
from distill_rl.models.files.hub import read_config as read_model_config
from distill_rl.models.files.hub import resolve
from distill_rl.observe.log import say
from distill_rl.preflight import Checked, gather
from distill_rl.preflight.machine import compare_memory
from distill_rl.run.opened import RunFindings, with_adapters
from distill_rl.system.files import size_text
from distill_rl.system.install import install_extra
from distill_rl.transport.room import total_bytes

RESERVED = {
    "student.model": "STUDENT",
    "teachers": "TEACHER",
    "teachers.0.model": "TEACHER",
    "data.path": "TEXT",
    "run.name": "--out",
    "run.dir": "--out",
    "run.seed": "--seed",
    "train.minutes": "--minutes",
    "train.steps": "--steps",
    "loss.kd_weight": "distill-rl train",
}
"""Settings that an override may not change → what sets them."""
_NAMES = {
    "student.model": "STUDENT",
    "teachers.0.model": "TEACHER",
    "teachers.0": "TEACHER",
    "data.path": "TEXT",
    "train.minutes": "--minutes",
    "train.steps": "--steps",
    "run.seed": "--seed",
}
LARGER = 1.5
"""A student with this many times the teacher's parameters is taken for a teacher in the wrong place."""
MEASURED_LENGTH = 1024
WHOLE_MARGIN = 1.1
"""What measuring a model takes, relative to its weights."""
_NO_ROOM = (
    "take a smaller STUDENT or TEACHER or a machine with more memory, or run the teacher alone first, "
    "with `distill-rl capture`"
)


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    student: str
    teacher: str
    text: str
    minutes: float
    """Of each training; with `steps`, what measuring may take is derived from it alone."""
    seed: int
    out: Path
    clean: bool = False
    """Delete an earlier trial in `out`."""
    overrides: Sequence[str] = ()
    steps: int | None = None
    """Of each training, in place of minutes."""
    continued: bool = False
    """Go on with a trial in `out` that was stopped."""

    @property
    def length(self) -> str:
        """Of a training, in words."""
        return f"{self.minutes:g} min" if self.steps is None else f"{self.steps:,} step{'' if self.steps == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models and a text that can be tried."""

    config: Config
    """Of the training with the teacher."""
    student: Path
    teacher: Path
    """Folders with weights."""
    known: Known
    method: str
    """`same` for token by token, or the cross-tokenizer loss."""
    models: tuple[ModelFacts, ModelFacts]
    notes: tuple[str, ...]
    overrides: Sequence[str]
    """What the user chose."""

    @property
    def reading(self) -> Reading:
        """How the models read the held-out text."""
        length = min(self.known.positions or MEASURED_LENGTH, MEASURED_LENGTH)
        return Reading(length, choose.longest_measured(self.known), same=self.method == TOKENS)

    @property
    def reasons(self) -> list[str]:
        """What was chosen and why, a line each."""
        lines = choose.reasons(self.known, self.method, self.config)
        return lines + ([f"yours     {' '.join(self.overrides)}"] if self.overrides else [])


def examine(request: Request) -> Pair:
    """Opens models and text, chooses the settings, and checks the training as `distill-rl check` does.

    Fetches models that are on the hub.

    Raises:
        ConfigError: why they cannot be tried, all problems at once.
    """
    problems = [*_request_problems(request)]
    positions = _positions(request.student, request.teacher)
    first: Settings = {
        "data.max_length": min(positions or choose.SHORTEST_ROW, choose.SHORTEST_ROW),
        "loss.top_k": 1,
        "train.global_batch_size": 1,
        "train.micro_batch_size": 1,
    }
    checked = _gather(replace(request, overrides=[*filter(_is_no_batch, request.overrides)]), first, problems)
    problems += _text_problems(request, checked.facts)
    if problems:  # before weights are fetched
        raise ConfigError.many(problems)
    assert checked.config is not None
    student, teacher = (
        resolve(model.model or "", model.revision, weights=True)
        for model in (checked.config.student, checked.config.teachers[0])
    )
    models = _facts(student), _facts(teacher)
    known = _known(request, checked.facts, models, positions)
    if problems := [*_pair_problems(request, known)]:
        raise ConfigError.many(problems)
    method = checked.facts.teachers[0].cross_tokenizer_loss or TOKENS
    facts = replace(checked.facts, student=models[0], teachers=(replace(checked.facts.teachers[0], model=models[1]),))
    fit = _fit(request, known, facts)
    try:
        checked = _gather(request, _chosen(request, known, fit), [])
    except ConfigError:
        if not (known.chats and known.turns_known):
            raise
        known = replace(known, turns_known=False)
        checked = _gather(request, _chosen(request, known, fit), [])
    assert checked.config is not None
    if problems := [*_whole_problems(request, checked.config, models[0], on_gpu=known.on_gpu)]:
        raise ConfigError.many(problems)
    return Pair(checked.config, student, teacher, known, method, models, checked.notes, request.overrides)


def settings_of(request: Request, chosen: Settings) -> Settings:
    """The settings of the training with the teacher, by dotted key, without overrides."""
    return {
        "run": {"dir": os.fspath(request.out.absolute()), "name": files.WITH, "seed": request.seed},
        "student": {"model": _local(request.student)},
        "teachers": [{"model": _local(request.teacher), "dtype": chosen.get("teachers.0.dtype", "fp32")}],
        "data": {"path": _local(request.text)},
        "train": {"minutes": request.minutes} if request.steps is None else {"steps": request.steps},
        **{key: value for key, value in chosen.items() if not key.startswith("teachers.")},
    }


def _gather(request: Request, chosen: Settings, problems: Sequence[str]) -> Checked:
    """Checks a training with these settings and the user's.

    Raises:
        ConfigError: its problems, after those that are given.
    """
    checked = gather(
        settings_of(request, chosen), request.overrides, clean=True, say=lambda text: say(f"data      {text}")
    )
    lines = [*problems, *map(in_words, (*checked.problems, *checked.unreachable))]
    if checked.problems or checked.unreachable:
        raise ConfigError.many(dict.fromkeys(lines))
    return checked


def _is_no_batch(override: str) -> bool:
    """Whether an override is not about the sizes of batches, which the first look at the files does not need."""
    return not override.startswith(("train.global_batch_size", "train.micro_batch_size"))


def in_words(line: str) -> str:
    """A problem of a configuration, with the command's arguments in place of the settings that they set."""
    key, colon, rest = line.partition(": ")
    if key == "memory":
        rule = rest.rpartition("; ")[0] or rest
        smallest, remedy = "adapters in place of all weights", _NO_ROOM
        if installed("torchao"):
            smallest = f"{smallest}, with weights in 4 bits"
        else:
            remedy = f"make room with weights in 8 or 4 bits ({install_extra('quantization')}), {remedy}"
        return f"memory: {rule}, even with one row at a time, activations computed again and {smallest}; {remedy}"
    return f"{_NAMES.get(key, key)}{colon}{rest}"


def _request_problems(request: Request) -> Iterator[str]:
    """Yields what is wrong with the command line itself."""
    for text in request.overrides:
        if (name := RESERVED.get(text.partition("=")[0].strip())) is not None:
            yield problem(text, f"is set by {name}", remedy=f"use {name}")
    yield from _held_out_problems(request)
    yield from files.out_problems(request.out, clean=request.clean, resume=request.continued)
    if _local(request.student) == _local(request.teacher):
        rule = "must be two models: a model has nothing to learn from itself"
        yield problem("STUDENT and TEACHER", rule, request.student, "give the model to train first, then its teacher")


def _held_out_problems(request: Request) -> Iterator[str]:
    """Yields a problem if the user's settings hold nothing out."""
    key, ours = "data.validation.fraction", choose.HELD_OUT_SHARE
    config, invalid = read_config(settings_of(request, {key: ours}), request.overrides)
    if config is None or key in invalid.keys or config.data.validation.path:
        return
    if config.data.validation.fraction <= 0:
        rule = "must be greater than 0: models are compared on text that is held out"
        yield problem(key, rule, config.data.validation.fraction, "leave it out")


def _pair_problems(request: Request, known: Known) -> Iterator[str]:
    """Yields what is wrong with the models beside each other."""
    sizes = known.student_parameters, known.teacher_parameters
    if sizes[0] > LARGER * sizes[1]:
        rule = f"has {count(sizes[0])} parameters, more than TEACHER with {count(sizes[1])}"
        remedy = (
            "give the smaller model first: "
            f"distill-rl try {request.teacher} {request.student} {request.text}; a larger student needs `distill-rl train`"
        )
        yield problem("STUDENT", rule, request.student, remedy)


def _text_problems(request: Request, facts: Facts) -> Iterator[str]:
    """Yields what is wrong with the size of the text."""
    if facts.num_documents is not None and facts.num_documents < choose.FEWEST_DOCUMENTS:
        rule = f"must have at least {choose.FEWEST_DOCUMENTS} documents, of which some are held out"
        remedy = "give more text; of a .txt file every line is a document"
        yield problem("TEXT", rule, f"{facts.num_documents} in {request.text}", remedy)


def _whole_problems(request: Request, config: Config, student: ModelFacts, *, on_gpu: bool) -> Iterator[str]:
    """Yields a problem if the student can be trained with quantised weights, but its whole weights cannot be measured."""
    if config.student.quantization is None:
        return
    needed, room = (
        (student.bytes_on_disk, max(gpu_bytes(), default=0)) if on_gpu else (4 * student.parameters, total_bytes())
    )
    if room and WHOLE_MARGIN * needed > room:
        rule = (
            f"is measured with its whole weights, which need about {size_text(round(WHOLE_MARGIN * needed))} of memory"
        )
        yield problem(
            "STUDENT", rule, f"{request.student} and {size_text(room)}", "take a smaller STUDENT, or more memory"
        )


def _known(request: Request, facts: Facts, models: tuple[ModelFacts, ModelFacts], positions: int | None) -> Known:
    sample = facts.sources[0].sample if facts.sources else None
    sizes = [facts.vocabulary_size, *(teacher.vocabulary_size for teacher in facts.teachers)]
    return Known(
        gpus=facts.gpus,
        cores=facts.cpus,
        student_parameters=models[0].parameters,
        teacher_parameters=models[1].parameters,
        positions=positions,
        vocabulary=min(size for size in sizes if size is not None),
        documents=facts.num_documents or choose.FEWEST_DOCUMENTS,
        tokens_per_document=100.0 if sample is None else sample.tokens_per_document,
        chats=facts.data_kind == "messages",
        turns_known=True,
        minutes=request.minutes,
        steps=request.steps,
        quantizes=installed("torchao"),
    )


def _fit(request: Request, known: Known, facts: Facts) -> Fit:
    """The fastest way to train that leaves some of the memory; the smallest if none does, which the checks then refuse.

    Ways that do not go with the user's settings, such as rows that do not divide the user's batch, are passed over.
    """
    documents = choose.documents_per_step(known, choose.row_length(known))
    host, gpus = total_bytes(), gpu_bytes() if known.on_gpu else ()
    smallest = Fit(1)
    for fit in choose.fits(known, documents):
        config, _ = read_config(settings_of(request, choose.choose(known, fit)), request.overrides)
        if config is None:
            break
        if rules(config):
            continue
        smallest = fit
        findings, here = RunFindings(), facts
        if facts.student is not None:
            here = replace(facts, student=with_adapters(config, facts.student))
        compare_memory(config, here, findings, host=host, gpus=gpus)
        if not any(line.startswith("memory") for line in (*findings.problems, *findings.notes)):
            break
    return smallest


def _chosen(request: Request, known: Known, fit: Fit) -> Settings:
    """The settings for a way to train, with the rate that suits what is trained with the user's settings."""
    config, _ = read_config(settings_of(request, choose.choose(known, fit)), request.overrides)
    adapters = None if config is None else config.student.lora is not None
    return choose.choose(known, fit, adapters=adapters)


def _facts(folder: Path) -> ModelFacts:
    return read_model_facts(folder, read_model_config(folder))


def _positions(*models: str) -> int | None:
    """The shortest of the models' longest inputs; None if none is known. What cannot be read is reported later."""
    lengths = []
    for model in models:
        try:
            lengths.append(getattr(read_model_config(model), "max_position_embeddings", None))
        except ConfigError:
            continue
    return min((length for length in lengths if length), default=None)


def _local(name: str) -> str:
    """An absolute path for what is on this machine, a file, folder or glob; a name on the hub as it is."""
    path = Path(name).expanduser()
    return os.fspath(path.absolute()) if path.exists() or glob.has_magic(name) else name


def count(number: int) -> str:
    """A number of parameters in words."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
