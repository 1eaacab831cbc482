"""The rules that settings must keep, as far as they can be told without opening a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import lcm
from typing import Any

from distill_rl.config.derive import rows_per_slot, rows_unit, wants_whole_batch
from distill_rl.config.facts import running_teachers, teacher_rows
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError

NOT_AVAILABLE: tuple[tuple[str, Any], ...] = (("teachers[].backend", "hf"),)
"""Settings whose organ is not built yet, with the only value that works."""

POSITIVE = (
    "student.parallel.dp",
    "student.parallel.tp",
    "student.parallel.replicas",
    "teachers[].parallel.dp",
    "teachers[].parallel.tp",
    "teachers[].parallel.replicas",
    "teachers[].micro_batch_size",
    "data.max_length",
    "data.validation.max_documents",
    "loss.top_k",
    "loss.temperature",
    "optimizer.lr",
    "optimizer.eps",
    "schedule.steps",
    "train.steps",
    "train.epochs",
    "train.global_batch_size",
    "train.micro_batch_size",
    "prefetch.slots",
    "aligner.deadline_s",
    "aligner.dp.band",
    "loss.uncommon_top_k",
    "loss.alm_tau",
    "checkpoint.keep_last",
    "evaluate.limit",
    "evaluate.batch_size",
    "evaluate.gpu_share",
    "evaluate.timeout_s",
    "faults.spike_factor",
    "faults.report_after_s",
    "faults.stopped_s",
    "observe.every",
    "ray.num_cpus",
    "ray.placement_timeout_s",
    "ray.start_timeout_s",
    "ray.step_timeout_s",
)
NOT_NEGATIVE = (
    "run.seed",
    "teachers[].weight",
    "loss.kd_weight",
    "loss.ce_weight",
    "optimizer.weight_decay",
    "schedule.warmup_steps",
    "train.max_grad_norm",
    "prefetch.depth",
    "aligner.workers",
    "aligner.num_gpus",
    "aligner.max_bad_rows",
    "checkpoint.every",
    "checkpoint.keep_best",
    "faults.teacher_restarts",
    "faults.aligner_restarts",
    "faults.skipped_steps",
    "faults.spike_window",
    "evaluate.every",
    "evaluate.suites_every",
    "observe.table_every",
)
SHARES = ("loss.beta", "schedule.min_lr_ratio", "evaluate.gpu_share")
NOT_EMPTY = (
    "run.name", "run.dir", "student.model", "teachers[].name", "teachers[].model",
    "data.path", "data.split", "data.text_key", "data.messages_key",
)  # fmt: skip


def problems(config: Config) -> list[str]:
    """Everything that is wrong with a well-typed configuration, one line each; empty when nothing is.

    Opens no file and imports neither torch nor transformers. A value that is still missing (`???`) is
    left to `load_config`, which has reported it.
    """
    return [
        *_ranges(config),
        *_names(config),
        *_length(config),
        *_replicas(config),
        *_kernels(config),
        *_batch(config),
        *_rings(config),
        *_losses(config),
        *_teachers(config),
        *_aligner(config),
        *_optimizer(config),
        *_checkpoints(config),
        *_suites(config),
        *_transport(config),
        *_not_available(config),
    ]


def notes(config: Config) -> list[str]:
    """What is allowed but may surprise, one line each."""
    lines = []
    if config.teachers and config.loss.kd_weight == 0:
        lines.append("loss.kd_weight is 0: no teacher is started")
    if config.loss.dynamic_scale != "off" and config.loss.kd_weight > 0:
        lines.append(
            f"loss.dynamic_scale is {config.loss.dynamic_scale}: r KD + CE is minimised, whatever loss.kd_weight and "
            "loss.ce_weight are"
        )
    parallel, sync = config.student.parallel, config.student.gradient_sync
    if sync != "auto" and parallel.dp == parallel.replicas:
        lines.append(
            f"student.gradient_sync: {sync} changes nothing where parameters are not sharded (dp / replicas = 1)"
        )
    if not config.evaluate.every and (config.data.validation.path or config.data.validation.fraction):
        lines.append("evaluate.every is 0: the validation loss is measured once, at the end of the run")
    return lines


def values(config: Config, pattern: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a setting; `teachers[].x` gives one pair per teacher."""
    if pattern.startswith("teachers[]."):
        for index, teacher in enumerate(config.teachers):
            yield f"teachers.{index}.{pattern[11:]}", _get(teacher, pattern[11:])
    else:
        yield pattern, _get(config, pattern)


def _get(node: Any, path: str) -> Any:
    for part in path.split("."):
        node = getattr(node, part)
    return node


def _line(key: str, rule: str, value: object = None, remedy: str = "") -> str:
    return str(ConfigError(key, rule, value, remedy))


