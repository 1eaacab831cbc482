"""Everything that can be known before a worker starts, by opening files: models, tokenizers, data, the run directory.

All problems are collected; nothing here loads a model's weights or starts Ray.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distill_rl.config.derive import suites_every, total_steps
from distill_rl.config.facts import Facts, running_teachers
from distill_rl.config.schema import Config
from distill_rl.errors import problems_of
from distill_rl.models.facts import visible_gpus
from distill_rl.preflight.attention import attention_problems, width_problems
from distill_rl.preflight.data import data_facts
from distill_rl.preflight.evaluation import suite_problems
from distill_rl.preflight.machine import extra_problems
from distill_rl.preflight.opened import Opened, attempt, line, open_model
from distill_rl.preflight.pairs import projection_problems, vocabulary_problems
from distill_rl.transport.choose import expected
from distill_rl.transport.room import object_store_room


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
    from distill_rl.config import validate
    from distill_rl.config.load import read_config
    from distill_rl.preflight import run_directory

    config, found = read_config(path, overrides)
    if config is None:
        return Checked(None, found.lines, [], Facts())
    inspected = inspect(config, download=download)
    later = [*validate.problems(config), *inspected.problems, *run_directory.problems(config, clean=clean)]
    lines = found.lines + [line for line in later if line.partition(":")[0] not in found.keys]
    return Checked(config, list(dict.fromkeys(lines)), inspected.unreachable, inspected.facts)


def inspect(config: Config, *, download: bool = True) -> Preflight:
    """Opens what the configuration names. A hub name that cannot be reached is no problem but `unreachable`.

    Args:
        download: fetch a hub data set to look into it; else only its existence is checked.
    """
    problems: list[str] = []
    unreachable: list[str] = []
    student = open_model("student", config.student, problems, unreachable)
    teachers = [
        open_model(f"teachers.{index}", teacher, problems, unreachable)
        for index, teacher in enumerate(running_teachers(config))
    ]
    models = [("student", student), *((f"teachers.{i}", m) for i, m in enumerate(teachers))]
    problems += _fit_problems(config, models)
    problems += vocabulary_problems(config, student, teachers)
    problems += projection_problems(config, student, teachers)
    facts = data_facts(config, student, teachers, problems, unreachable, download)
    facts = replace(
        facts,
        vocabulary_size=student.vocabulary_size,
        tokenizer_hash=student.tokenizer_hash,
        total_steps=total_steps(config, facts.num_documents),
        student=student.facts,
        teachers=tuple(teacher.facts for teacher in teachers),
        gpus=visible_gpus(),
        cpus=len(os.sched_getaffinity(0)),
        cross_tokenizer_losses=tuple(teacher.cross_tokenizer_loss for teacher in teachers),
        teacher_vocabularies=tuple(teacher.vocabulary_size for teacher in teachers),
    )
    problems += suite_problems(config, student)
    problems += extra_problems(config)
    problems += attention_problems(config, [(key, model.config) for key, model in models], gpus=facts.gpus)
    problems += _kernel_problems(config, student, facts.gpus)
    problems += _gpu_problems(config, facts.gpus)
    problems += _space_problems(config, facts)
    if config.ray.address is None:
        attempt("/dev/shm", object_store_room, problems)
    return Preflight(problems, unreachable, facts)


def _fit_problems(config: Config, models: list[tuple[str, Opened]]) -> Iterator[str]:
    """Settings that a model is too small for."""
    from distill_rl.models.families import tensor_parallel_problems

    parallel = {"student": config.student.parallel}
    parallel |= {f"teachers.{i}": teacher.parallel for i, teacher in enumerate(config.teachers)}
    for key, model in models:
        if model.config is None:
            continue
        yield from width_problems(config, key, model.config, gpus=visible_gpus())
        if parallel[key].tp > 0:
            for text in tensor_parallel_problems(model.config, parallel[key].tp):
                yield f"{key}.parallel.tp: {text}"
        needed, columns = model.vocabulary_size, model.config.vocab_size
        if needed is not None and columns < needed:
            rule = f"the model has fewer embedding rows ({columns}) than its tokenizer has ids ({needed})"
            yield line(f"{key}.model", rule, None, "give the tokenizer that belongs to the model")


def _kernel_problems(config: Config, student: Opened, gpus: int) -> Iterator[str]:
    """What `student.kernels: liger` lacks, besides the package."""
    from distill_rl.models.kernels import liger_problems

    if config.student.kernels != "liger":
        return
    remedy = "set student.kernels=torch"
    if not gpus and config.ray.address is None:
        yield line("student.kernels", "liger needs a GPU; none is visible", None, remedy)
    if student.config is not None:
        yield from (line("student.kernels", problem, None, remedy) for problem in liger_problems(student.config))


def _gpu_problems(config: Config, gpus: int) -> Iterator[str]:
    """Colocated workers share GPUs rank by rank, and the largest group says how many are needed; disaggregated ones
    need one each."""
    if config.ray.address is None and config.aligner.dp.backend == "cuda":
        yield from _dp_problems(gpus)
    if config.ray.address is None:
        yield from problems_of(lambda: expected(config.transport, gpus=gpus))
    if not gpus or config.ray.address is not None:
        return  # on CPUs any number of processes may share the cores; a cluster answers at placement
    groups = [("student", config.student.parallel)]
    groups += [(f"teachers.{i}", teacher.parallel) for i, teacher in enumerate(running_teachers(config))]
    asked = [parallel.dp * parallel.tp for _, parallel in groups]
    remedy = "lower dp or tp, or join a cluster with ray.address"
    if config.ray.placement == "disaggregated":
        if sum(asked) > gpus:
            rule = f"disaggregated asks {' + '.join(map(str, asked))} = {sum(asked)} GPUs, {gpus} are visible"
            yield line("ray.placement", rule, None, f"set ray.placement=colocated, {remedy}")
        return
    for (key, parallel), count in zip(groups, asked):
        if count > gpus:
            rule = f"dp {parallel.dp} x tp {parallel.tp} = {count} GPUs are asked, {gpus} are visible"
            yield line(f"{key}.parallel", rule, None, remedy)


def _dp_problems(gpus: int) -> Iterator[str]:
    """What the aligners' CUDA kernel lacks here; nothing in Numba's simulator, which stands in for a GPU in tests."""
    from distill_rl.align.dp.device import missing_for_cuda

    missing = missing_for_cuda()
    if missing and not gpus:
        yield line("aligner.dp.backend", "needs a GPU; none is visible", "cuda", "set aligner.dp.backend=numba")
    elif missing:
        yield line("aligner.dp.backend", missing.rule, "cuda", missing.remedy)


def _space_problems(config: Config, facts: Facts) -> Iterator[str]:
    """Room for the checkpoints that are kept, one being written, the export, and the copies that are evaluated."""
    if facts.student is None:
        return
    run = Path(config.run.dir).expanduser().absolute()
    existing = next((folder for folder in (run, *run.parents) if folder.is_dir()), None)
    if existing is None:
        return
    count = config.checkpoint.keep_last + config.checkpoint.keep_best + 1 if config.checkpoint.every else 2
    copies = 2 if config.evaluate.suites and suites_every(config) else 0  # one being evaluated, one that waits
    needed = count * 12 * facts.student.parameters + (1 + copies) * facts.student.bytes_on_disk
    usage = shutil.disk_usage(existing)
    if (
        usage.total and needed > usage.free
    ):  # a pseudo file system has no size; that it cannot be written is said elsewhere
        rule = (
            f"{count} checkpoints and {_exports(copies)} need about {_size(needed)}, and {_size(usage.free)} are free"
        )
        yield line("run.dir", rule, config.run.dir, "free some space, lower checkpoint.keep_last, or change run.dir")


def _exports(copies: int) -> str:
    return f"the export and {copies} copies to evaluate" if copies else "the export"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
