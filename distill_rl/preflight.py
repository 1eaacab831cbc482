"""Everything that can be known before a worker starts, by opening files: models, tokenizers, data, the run directory.

All problems are collected; nothing here loads a model's weights or starts Ray.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill_rl.config.derive import Facts, ModelFacts, running_teachers, total_steps
from distill_rl.config.schema import Config, StudentConfig, TeacherConfig
from distill_rl.config.walk import MISSING
from distill_rl.errors import ConfigError, DistillError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLED_ROWS = 64
"""Rows read from the start, and as many spread over the data."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found: problems, what could not be checked and why, and the facts. Lines are complete sentences with their key."""

    problems: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration with everything that is wrong with it; None when a file of it could not be read."""

    config: Config | None
    problems: list[str]
    unreachable: list[str]
    facts: Facts


def gather(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    clean: bool = False,
    download: bool = True,
) -> Checked:
    """Reads, validates and inspects in one go, so that a user sees every problem at once.

    A key with a wrong value is left at its default for the later checks, and what they say of it is dropped.

    Args:
        clean: the run directory may hold an earlier run.
        download: as for `inspect`.
    """
    from distill_rl import rundir
    from distill_rl.config import validate
    from distill_rl.config.load import read_config

    config, found = read_config(path, overrides)
    if config is None:
        return Checked(None, found.lines, [], Facts())
    inspected = inspect(config, download=download)
    later = [*validate.problems(config), *inspected.problems, *rundir.problems(config, clean=clean)]
    lines = found.lines + [line for line in later if line.partition(":")[0] not in found.keys]
    return Checked(config, list(dict.fromkeys(lines)), inspected.unreachable, inspected.facts)


def inspect(config: Config, *, download: bool = True) -> Preflight:
    """Opens what the configuration names. A hub name that cannot be reached is no problem but `unreachable`.

    Args:
        download: fetch a hub data set to look into it; else only its existence is checked.
    """
    problems: list[str] = []
    unreachable: list[str] = []
    student = _open_model("student", config.student, problems, unreachable)
    teachers = [
        _open_model(f"teachers.{index}", teacher, problems, unreachable)
        for index, teacher in enumerate(running_teachers(config))
    ]
    problems += _fit_problems(config, [("student", student), *((f"teachers.{i}", m) for i, m in enumerate(teachers))])
    problems += _vocabulary_problems(config, student, teachers)
    facts = _data_facts(config, student.tokenizer, problems, unreachable, download)
    facts = replace(
        facts,
        vocabulary_size=student.vocabulary_size,
        tokenizer_hash=student.tokenizer_hash,
        total_steps=total_steps(config, facts.num_documents),
        student=student.facts,
        teachers=tuple(teacher.facts for teacher in teachers),
        gpus=visible_gpus(),
    )
    problems += _gpu_problems(config, facts.gpus)
    problems += _space_problems(config, facts)
    return Preflight(problems, unreachable, facts)


@dataclass
class _Model:
    config: Any = None
    """transformers' configuration"""
    facts: ModelFacts | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    vocabulary_size: int | None = None
    tokenizer_hash: str | None = None


def _open_model(key: str, model: StudentConfig | TeacherConfig, problems: list[str], unreachable: list[str]) -> _Model:
    """As much of a model as can be opened; what cannot goes to one of the lists."""
    opened = _Model()
    folder = _folder(f"{key}.model", model.model, model.revision, problems, unreachable)
    if folder is not None:
        local = Path(model.model).expanduser().is_dir()
        _open_weights(f"{key}.model", folder, opened, problems, needed=local)
    if model.tokenizer is not None:
        folder = _folder(f"{key}.tokenizer", model.tokenizer, None, problems, unreachable)
    if folder is not None:
        _open_tokenizer(f"{key}.tokenizer", folder, opened, problems)
    return opened


def _open_weights(key: str, folder: Path, opened: _Model, problems: list[str], *, needed: bool) -> None:
    """config.json and the headers of the weights; of a hub model only the small files need be here."""
    from distill_rl.models.facts import folder_problems, read_model_facts
    from distill_rl.models.hub import read_config

    bad = folder_problems(key, folder, weights=needed)
    problems += bad
    if bad:
        return
    opened.config = _attempt(key, lambda: read_config(folder), problems)
    if opened.config is not None and not folder_problems(key, folder):
        opened.facts = _attempt(key, lambda: read_model_facts(folder, opened.config), problems)