def _every(config: Config, patterns: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for pattern in patterns:
        for key, value in values(config, pattern):
            if value is not None:
                yield key, value


def _ranges(config: Config) -> Iterator[str]:
    for key, value in _every(config, POSITIVE):
        if value <= 0:
            whole = isinstance(value, int)
            yield _line(key, "must be 1 or more" if whole else "must be greater than 0", value)
    for key, value in _every(config, NOT_NEGATIVE):
        if value < 0:
            yield _line(key, "must be 0 or more", value)
    for key, value in _every(config, SHARES):
        if not 0 <= value <= 1:
            yield _line(key, "must lie in [0, 1]", value)
    fraction = config.data.validation.fraction
    if not 0 <= fraction < 1:
        remedy = "0.05 holds out one document in twenty"
        yield _line("data.validation.fraction", "must be a share of the data in [0, 1)", fraction, remedy)
    for key, value in _every(config, NOT_EMPTY):
        if not value.strip():
            yield _line(key, "must not be empty", value or "''")


def _names(config: Config) -> Iterator[str]:
    name = config.run.name
    if "/" in name or "\\" in name or name in (".", "..") or "\0" in name:
        yield _line("run.name", "must be the name of one folder", name, "put the folder above it in run.dir")
    elif not name.isprintable():
        yield _line("run.name", "must not hold control characters", repr(name))
    for teacher, count in Counter(teacher.name for teacher in config.teachers).items():
        if count > 1:
            yield _line("teachers", f"names must be unique; {count} teachers are called {teacher!r}", None,
                        "set teachers.0.name, teachers.1.name, ...")  # fmt: skip
    for key, value in values(config, "teachers[].name"):
        if value.strip() and not all(letter.isalnum() or letter in "-_." for letter in value):
            yield _line(
                key, "may hold letters, digits, '-', '_' and '.', because actors are named after it", repr(value)
            )


def _length(config: Config) -> Iterator[str]:
    if config.train.steps is None and config.train.epochs is None:
        yield _line("train.steps", "the length of the run must be given", None, "set train.steps or train.epochs")


def _batch(config: Config) -> Iterator[str]:
    """global_batch_size must split evenly over each group's data-parallel ranks and micro-batches."""
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    splits = [("student", config.student.parallel.dp, micro)]
    if config.loss.kd_weight > 0:
        for teacher in config.teachers:
            splits.append((f"teacher {teacher.name}", teacher.parallel.dp, teacher_rows(config, teacher)))
    if batch <= 0 or any(dp <= 0 or size <= 0 for _, dp, size in splits):
        return  # each has a line of its own
    common = lcm(*(dp * size for _, dp, size in splits))
    below, above = batch // common * common, (batch // common + 1) * common
    remedy = f"use {below} or {above}" if below else f"use {above}"
    for who, dp, size in splits:
        whole, rest = divmod(batch, dp * size)
        if rest:
            rule = f"{batch} documents do not split over {who}'s dp {dp} x micro-batch {size} = {dp * size}"
            yield _line("train.global_batch_size", rule, None, f"{batch} = {whole} x {dp * size} + {rest}; {remedy}")


def _replicas(config: Config) -> Iterator[str]:
    """Hybrid sharding: replicas of the student's parameters, each sharded over dp / replicas ranks."""
    dp, replicas = config.student.parallel.dp, config.student.parallel.replicas
    if dp > 0 and replicas > 0 and dp % replicas:
        divisors = ", ".join(str(n) for n in range(1, dp + 1) if dp % n == 0)
        yield _line("student.parallel.replicas", f"must divide student.parallel.dp = {dp}", replicas,
                    f"use one of {divisors}")  # fmt: skip
    for key, value in values(config, "teachers[].parallel.replicas"):
        if value > 1:
            rule = "is for the student's parameters; the dp ranks of a teacher are replicas already"
            yield _line(key, rule, value, "leave it at 1")


def _kernels(config: Config) -> Iterator[str]:
    student = config.student
    if student.kernels == "liger" and student.parallel.tp > 1:
        rule = f"liger works on whole layers; student.parallel.tp is {student.parallel.tp}"
        yield _line("student.kernels", rule, None, "set student.kernels=torch, or student.parallel.tp=1")


def _rings(config: Config) -> Iterator[str]:
    """prefetch.slots must hold what student and teachers work on at once."""
    slots, batch, unit = config.prefetch.slots, config.train.global_batch_size, _unit(config)
    if slots is None or slots <= 0 or unit is None or batch % unit:
        return  # each has a line of its own
    least, what = unit, "one micro-batch of every rank"
    if wants_whole_batch(config):
        least, what = batch, "the whole batch, which loss.dynamic_scale or teachers[].score weighs"
    for teacher in running_teachers(config):
        rows = rows_per_slot(config, teacher)
        if slots * rows < least:
            rule = f"teacher {teacher.name}'s ring must hold {what}: {least} rows of {rows} per slot"
            yield _line("prefetch.slots", rule, slots, f"set prefetch.slots={-(-least // rows)} or more")


def _unit(config: Config) -> int | None:
    """`derive.rows_unit`, None where a size makes no sense."""
    sizes = [config.student.parallel.dp, config.train.micro_batch_size]
    sizes += [size for t in config.teachers for size in (t.parallel.dp, teacher_rows(config, t))]
    return rows_unit(config) if min(sizes) > 0 else None


def _losses(config: Config) -> Iterator[str]:
    loss = config.loss
    if loss.kd_weight == 0 and loss.ce_weight == 0:
        yield _line("loss", "kd_weight + ce_weight must be greater than 0", "0 + 0", "nothing would be learnt")
    if loss.kd_weight > 0 and not config.teachers:
        remedy = "add teachers.0.model=PATH, or set loss.kd_weight=0 loss.ce_weight=1"
        yield _line("teachers", f"loss.kd_weight {loss.kd_weight:g} needs a teacher", "none", remedy)
    weights = [teacher.weight for teacher in config.teachers]
    if loss.kd_weight > 0 and weights and min(weights) >= 0 and sum(weights) == 0:
        yield _line("teachers", "at least one weight must be greater than 0", weights)


def _teachers(config: Config) -> Iterator[str]:
    scores = {teacher.score for teacher in config.teachers}
    if len(scores) > 1:
        yield _line("teachers", "must all have the same score", ", ".join(sorted(scores)), "set teachers.N.score")
    if config.projection.learnable and "xtoken" not in _losses_named(config):
        rule = "trains the projection that loss.cross_tokenizer=xtoken compares through; no teacher uses that loss"
        yield _line(
            "projection.learnable", rule, "true", "set loss.cross_tokenizer=xtoken, or projection.learnable=false"
        )


def _losses_named(config: Config) -> set[str]:
    """The losses across tokenizers that some teacher may turn out to need."""
    return {teacher.loss or config.loss.cross_tokenizer or "" for teacher in config.teachers}


def _aligner(config: Config) -> Iterator[str]:
    aligner = config.aligner
    if aligner.num_gpus >= 1:
        rule = "must be a share below 1: the ranks need the rest of the GPU"
        yield _line("aligner.num_gpus", rule, aligner.num_gpus, "for example 0.1")
    if aligner.dp.backend == "cuda" and aligner.num_gpus == 0:
        rule = "needs aligners that hold a share of a GPU"
        yield _line("aligner.dp.backend", rule, "cuda", "set aligner.num_gpus=0.1, or aligner.dp.backend=numba")
    if aligner.dp.backend == "cuda" and aligner.workers == 0:
        yield _line("aligner.workers", "must not be 0 with aligner.dp.backend=cuda", 0, "set aligner.workers=1")


def _optimizer(config: Config) -> Iterator[str]:
    betas = config.optimizer.betas
    if len(betas) != 2:
        yield _line("optimizer.betas", "must be two numbers", betas, "for example optimizer.betas=[0.9,0.95]")
    for index, beta in enumerate(betas[:2]):
        if not 0 <= beta < 1:
            yield _line(f"optimizer.betas.{index}", "must lie in [0, 1)", beta)
    end = config.schedule.steps if config.schedule.steps is not None else config.train.steps
    warmup = config.schedule.warmup_steps
    if end is not None and end > 0 and warmup > end:
        where = "schedule.steps" if config.schedule.steps is not None else "train.steps"
        yield _line("schedule.warmup_steps", f"must not exceed {where} ({end})", warmup)


def _checkpoints(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.keep_best > 0:
        if config.evaluate.every <= 0:
            remedy = "set evaluate.every, or checkpoint.keep_best=0"
            yield _line(
                "checkpoint.keep_best", "needs a validation loss to tell the best by", checkpoint.keep_best, remedy
            )
        if not config.data.validation.path and config.data.validation.fraction == 0:
            remedy = "set data.validation.path or data.validation.fraction"
            yield _line("checkpoint.keep_best", "needs validation data", checkpoint.keep_best, remedy)
    resume = checkpoint.resume
    if resume is not None and resume not in ("latest", "auto") and "step-" not in resume:
        remedy = "for example checkpoint.resume=latest"
        yield _line("checkpoint.resume", "must be null, latest, auto or a step folder (.../step-100)", resume, remedy)


def _suites(config: Config) -> Iterator[str]:
    if config.evaluate.suites and not config.evaluate.data:
        yield _line(
            "evaluate.data", "must say where the data of evaluate.suites are", "null", "give a file or a folder"
        )


def _transport(config: Config) -> Iterator[str]:
    if config.transport == "local":
        rule = "local passes tensors within one process, for tests and notebooks; workers are processes"
        yield _line("transport", rule, "local", "use transport=auto")


def _not_available(config: Config) -> Iterator[str]:
    for pattern, only in NOT_AVAILABLE:
        for key, value in values(config, pattern):
            if value != only:
                yield _line(key, f"only {_yaml(only)} is available in this version", _yaml(value))


def _yaml(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
