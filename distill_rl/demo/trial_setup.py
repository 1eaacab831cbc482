"""The set-up of a trial: its folder, the settings that suit a pair of models, a text and a machine, and the checks of all three."""

from __future__ import annotations

import glob
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from distill_rl.config.facts import GPU_WIDTH_MULTIPLE, TOKENS, Facts, ModelFacts
from distill_rl.config.load import read_config
from distill_rl.config.rules import problems as rules
from distill_rl.config.save import escaped
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.demo.measure import Reading
from distill_rl.errors import ConfigError, problem
from distill_rl.models.attention import installed
from distill_rl.models.files import gpu_bytes, read_model_facts, resolve
from distill_rl.models.files import read_config as read_model_config
from distill_rl.observe.log import printable, say_of_data
from distill_rl.preflight import Checked, gather
from distill_rl.preflight.machine import compare_memory
from distill_rl.run.opened import RunFindings, with_adapters
from distill_rl.system.environment import install_extra
from distill_rl.system.files import OWNER, claim, size_text, write_atomic
from distill_rl.system.memory import total_bytes
from distill_rl.system.redact import redact
from distill_rl.types import RunPaths

# The folder of a trial: two run directories, the configuration, the result and the report.

WITH, WITHOUT = "with-teacher", "without-teacher"
"""Names of the two run directories."""
CONFIGURATION, RESULT, REPORT = "try.yaml", "result.json", "report.html"
_NAME = re.compile(r"[^\w.-]+")


class TrialPaths:
    """The paths in the folder of a trial."""

    def __init__(self, root: Path):
        self.root = root
        self.configuration, self.result, self.report = root / CONFIGURATION, root / RESULT, root / REPORT
        self.taught, self.control = RunPaths(root / WITH), RunPaths(root / WITHOUT)


def default_out(student: str, teacher: str) -> Path:
    """The folder of a trial that is given none."""
    names = (_NAME.sub("-", Path(name).name) or "model" for name in (student, teacher))
    return Path("runs") / f"try-{'-'.join(names)}"


def out_problems(root: Path, *, clean: bool, resume: bool = False) -> Iterator[str]:
    """Yields at most one problem: the folder of a new trial is a file or holds something.

    Args:
        clean: whether an earlier trial in it will be deleted.
        resume: whether a trial in it that was stopped will be gone on with.
    """
    if os.path.lexists(root) and not root.is_dir():
        found = "a file" if root.exists() else "a link to nothing"
        yield problem(f"{root}", "the folder of a trial must be a folder", found, "choose another --out")
    elif root.is_dir() and _entries(root):
        is_trial = (root / CONFIGURATION).is_file()
        stopped = is_trial and not (root / RESULT).exists()
        if resume and stopped:
            return
        if clean and not is_trial:
            rule = f"holds files and no earlier trial (no {CONFIGURATION})"
            yield problem(f"{root}", rule, remedy="choose another --out")
        elif not clean:
            remedy = "choose another --out"
            if is_trial:
                remedy = f"{'go on with --resume, ' if stopped else ''}start over with --clean, or {remedy}"
            yield problem(f"{root}", "the folder is in use", remedy=remedy)


@contextmanager
def claimed(root: Path, *, clean: bool, resume: bool = False) -> Iterator[None]:
    """Keeps the folder of a trial from other trials until the block ends; it is made if needed.

    The lock is removed at the end, and so is what was made, if nothing came into it. A folder that has problems
    (`out_problems`) is left alone: it will be refused with all others.

    Raises:
        ConfigError: another trial uses the folder, or it cannot be made or written.
    """
    if any(out_problems(root, clean=clean, resume=resume)):
        yield
        return
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = claim(root)
    except OSError as error:
        rule = "the folder of a trial must be one that can be made and written"
        raise ConfigError(f"{root}", rule, error.strerror, "choose another --out") from None
    if lock is None:
        remedy = "wait for it, or choose another --out"
        raise ConfigError(f"{root}", "the folder is in use", "another `distill-rl try`", remedy)
    try:
        yield
    finally:
        with suppress(OSError):
            (root / OWNER).unlink()
            for folder in new:
                folder.rmdir()
        os.close(lock)