def _folder(key: str, name: str, revision: str | None, problems: list[str], unreachable: list[str]) -> Path | None:
    from distill_rl.models.facts import locate

    if name == MISSING or not name.strip():
        return None
    location = locate(key, name, revision)
    problems += [location.problem] if location.problem else []
    unreachable += [location.unreachable] if location.unreachable else []
    return location.folder


def _open_tokenizer(key: str, folder: Path, opened: _Model, problems: list[str]) -> None:
    from distill_rl.models.hub import read_tokenizer, tokenizer_hash, vocabulary_size

    opened.tokenizer = _attempt(key, lambda: read_tokenizer(folder), problems)
    if opened.tokenizer is not None:
        opened.vocabulary_size = vocabulary_size(opened.tokenizer)
        opened.tokenizer_hash = tokenizer_hash(opened.tokenizer)


def _attempt(
    key: str, read: Callable[[], Any], problems: list[str], *, let_pass: type[Exception] | tuple[()] = ()
) -> Any:
    """What `read` returns, or None with its error as a line. Foreign files raise errors of every kind."""
    try:
        return read()
    except let_pass:
        raise
    except DistillError as error:
        problems += [line if line.startswith(key) else f"{key}: {line}" for line in error.problems]
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        problems.append(_line(key, f"cannot be read ({type(error).__name__})", reason))
    return None


def _fit_problems(config: Config, models: list[tuple[str, _Model]]) -> Iterator[str]:
    """Settings that a model is too small for."""
    from distill_rl.models.families import tensor_parallel_problems

    parallel = {"student": config.student.parallel}
    parallel |= {f"teachers.{i}": teacher.parallel for i, teacher in enumerate(config.teachers)}
    for key, model in models:
        if model.config is None:
            continue
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and config.data.max_length > positions:
            rule = f"must not exceed the {positions} positions of {_who(key, config)}"
            yield _line("data.max_length", rule, config.data.max_length, f"use {positions} or less")
        if parallel[key].tp > 0:
            for text in tensor_parallel_problems(model.config, parallel[key].tp):
                yield f"{key}.parallel.tp: {text}"
        needed, columns = model.vocabulary_size, model.config.vocab_size
        if needed is not None and columns < needed:
            rule = f"the model has fewer embedding rows ({columns}) than its tokenizer has ids ({needed})"
            yield _line(f"{key}.model", rule, None, "give the tokenizer that belongs to the model")


def _vocabulary_problems(config: Config, student: _Model, teachers: list[_Model]) -> Iterator[str]:
    size = student.vocabulary_size
    if size is not None and teachers and config.loss.top_k > size:
        rule = f"must not exceed the {size} ids of the student's tokenizer"
        yield _line("loss.top_k", rule, config.loss.top_k, f"use {size} or less")
    for index, teacher in enumerate(teachers):
        ours, theirs = student.tokenizer_hash, teacher.tokenizer_hash
        if ours and theirs and ours != theirs and config.loss.cross_tokenizer is None:
            yield _line(
                f"teachers.{index}",
                "must have the student's vocabulary; the tokenizers differ",
                f"student {ours[:12]}, {_who(f'teachers.{index}', config)} {theirs[:12]}",
                "distilling across tokenizers needs loss.cross_tokenizer, which this version does not have",
            )


def _who(key: str, config: Config) -> str:
    return key if key == "student" else f"teacher {config.teachers[int(key.rpartition('.')[2])].name}"


def _data_facts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase | None,
    problems: list[str],
    unreachable: list[str],
    download: bool,
) -> Facts:
    """Opens the data as the loader will, reads a sample of rows, and counts."""
    from distill_rl.data.sources import HubError, is_hub_name, open_source, split_validation
    from distill_rl.models.facts import find_data_set

    data = config.data
    if data.path == MISSING or not data.path.strip():
        return Facts()
    if not download and is_hub_name(data.path):
        problem, reason = find_data_set("data.path", data.path)
        problems += [problem] if problem else []
        unreachable += [reason] if reason else []
        return Facts()
    try:
        source = _attempt("data.path", lambda: open_source(data), problems, let_pass=HubError)
        if source is None:
            return Facts()
        parts = _attempt(
            "data.validation", lambda: split_validation(source, data, config.run.seed), problems, let_pass=HubError
        )
    except HubError as error:
        unreachable.append(str(error))
        return Facts()
    training, validation = parts or (source, None)
    problems += _row_problems(training)
    problems += _row_problems(validation) if validation is not None else []
    if len(training) < config.train.global_batch_size:
        problems.append(_line(
            "data.path",
            f"{len(training)} training documents are fewer than one global batch of {config.train.global_batch_size}",
            data.path,
            "lower train.global_batch_size, or give more data",
        ))  # fmt: skip
    if source.kind == "text" and data.loss_on == "assistant":
        problems.append(_line(
            "data.loss_on", "assistant turns are found in chat messages only", "rows of text",
            "use data.loss_on=all, or data that has messages",
        ))  # fmt: skip
    if source.kind == "messages" and tokenizer is not None and not tokenizer.chat_template:
        rule = "chat messages need a chat template, which the student's tokenizer has not"
        problems.append(_line("data.format", rule, source.kind, "set student.tokenizer to one that has a template"))
    return Facts(
        num_documents=len(training),
        num_validation_documents=len(validation) if validation is not None else None,
        data_fingerprint=source.fingerprint,
    )


def _row_problems(source: Any) -> list[str]:
    """The first bad row among the first and among evenly spaced ones; the loader checks every row it reads."""
    count = len(source)
    stride = max(1, count // SAMPLED_ROWS)
    rows = sorted({*range(min(count, SAMPLED_ROWS)), *range(0, count, stride)})
    problems: list[str] = []
    for row in rows:
        _attempt("data.path", lambda row=row: source[row], problems)  # type: ignore[misc]
        if problems:
            break
    return problems


def visible_gpus() -> int:
    """GPUs that this process may use; 0 without asking torch where the machine has no NVIDIA device."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    import torch

    return torch.cuda.device_count()


def _gpu_problems(config: Config, gpus: int) -> Iterator[str]:
    """Workers of all roles share GPUs rank by rank: the largest group says how many are needed."""
    if not gpus or config.ray.address is not None:
        return  # on CPUs any number of processes may share the cores; a cluster answers at placement
    groups = [("student", config.student.parallel)]
    groups += [(f"teachers.{i}", teacher.parallel) for i, teacher in enumerate(running_teachers(config))]
    for key, parallel in groups:
        if parallel.dp * parallel.tp > gpus:
            rule = (
                f"dp {parallel.dp} x tp {parallel.tp} = {parallel.dp * parallel.tp} GPUs are asked, {gpus} are visible"
            )
            yield _line(f"{key}.parallel", rule, None, "lower dp or tp, or join a cluster with ray.address")


def _space_problems(config: Config, facts: Facts) -> Iterator[str]:
    """Room for the checkpoints that are kept, one being written, and the export."""
    if facts.student is None:
        return
    run = Path(config.run.dir).expanduser().absolute()
    existing = next((folder for folder in (run, *run.parents) if folder.is_dir()), None)
    if existing is None:
        return
    count = config.checkpoint.keep_last + config.checkpoint.keep_best + 1 if config.checkpoint.every else 2
    needed = count * 12 * facts.student.parameters + facts.student.bytes_on_disk
    usage = shutil.disk_usage(existing)
    if (
        usage.total and needed > usage.free
    ):  # a pseudo file system has no size; that it cannot be written is said elsewhere
        rule = f"{count} checkpoints and the export need about {_size(needed)}, and {_size(usage.free)} are free"
        yield _line("run.dir", rule, config.run.dir, "free some space, lower checkpoint.keep_last, or change run.dir")


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _line(key: str, rule: str, value: object = None, remedy: str = "") -> str:
    return str(ConfigError(key, rule, value, remedy))