def begin(paths: TrialPaths, *, clean: bool) -> None:
    """Empties the folder of a trial, which is `claimed`.

    Raises:
        ConfigError: something has come into it that may not be deleted.
    """
    ConfigError.raise_all(out_problems(paths.root, clean=clean))
    for entry in _entries(paths.root):
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _entries(root: Path) -> list[Path]:
    return [entry for entry in root.iterdir() if entry.name != OWNER]


def write_configuration(path: Path, config: Config, comments: Sequence[str]) -> None:
    """Writes a configuration for people: settings that differ from their defaults, below lines of comment.

    Secrets are redacted.
    """
    tree = escaped(redact(differing(asdict(config), asdict(Config()))))
    lines = [f"# {printable(comment)}".rstrip() for comment in comments]
    write_atomic(path, "\n".join(lines) + "\n\n" + OmegaConf.to_yaml(OmegaConf.create(tree)))


def differing(tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a configuration's tree that differ from its defaults, in their order; of teachers, theirs."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        default = defaults.get(key)
        if value == default:
            continue
        if key == "teachers":
            found[key] = [differing(teacher, asdict(TeacherConfig())) for teacher in value]
        elif isinstance(value, dict) and isinstance(default, dict) and default:
            found[key] = differing(value, default)
        else:
            found[key] = value
    return found


# The settings of a trial: what is chosen for a pair of models, a text and a machine, and why. Pure arithmetic.

Settings = dict[str, Any]
"""By dotted key, as of the configuration."""

LONGEST_ROW_GPU, LONGEST_ROW = 2048, 512
SHORTEST_ROW = 128
DOCUMENTS_PER_ROW = 4
"""Rows are to have room for this many documents of the mean length, so that few are longer than a row."""
TOKENS_PER_STEP_GPU, TOKENS_PER_STEP = 16_384, 2048
"""Few enough for hundreds of steps in minutes."""
MOST_DOCUMENTS = 256
MOST_EPOCHS = 20
TOP_K = 64
WARMUP_STEPS = 5
ADAPTERS_LR = 10
"""Adapters take a rate so many times as large."""
LR_OF_A_BILLION, LR_POWER, LR_RANGE = 5e-5, 0.4, (1e-5, 3e-3)
"""Rate for a billion parameters, the power of their number by which it falls, and its limits."""
CE_WEIGHT = 0.5
FEWEST_DOCUMENTS = 16
HELD_OUT_SHARE, LARGEST_SHARE = 0.1, 0.25
"""Most of the documents that may be held out, and most of them where they are few."""
FEWEST_HELD_OUT = 8
"""Documents with which two students can be compared: fewer say little about any other text."""
MEASURE_SHARE = 0.1
"""Part of the time of a training that measuring the larger model once may take."""
MEASURED_TOKENS = (2048, 50_000)
FLOPS_PER_CORE, FLOPS_PER_GPU = 2e10, 5e13
"""What a forward pass gets of a core or a GPU, cautiously."""
_BITS = {"int8": "in 8 bits", "int4": "in 4 bits", "fp8": "in 8 bits", "as_stored": "as it is stored"}


@dataclass(frozen=True, slots=True)
class Known:
    """What the choice depends on."""

    gpus: int
    cores: int
    student_parameters: int
    teacher_parameters: int
    positions: int | None
    """Longest input of both models, in tokens; None: not limited."""
    vocabulary: int
    """Ids of the smaller tokenizer."""
    documents: int
    tokens_per_document: float
    """Mean, of the student's tokenizer."""
    chats: bool
    turns_known: bool
    """Of chats: whether the assistant's turns can be told from the rest."""
    minutes: float
    """Of each training."""
    quantizes: bool = False
    """Whether the package is installed that weights of 8 and 4 bits need."""
    steps: int | None = None
    """Of each training, if it does not end after `minutes`."""

    @property
    def on_gpu(self) -> bool:
        return self.gpus > 0


ONE_ROW: Settings = {"train.micro_batch_size": 1, "student.activation_checkpointing": True}
APART: Settings = {"ray.placement": "disaggregated"}
"""Teacher and student on GPUs of their own."""
EIGHT_BITS: Settings = {"teachers.0.quantization": "int8"}
ADAPTERS: Settings = {"student.lora": {}}
"""Are trained in place of all weights."""
FOUR_BITS: Settings = {"teachers.0.quantization": "int4", "student.quantization": "int4"}
"""The teacher's weights, and those of the student beside its adapters."""
SMALLEST = (ONE_ROW | EIGHT_BITS, ONE_ROW | ADAPTERS, ONE_ROW | EIGHT_BITS | ADAPTERS, ONE_ROW | ADAPTERS | FOUR_BITS)
"""What changes the result, too, and comes after everything else."""


def fits(known: Known, documents: int) -> Iterator[Settings]:
    """Yields settings to make a training smaller, the fastest first, for a number of documents per step.

    CPUs gain nothing from more than four rows at a time.
    """
    for rows in (8, 4, 2, 1):
        if rows <= min(documents, 8 if known.on_gpu else 4):
            yield {"train.micro_batch_size": rows}
    yield ONE_ROW
    if known.gpus > 1:
        yield ONE_ROW | APART
    for fit in SMALLEST:
        if known.quantizes or "teachers.0.quantization" not in fit:
            yield fit


def row_length(known: Known) -> int:
    """`data.max_length`: room for several documents of the text, within what both models can read."""
    wanted = 2 ** math.ceil(math.log2(max(DOCUMENTS_PER_ROW * known.tokens_per_document, 1.0)))
    length = min(max(wanted, SHORTEST_ROW), LONGEST_ROW_GPU if known.on_gpu else LONGEST_ROW)
    if known.positions is None:
        return length
    # Rows on a GPU are padded to a multiple, and the padded width counts.
    limit = known.positions // GPU_WIDTH_MULTIPLE * GPU_WIDTH_MULTIPLE if known.on_gpu else known.positions
    return min(length, limit or known.positions)


def documents_per_step(known: Known, length: int) -> int:
    """`train.global_batch_size`: a power of two, at most a quarter of the text."""
    tokens = TOKENS_PER_STEP_GPU if known.on_gpu else TOKENS_PER_STEP
    each = min(known.tokens_per_document, length) if known.chats else known.tokens_per_document
    most = min(tokens / max(each, 1.0), MOST_DOCUMENTS, known.documents / 4)
    return 2 ** math.floor(math.log2(max(most, 1)))


def learning_rate(parameters: int, *, adapters: bool = False) -> float:
    """`optimizer.lr`, with one digit; smaller models take larger rates, and so do adapters."""
    low, high = LR_RANGE
    rate = LR_OF_A_BILLION * (1e9 / max(parameters, 1)) ** LR_POWER * (ADAPTERS_LR if adapters else 1)
    return float(f"{min(max(rate, low), high):.0e}")


def held_out(known: Known) -> int:
    """Number of documents that are held out: as many as the larger model can read in a tenth of `minutes`.

    At most a tenth of the text; but at least FEWEST_HELD_OUT, or a quarter of a text that is shorter than four times that.
    """
    count = min(_readable_tokens(known) / max(known.tokens_per_document, 1.0), HELD_OUT_SHARE * known.documents)
    fewest = min(FEWEST_HELD_OUT, math.floor(LARGEST_SHARE * known.documents))
    return max(round(count), fewest, 1)


def longest_measured(known: Known) -> int | None:
    """Most tokens of a held-out text that are measured, so that long texts take no longer; None: all. Chats are not cut."""
    count, tokens = held_out(known), _readable_tokens(known)
    if known.chats or round(tokens / max(known.tokens_per_document, 1.0)) >= count:
        return None
    return math.floor(tokens / count)


def _readable_tokens(known: Known) -> float:
    """Tokens that the larger model can read in a tenth of `minutes`, within MEASURED_TOKENS."""
    flops = known.gpus * FLOPS_PER_GPU if known.on_gpu else known.cores * FLOPS_PER_CORE
    largest = max(known.student_parameters, known.teacher_parameters, 1)
    low, high = MEASURED_TOKENS
    return min(max(MEASURE_SHARE * 60 * known.minutes * flops / (2 * largest), low), high)


def choose(known: Known, fit: Settings) -> Settings:
    """All settings of the training with the teacher, but for models, data, length and folder.

    Args:
        fit: one of `fits`.
    """
    length = row_length(known)
    precision = "bf16" if known.on_gpu else "fp32"
    chosen: Settings = {
        "student.dtype": precision,
        "teachers.0.dtype": precision,
        "data.max_length": length,
        "data.validation.fraction": held_out(known) / known.documents,
        "data.validation.max_documents": held_out(known),
        "loss.top_k": min(TOP_K, known.vocabulary),
        "loss.kd_weight": 1.0,
        "loss.ce_weight": CE_WEIGHT,
        "optimizer.lr": learning_rate(known.student_parameters, adapters="student.lora" in fit),
        "schedule.warmup_steps": WARMUP_STEPS,
        "train.epochs": float(MOST_EPOCHS),
        "train.global_batch_size": documents_per_step(known, length),
        "checkpoint.keep_last": 1,
    }
    if known.chats and known.turns_known:
        chosen["data.loss_on"] = "assistant"
    return chosen | fit


def reasons(known: Known, method: str, config: Config) -> list[str]:
    """What was chosen and why, a line each.

    Args:
        method: how teacher and student are compared: `same` for token by token, or the cross-tokenizer loss.
        config: of the training, with what the user chose instead.
    """
    loss, batch = config.loss, config.train.global_batch_size
    if method == "same":
        how = f"same tokenizer: token by token, the teacher's {loss.top_k} likeliest tokens and the rest as one"
    else:
        how = f"different tokenizers: {method}, over chunks of text that both can spell"
    on = "the assistant's turns" if config.data.loss_on == "assistant" else "all tokens"
    ce = f", with {loss.ce_weight:g} x cross-entropy with the text" if loss.ce_weight else ""
    device = f"{known.gpus} GPU{'s' if known.gpus > 1 else ''}" if known.on_gpu else f"CPU, {known.cores} cores"
    documents = f"documents of {known.tokens_per_document:,.0f} tokens on average"
    why = f"few, for many steps in {known.minutes:g} min" if known.steps is None else f"{known.steps:,} of them"
    return [
        f"method    {how}; on {on}{ce}",
        f"rows      of {config.data.max_length} tokens, for {documents}; {way(config)}",
        f"step      {batch} document{'s' if batch > 1 else ''}: {why}",
        f"rate      {config.optimizer.lr:g}: smaller models take larger ones; {config.schedule.warmup_steps} steps of warm-up, "
        f"then a {config.schedule.kind} to the end",
        f"device    {device}: {config.student.dtype}",
    ]


def way(config: Config) -> str:
    """How rows are trained on, with what makes the training smaller."""
    rows, teacher, student = config.train.micro_batch_size, config.teachers[0].quantization, config.student.quantization
    more = [", activations computed again"] if config.student.activation_checkpointing else []
    more += [", teacher and student on GPUs of their own"] if config.ray.placement == "disaggregated" else []
    more += [f", the teacher {_BITS[teacher]}"] if teacher else []
    more += [", low-rank adapters in place of all weights"] if config.student.has_adapters else []
    more += [f", the student's other weights {_BITS[student]}"] if student else []
    return f"{rows} row{'' if rows == 1 else 's'} at a time{''.join(more)}"


_ARGUMENTS = {
    "student.model": "STUDENT",
    "teachers.0.model": "TEACHER",
    "data.path": "TEXT",
    "run.seed": "--seed",
    "train.minutes": "--minutes",
    "train.steps": "--steps",
}
_NAMES = _ARGUMENTS | {"teachers.0": "TEACHER"}
"""Settings → the arguments by which their problems are named."""
RESERVED = _ARGUMENTS | {
    "teachers": "TEACHER",
    "run.name": "--out",
    "run.dir": "--out",
    "loss.kd_weight": "distill-rl train",
}
"""Settings that an override may not change → what sets them."""
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
class TrialRequest:
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
class TrialPair:
    """Two models and a text that can be tried."""

    config: Config
    """Of the training with the teacher."""
    student: Path
    teacher: Path
    """Folders with weights."""
    known: Known
    method: str
    """`same` for token by token, or the cross-tokenizer loss."""
    models: tuple[ModelFacts, ...]
    """Student and teacher."""
    notes: tuple[str, ...]
    overrides: Sequence[str]
    """What the user chose."""

    @property
    def reading(self) -> Reading:
        """How the models read the held-out text."""
        length = min(self.known.positions or MEASURED_LENGTH, MEASURED_LENGTH)
        return Reading(length, longest_measured(self.known), same=self.method == TOKENS)

    @property
    def reasons(self) -> list[str]:
        """What was chosen and why, a line each."""
        lines = reasons(self.known, self.method, self.config)
        return lines + ([f"yours     {' '.join(self.overrides)}"] if self.overrides else [])


def examine(request: TrialRequest) -> TrialPair:
    """Opens models and text, chooses the settings, and checks the training as `distill-rl check` does.

    Fetches models that are on the hub.

    Raises:
        ConfigError: why they cannot be tried, all problems at once.
    """
    problems = [*_request_problems(request)]
    positions = _positions(request.student, request.teacher)
    batch = ("train.global_batch_size", "train.micro_batch_size")
    first: Settings = {"data.max_length": min(positions or SHORTEST_ROW, SHORTEST_ROW), "loss.top_k": 1}
    first |= dict.fromkeys(batch, 1)
    others = [override for override in request.overrides if not override.startswith(batch)]
    checked = _gather(replace(request, overrides=others), first, problems)
    documents = checked.facts.num_documents
    if documents is not None and documents < FEWEST_DOCUMENTS:
        rule = f"must have at least {FEWEST_DOCUMENTS} documents, of which some are held out"
        remedy = "give more text; of a .txt file every line is a document"
        problems.append(problem("TEXT", rule, f"{documents} in {request.text}", remedy))
    ConfigError.raise_all(problems)  # before weights are fetched
    assert checked.config is not None
    both = checked.config.student, checked.config.teachers[0]
    student, teacher = (resolve(model.model or "", model.revision, weights=True) for model in both)
    models = tuple(read_model_facts(folder, read_model_config(folder)) for folder in (student, teacher))
    known = _known(request, checked.facts, models, positions)
    if known.student_parameters > LARGER * known.teacher_parameters:
        sizes = count(known.student_parameters), count(known.teacher_parameters)
        remedy = (
            "give the smaller model first: "
            f"distill-rl try {request.teacher} {request.student} {request.text}; a larger student needs `distill-rl train`"
        )
        rule = f"has {sizes[0]} parameters, more than TEACHER with {sizes[1]}"
        raise ConfigError("STUDENT", rule, request.student, remedy)
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
    _require_room_to_measure(request, checked.config, models[0], on_gpu=known.on_gpu)
    return TrialPair(checked.config, student, teacher, known, method, models, checked.notes, request.overrides)


def settings_of(request: TrialRequest, chosen: Settings) -> Settings:
    """The settings of the training with the teacher, by dotted key, without overrides."""
    return {
        "run": {"dir": os.fspath(request.out.absolute()), "name": WITH, "seed": request.seed},
        "student": {"model": _local(request.student)},
        "teachers": [{"model": _local(request.teacher), "dtype": chosen.get("teachers.0.dtype", "fp32")}],
        "data": {"path": _local(request.text)},
        "train": {"minutes": request.minutes} if request.steps is None else {"steps": request.steps},
        **{key: value for key, value in chosen.items() if not key.startswith("teachers.")},
    }


def _gather(request: TrialRequest, chosen: Settings, problems: Sequence[str]) -> Checked:
    """Checks a training with these settings and the user's."""
    checked = gather(settings_of(request, chosen), request.overrides, clean=True, say=say_of_data)
    if found := (*checked.problems, *checked.unreachable):
        raise ConfigError.many(dict.fromkeys([*problems, *map(in_words, found)]))
    return checked


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


def _request_problems(request: TrialRequest) -> Iterator[str]:
    """Yields what is wrong with the command line itself."""
    for text in request.overrides:
        if (name := RESERVED.get(text.partition("=")[0].strip())) is not None:
            yield problem(text, f"is set by {name}", remedy=f"use {name}")
    key = "data.validation.fraction"
    config, invalid = read_config(settings_of(request, {key: HELD_OUT_SHARE}), request.overrides)
    held = None if config is None or key in invalid.keys else config.data.validation
    if held is not None and not held.path and held.fraction <= 0:
        rule = "must be greater than 0: models are compared on text that is held out"
        yield problem(key, rule, held.fraction, "leave it out")
    yield from out_problems(request.out, clean=request.clean, resume=request.continued)
    if _local(request.student) == _local(request.teacher):
        rule = "must be two models: a model has nothing to learn from itself"
        yield problem("STUDENT and TEACHER", rule, request.student, "give the model to train first, then its teacher")


def _require_room_to_measure(request: TrialRequest, config: Config, student: ModelFacts, *, on_gpu: bool) -> None:
    """Refuses a student that can be trained with quantised weights, but whose whole weights cannot be measured."""
    if config.student.quantization is None:
        return
    bytes_of_weights = student.bytes_on_disk if on_gpu else 4 * student.parameters
    needed, room = WHOLE_MARGIN * bytes_of_weights, max(gpu_bytes(), default=0) if on_gpu else total_bytes()
    if room and needed > room:
        rule = f"is measured with its whole weights, which need about {size_text(round(needed))} of memory"
        found = f"{request.student} and {size_text(room)}"
        raise ConfigError("STUDENT", rule, found, "take a smaller STUDENT, or more memory")


def _known(request: TrialRequest, facts: Facts, models: tuple[ModelFacts, ...], positions: int | None) -> Known:
    sample = facts.sources[0].sample if facts.sources else None
    sizes = [facts.vocabulary_size, *(teacher.vocabulary_size for teacher in facts.teachers)]
    return Known(
        gpus=facts.gpus,
        cores=facts.cpus,
        student_parameters=models[0].parameters,
        teacher_parameters=models[1].parameters,
        positions=positions,
        vocabulary=min(size for size in sizes if size is not None),
        documents=facts.num_documents or FEWEST_DOCUMENTS,
        tokens_per_document=100.0 if sample is None else sample.tokens_per_document,
        chats=facts.data_kind == "messages",
        turns_known=True,
        minutes=request.minutes,
        steps=request.steps,
        quantizes=installed("torchao"),
    )


def _fit(request: TrialRequest, known: Known, facts: Facts) -> Settings:
    """The fastest way to train that leaves some of the memory; the smallest if none does, which the checks then refuse."""
    # Ways that do not go with the user's settings, such as rows that do not divide the user's batch, are passed over.
    documents = documents_per_step(known, row_length(known))
    host, gpus = total_bytes(), gpu_bytes() if known.on_gpu else ()
    smallest: Settings = {"train.micro_batch_size": 1}
    for fit in fits(known, documents):
        config, _ = read_config(settings_of(request, choose(known, fit)), request.overrides)
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


def _chosen(request: TrialRequest, known: Known, fit: Settings) -> Settings:
    """The settings for a way to train, with the rate that suits what is trained with the user's settings."""
    chosen = choose(known, fit)
    config, _ = read_config(settings_of(request, chosen), request.overrides)
    if config is not None:
        chosen["optimizer.lr"] = learning_rate(known.student_parameters, adapters=config.student.has_adapters)
    return chosen


def _positions(*models: str) -> int | None:
    """The shortest of the models' longest inputs; None if none is known. What cannot be read is reported later."""
    lengths = []
    for model in models:
        with suppress(ConfigError):
            lengths.append(getattr(read_model_config(model), "max_position_embeddings", None))
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
