"""The rules that settings must obey, as far as they can be checked without opening a file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from math import lcm
from pathlib import Path
from typing import Any

from distill_rl.config.derive import has_validation, rows_per_slot, rows_unit, warmup_note
from distill_rl.config.facts import TOKENS, UNKNOWN, Facts
from distill_rl.config.layout import suites_every
from distill_rl.config.measured import acceptance_note, best_metrics, is_suite_score, is_validated, unmeasured
from distill_rl.config.schema import MIXED, Config, models
from distill_rl.config.schema.data import data_problems
from distill_rl.config.schema.slurm import slurm_problems
from distill_rl.config.walk import as_yaml, default_of, leaves, pattern_of, values
from distill_rl.errors import problem
from distill_rl.system.files import name_problem

RULES: dict[str, str] = {
    pattern_of(key): entry.metadata["rule"] for key, entry, _ in leaves(Config) if "rule" in entry.metadata
}
"""Setting (`teachers[].x` for all teachers) → its rule in the schema."""


def problems(config: Config) -> list[str]:
    """Every rule that a well-typed configuration breaks, one line each; empty if it obeys all of them.

    Opens no file and imports neither torch nor transformers. Missing values (`???`) are not reported again:
    `load_config` does.
    """
    return [
        *_single_values(config),
        *_names(config),
        *_replicas(config),
        *_teacher_lengths(config),
        *_batch(config),
        *_rings(config),
        *_losses(config),
        *_teachers(config),
        *models.routing_problems(config),
        *models.backend_problems(config),
        *models.long_row_problems(config),
        *models.adapter_problems(config),
        *models.quantization_problems(config),
        *_aligner(config),
        *_optimizer(config),
        *_checkpoints(config),
        *_evaluation(config),
        *data_problems(config),
        *slurm_problems(config.slurm),
        *_others(config),
    ]


def notes(config: Config, facts: Facts | None = None) -> list[str]:
    """Settings that are allowed but may have a surprising effect, or none, one line each; empty if there are none.

    Args:
        facts: of the files, as far as known.
    """
    lines = [*no_effect(config, facts or Facts())]
    last_step = facts.total_steps if facts else config.train.steps
    if (note := warmup_note(config.schedule, None if config.train.minutes else last_step)) is not None:
        lines.append(note)
    if config.teachers and config.loss.kd_weight == 0:
        lines.append("loss.kd_weight is 0: no teacher is started")
    if config.loss.dynamic_scale != "off" and config.loss.kd_weight > 0:
        instead = "r KD + CE is minimised; loss.kd_weight and loss.ce_weight have no effect"
        lines.append(f"loss.dynamic_scale is {config.loss.dynamic_scale}: {instead}")
    lines += acceptance_note(config, facts or Facts())
    if not config.evaluate.every and (config.data.validation.path or config.data.validation.fraction):
        lines.append("evaluate.every is 0: the validation loss is measured once, at the end of the run")
    return lines


def _single_values(config: Config) -> Iterator[str]:
    """Problems of single settings, one line each: rules beside the fields of the schema, and the validation share."""
    # Settings that are None break no rule. The share of data held out for validation must lie in [0, 1).
    for pattern, rule in RULES.items():
        for key, value in values(config, pattern):
            if value is not None and (broken := _broken(rule, value)):
                yield problem(key, broken, value if value != "" else "''")
    fraction = config.data.validation.fraction
    if not 0 <= fraction < 1:
        remedy = "0.05 holds out one document in twenty"
        yield problem("data.validation.fraction", "must be a share of the data in [0, 1)", fraction, remedy)


def _broken(rule: str, value: Any) -> str | None:
    """What the value must be, in words, if it breaks the rule; None if it obeys."""
    if rule == "not empty":
        return None if value.strip() else "must not be empty"
    if "positive" in rule and value <= 0:
        return "must be 1 or more" if isinstance(value, int) else "must be greater than 0"
    if "fraction" in rule and not 0 <= value <= 1:
        return "must lie in [0, 1]"
    return "must be 0 or more" if value < 0 else None


def _names(config: Config) -> Iterator[str]:
    """Problems of names, one line each."""
    # `run.name` and the teachers' must name one folder; the teachers' must be unique and, because actors are named after them, have
    # letters, digits, `-`, `_` and `.` only.
    name = config.run.name
    if name and (broken := name_problem(name)) is not None:
        remedy = "put the folder above it in run.dir" if "one folder" in broken else "set run.name"
        yield problem("run.name", broken, _cut(name if name.isprintable() else repr(name)), remedy)
    for teacher, count in Counter(teacher.name for teacher in config.teachers).items():
        if count > 1:
            rule = f"names must be unique; {count} teachers are called {teacher!r}"
            yield problem("teachers", rule, remedy="set teachers.0.name, teachers.1.name, ...")
    for key, value in values(config, "teachers[].name"):
        if value.strip() and not all(letter.isalnum() or letter in "-_." for letter in value):
            rule = "may contain letters, digits, '-', '_' and '.' only, because actors are named after it"
            yield problem(key, rule, _cut(repr(value)))
        elif value.strip() and (broken := name_problem(value)) is not None:
            yield problem(key, broken, _cut(value))


def _cut(text: str) -> str:
    """A text cut to 80 characters."""
    return text if len(text) <= 80 else text[:77] + "..."


def _batch(config: Config) -> Iterator[str]:
    """Problems of the global batch, which the student and every running teacher must divide evenly."""
    # Each divides it over its data-parallel ranks and micro-batches.
    # One line per role that does not divide it, with the nearest sizes that would do. Nothing if a size is not positive: `_single_values`
    # reports that.
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    splits = [("student", config.student.parallel.dp, micro)]
    splits += [(f"teacher {each.name}", each.parallel.dp, config.rows_of(each)) for each in config.running_teachers]
    if batch <= 0 or any(dp <= 0 or size <= 0 for _, dp, size in splits):
        return  # reported by _single_values
    common = lcm(*(dp * size for _, dp, size in splits))
    below, above = batch // common * common, (batch // common + 1) * common
    remedy = f"use {below} or {above}" if below else f"use {above}"
    for role, dp, size in splits:
        quotient, rest = divmod(batch, dp * size)
        if rest:
            rule = f"{batch} documents do not divide evenly over {role}'s dp {dp} x micro-batch {size} = {dp * size}"
            arithmetic = f"{batch} = {quotient} x {dp * size} + {rest}"
            yield problem("train.global_batch_size", rule, remedy=f"{arithmetic}; {remedy}")


def _teacher_lengths(config: Config) -> Iterator[str]:
    """Problems of the teachers' row lengths, one line each: one that is shorter than the student's."""
    for key, value in values(config, "teachers[].max_length"):
        if value is not None and 0 < value < config.data.max_length:
            yield problem(key, f"must be at least data.max_length={config.data.max_length}", value, "leave it out")


def _replicas(config: Config) -> Iterator[str]:
    """Problems of hybrid sharding, one line each."""
    # The student's replicas must divide its dp, since each copy of its parameters is sharded over dp / replicas ranks; teachers must leave
    # replicas at 1.
    dp, replicas = config.student.parallel.dp, config.student.parallel.replicas
    if dp > 0 and replicas > 0 and dp % replicas:
        divisors = ", ".join(str(n) for n in range(1, dp + 1) if dp % n == 0)
        rule = f"must divide student.parallel.dp = {dp}"
        yield problem("student.parallel.replicas", rule, replicas, f"use one of {divisors}")
    for key, value in values(config, "teachers[].parallel.replicas"):
        if value > 1:
            rule = "applies to the student only; the dp ranks of a teacher are replicas already"
            yield problem(key, rule, value, "leave it at 1")


def _rings(config: Config) -> Iterator[str]:
    """Problems of `prefetch.slots`, one line per running teacher whose ring is too small."""
    # A ring must hold the rows that student and teachers work on at once: `rows_unit`, or the whole batch where the loss needs it. Nothing
    # without that setting, and nothing if other rules about batch and sizes are broken.
    slots, batch = config.prefetch.slots, config.train.global_batch_size
    sizes = [config.student.parallel.dp, config.train.micro_batch_size]
    sizes += [size for t in config.teachers for size in (t.parallel.dp, config.rows_of(t))]
    if slots is None or min(slots, *sizes) <= 0 or batch % (unit := rows_unit(config)):
        return  # reported by _single_values and _batch
    least, what = unit, "one micro-batch of every rank"
    if config.wants_whole_batch:
        least, what = batch, "the whole batch, as loss.dynamic_scale or teachers[].score requires"
    for teacher in config.running_teachers:
        rows = rows_per_slot(config, teacher)
        if slots * rows < least:
            rule = f"teacher {teacher.name}'s ring must hold {what}: {least} rows of {rows} per slot"
            yield problem("prefetch.slots", rule, slots, f"set prefetch.slots={-(-least // rows)} or more")


_LOSS_RANGES = {
    "temperature": (0.01, 100, "beyond that the loss, which is multiplied by its square, is rounding of fp32"),
    "draws": (1, 32767, "beyond that their counts do not fit into 16 bits, in which they are sent"),
    "alm_tau": (
        0.01,
        1e6,
        "below that all chunks are impossible on both sides, above it what is compared is rounding of fp32",
    ),
}
"""Setting of `loss` → its smallest and largest value, and why. What is not positive has its own rule."""


def _losses(config: Config) -> Iterator[str]:
    """Problems of the losses, one line each."""
    # Both losses off, distillation without a teacher, teachers whose weights are all 0, or values at which a loss compares nothing or fp32
    # has no digits left.
    loss = config.loss
    if loss.kd_weight == 0 and loss.ce_weight == 0:
        yield problem("loss", "kd_weight + ce_weight must be greater than 0", "0 + 0", "set one of them")
    if loss.kd_weight > 0 and not config.teachers:
        remedy = "add teachers.0.model=PATH, or set loss.kd_weight=0 loss.ce_weight=1"
        yield problem("teachers", f"loss.kd_weight {loss.kd_weight:g} needs a teacher", "none", remedy)
    weights = [teacher.weight for teacher in config.teachers]
    if loss.kd_weight > 0 and weights and min(weights) >= 0 and sum(weights) == 0:
        yield problem("teachers", "at least one weight must be greater than 0", weights)
    if loss.divergence.startswith("skewed") and loss.beta == 1:
        rule = f"must be less than 1 with {loss.divergence}: at 1 it compares a distribution with itself"
        yield problem("loss.beta", rule, loss.beta, "0.1 is usual")
    for key, (lowest, highest, reason) in _LOSS_RANGES.items():
        value = getattr(loss, key)
        if value > 0 and not lowest <= value <= highest:
            yield problem(f"loss.{key}", f"must lie in [{lowest:g}, {highest:g}]: {reason}", value)


def _teachers(config: Config) -> Iterator[str]:
    """Problems of the teachers together, one line each."""
    # Different scores, a learnable projection although no teacher can use the loss xtoken, or draws for another divergence than forward_kl.
    scores = {teacher.score for teacher in config.teachers}
    if len(scores) > 1:
        yield problem("teachers", "must all have the same score", ", ".join(sorted(scores)), "set teachers.N.score")
    losses = {teacher.loss or config.loss.cross_tokenizer for teacher in config.teachers}
    if config.projection.learnable and "xtoken" not in losses:
        rule = "trains the projection of the loss xtoken; no teacher uses that loss"
        remedy = "set loss.cross_tokenizer=xtoken, or projection.learnable=false"
        yield problem("projection.learnable", rule, "true", remedy)
    if config.loss.divergence != "forward_kl":
        for teacher in config.running_teachers:
            if teacher.export == "sampled":
                rule = f"must be forward_kl, which the draws of teacher {teacher.name} (export: sampled) estimate"
                remedy = "set loss.divergence=forward_kl, or another export"
                yield problem("loss.divergence", rule, config.loss.divergence, remedy)


def _aligner(config: Config) -> Iterator[str]:
    """Problems of the aligners, one line each."""
    # A share of 1 GPU or more, and a CUDA backend without a share or without workers.
    aligner = config.aligner
    if aligner.num_gpus >= 1:
        rule = "must be less than 1: the ranks need the rest of the GPU"
        yield problem("aligner.num_gpus", rule, aligner.num_gpus, "for example 0.1")
    if aligner.dp.backend == "cuda" and aligner.num_gpus == 0:
        rule = "needs aligners with a share of a GPU"
        yield problem("aligner.dp.backend", rule, "cuda", "set aligner.num_gpus=0.1, or aligner.dp.backend=numba")
    if aligner.dp.backend == "cuda" and aligner.workers == 0:
        yield problem("aligner.workers", "must not be 0 with aligner.dp.backend=cuda", 0, "set aligner.workers=1")


def _optimizer(config: Config) -> Iterator[str]:
    """Problems of the optimizer and its schedule, one line each."""
    # The betas must be two numbers in [0, 1), and warm-up and peak together no longer than schedule.steps.
    betas = config.optimizer.betas
    if len(betas) != 2:
        yield problem("optimizer.betas", "must be two numbers", betas, "for example optimizer.betas=[0.9,0.95]")
    for i, beta in enumerate(betas[:2]):
        if not 0 <= beta < 1:
            yield problem(f"optimizer.betas.{i}", "must lie in [0, 1)", beta)
    end, warmup = config.schedule.steps, config.schedule.warmup_steps
    if end is not None and end > 0 and warmup > end:
        yield problem("schedule.warmup_steps", f"must not exceed schedule.steps ({end})", warmup)
    elif end is not None and end > 0 and warmup + config.schedule.hold_steps > end:
        rule = f"must not exceed schedule.steps ({end}) together with schedule.warmup_steps ({warmup})"
        yield problem("schedule.hold_steps", rule, config.schedule.hold_steps)


def _checkpoints(config: Config) -> Iterator[str]:
    """Problems of the checkpoints, one line each: `keep_best` without scores, and a `resume` of an unknown form."""
    # Whether a suite of the name in `best_by` exists is checked where the suites are opened.
    checkpoint = config.checkpoint
    if checkpoint.keep_best > 0:
        yield from _best(config)
    resume = checkpoint.resume
    if resume is not None and resume not in ("latest", "auto") and "step-" not in resume:
        remedy = "for example checkpoint.resume=latest"
        yield problem("checkpoint.resume", "must be null, latest, auto or a step folder (.../step-100)", resume, remedy)


def _best(config: Config) -> Iterator[str]:
    """Problems of `checkpoint.keep_best` and `best_by`, one line each."""
    # Nothing measures the metric during training, nothing is called like it, or no checkpoint is of a measured step.
    checkpoint, metric = config.checkpoint, config.checkpoint.best_by
    if is_validated(metric):
        every = config.evaluate.every
        if every <= 0:
            rule, remedy = "needs validation losses to compare", "set evaluate.every, or checkpoint.keep_best=0"
            yield problem("checkpoint.keep_best", rule, checkpoint.keep_best, remedy)
        if not has_validation(config):
            remedy = "set data.validation.path or data.validation.fraction"
            yield problem("checkpoint.keep_best", "needs validation data", checkpoint.keep_best, remedy)
        yield from unmeasured(config, Facts())
    elif is_suite_score(metric):
        every = suites_every(config)
        if not config.evaluate.suites or every <= 0:
            rule, remedy = "needs suites that run during training", "set evaluate.suites and evaluate.suites_every"
            yield problem("checkpoint.best_by", rule, metric, remedy)
    else:
        possible = ", ".join(best_metrics(config, config.evaluate.suites)) or "nothing is measured during training"
        yield problem("checkpoint.best_by", f"must be a metric that this run measures ({possible})", metric)
        return
    steps = config.train.steps
    if every <= 0 or checkpoint.every <= 0 or steps is None:
        return
    # A run that ends before either is due, such as a trial of a recipe, has nothing to compare and is no mistake.
    if max(every, checkpoint.every) <= steps < lcm(every, checkpoint.every):
        multiple = f"a multiple of checkpoint.every {checkpoint.every} and of {every}, where {metric} is measured"
        rule = f"no step up to {steps} is {multiple}"
        yield problem("checkpoint.keep_best", rule, checkpoint.keep_best, f"set checkpoint.every={every}")


def _evaluation(config: Config) -> Iterator[str]:
    """Problems of the evaluation, one line each."""
    # Suites without data, nothing to measure at the start, and teachers that cannot be evaluated.
    evaluate = config.evaluate
    if evaluate.suites and not evaluate.data:
        yield problem("evaluate.data", "must name the data of evaluate.suites", "null", "give a file or a folder")
    if evaluate.at_start and not (evaluate.suites or has_validation(config)):
        remedy = "set evaluate.suites, or data.validation.path or data.validation.fraction"
        yield problem("evaluate.at_start", "needs validation data or suites to measure", "true", remedy)
    if evaluate.teachers and evaluate.suites:
        if not config.running_teachers:
            yield problem("evaluate.teachers", "needs teachers, and loss.kd_weight above 0", "true", "leave it out")
        for key, tokenizer in values(config, "teachers[].tokenizer"):
            if tokenizer is not None:
                rule = f"evaluates a teacher with the tokenizer of its own folder; {key} is another"
                yield problem("evaluate.teachers", rule, tokenizer, "leave one of them out")


def _others(config: Config) -> Iterator[str]:
    """Problems that belong to no group, one line each."""
    # No length of the run, liger with tensor parallelism, transport `local`.
    train = config.train
    if train.steps is None and train.epochs is None and train.minutes is None:
        remedy = "set train.steps, train.epochs or train.minutes"
        yield problem("train.steps", "the length of the run must be given", None, remedy)
    student = config.student
    if student.kernels == "liger" and student.parallel.tp > 1:
        rule = f"liger needs whole layers on every rank; student.parallel.tp is {student.parallel.tp}"
        yield problem("student.kernels", rule, remedy="set student.kernels=torch, or student.parallel.tp=1")
    if config.transport == "local":
        rule = "local passes tensors within one process, for tests and notebooks; workers are processes"
        yield problem("transport", rule, "local", "use transport=auto")


def chunk_problems(config: Config, facts: Facts) -> Iterator[str]:
    """Yields teachers that are compared by chunks of text although the student's rows are divided, one line each.

    A chunk may lie on both sides of a border between ranks, and then no rank has its tokens.
    """
    sp = config.student.parallel.sp
    if sp == 1:
        return
    for teacher, method in zip(config.running_teachers, facts.comparisons(config)):
        if method not in (TOKENS, UNKNOWN):
            rule = f"must be 1: teacher {teacher.name} is compared by chunks of text ({method}), which may cross the border between two ranks"
            remedy = "set student.parallel.tp or activation_checkpointing instead"
            yield problem("student.parallel.sp", rule, sp, remedy)


# Settings that have no effect beside the others, of which `distill-rl check` prints a note. They are harmless, but whoever set one
# expects something of it. A setting counts as set if it differs from its default. Settings that contradict each other are refused instead.


_ALIGNMENT = ("aligner.method", "aligner.fast_ids", "aligner.dp.backend", "aligner.dp.band")
_OF_ALIGNERS = ("aligner.num_gpus", "aligner.deadline_s", "faults.aligner_restarts")
_OF_WEIGHTS = (
    "the run does not load the teacher's model: its targets are read from a store, or come from a server",
    "dtype", "attention", "revision",
)  # fmt: skip
_OF_HUB = ("data.subset", "data.revision", "data.sources[].subset", "data.sources[].revision")
_OF_THE_BEST = ("checkpoint.keep_best", "checkpoint.best_by")
_OF_OWN_RAY = ("ray.num_cpus", "ray.dashboard")
_TEACHERS = (
    "loss.divergence", "loss.beta", "loss.tail", "loss.top_k", "loss.draws", "loss.temperature", "loss.dynamic_scale",
    "loss.cross_tokenizer", "loss.chunk_average", "loss.uncommon_top_k", "loss.gold_relaxed", "loss.alm_tau",
    *_ALIGNMENT, "teachers[].where", "teachers[].weight_column", "prefetch.slots", "transport", "faults.teacher_restarts", "faults.lost_teacher",
)  # fmt: skip
_SUITES = (
    "suites_every", "data", "backend", "limit", "final_limit", "num_fewshot", "max_new_tokens", "samples", "teachers",
    "batch_size", "gpu_share", "timeout_s", "parallel.tp",
)  # fmt: skip


def _rows(config: Config, facts: Facts) -> Iterator[tuple[str, ...]]:
    """Yields a reason, and the settings that have no effect for it; the first reason counts."""
    # `teachers[].x` is one of each teacher, `teachers.1.x` of this one.
    data = config.data
    exports = {teacher.export for teacher in config.running_teachers}
    methods = frozenset(facts.comparisons(config))
    data_kind = facts.data_kind or (data.format if data.format in ("text", "messages") else "")
    data_paths = [source.path for source in data.sources] or [data.path or ""]
    validates = has_validation(config)

    def only(*names: str) -> bool:
        """Whether there are running teachers, and all of them are known to be compared in one of these ways."""
        return bool(methods) and methods <= set(names)

    def none(*names: str) -> bool:
        """Whether there are running teachers, and all are known to be compared in other ways than these."""
        return bool(methods) and not methods & {UNKNOWN, *names}

    if not config.running_teachers:
        yield "no teacher is started", *_TEACHERS
    if only("uld", "strict"):
        yield "the losses uld and strict have a divergence of their own", "loss.divergence", "loss.beta"
    if config.loss.divergence not in MIXED:
        yield f"only {', '.join(MIXED[:-1])} and {MIXED[-1]} have a mixture weight", "loss.beta"
    if none("hybrid", "xtoken") and ("topk" not in exports or none(TOKENS)):
        yield (
            "it applies where a top k is compared: token by token with export topk, and in the losses hybrid and xtoken",
            "loss.tail",
        )
    if "topk" not in exports and none("hybrid", "xtoken"):
        yield "no teacher exports a top k, and only the losses hybrid and xtoken choose one themselves", "loss.top_k"
    if "sampled" not in exports:
        yield "no teacher draws tokens (teachers[].export: sampled)", "loss.draws"
    if none("xtoken", "gold", "hkl", "uld"):
        yield "only the losses xtoken, gold, hkl and uld combine the predictions of a chunk", "loss.chunk_average"
    if none("gold", "hkl", "uld"):
        yield "only the losses gold, hkl and uld compare columns by rank", "loss.uncommon_top_k"
    if none("gold", "hkl"):
        yield "only the losses gold and hkl have relaxed matches", "loss.gold_relaxed"
    if none("alm", "hybrid"):
        yield "only the losses alm and hybrid compare likelihoods of chunks", "loss.alm_tau"
    if only(TOKENS):
        yield "every teacher is compared token by token", "loss.cross_tokenizer", *_ALIGNMENT
    if all(teacher.loss is not None for teacher in config.running_teachers):
        yield "every teacher has a loss of its own (teachers[].loss)", "loss.cross_tokenizer"
    if none("xtoken"):
        yield "only the loss xtoken trains its projection, and no teacher is compared with it", "projection.learnable"
    if len(config.teachers) == 1:
        yield "there is one teacher only", "teachers[].weight", "teachers[].score", "faults.lost_teacher"
    if exports == {"hidden"}:
        yield "hidden states are sent in the teacher's dtype", "teachers[].wire_dtype"
    for i, teacher in enumerate(config.teachers):
        rows = [*teacher.origin.no_effect(teacher)]
        if not teacher.origin.runs_model:
            rows.append(_OF_WEIGHTS)
        yield from ((reason, *(f"teachers.{i}.{name}" for name in settings)) for reason, *settings in rows)
    if config.capture.format == "exact":
        yield "capture.format is exact", "capture.mass"
    if all(teacher.cache is None for teacher in config.teachers):
        yield "nothing is stored (teachers[].cache, or distill-rl capture)", "capture.write_every_s"
    if exports == {"sampled"}:
        yield "draws are sent as integers", "teachers[].wire_dtype"
    if _is_folder(config.student.model):
        yield "student.model is a folder, which has no revisions", "student.revision"
    if all(_is_folder(teacher.model) for teacher in config.teachers):
        yield "teachers[].model is a folder, which has no revisions", "teachers[].revision"
    if config.student.parallel.dp == config.student.parallel.replicas and config.student.parallel.sp == 1:
        yield "parameters are not sharded (dp / replicas x sp = 1)", "student.gradient_sync"
    if facts.gpus == 0 and config.ray.address is None:
        yield "no GPU is visible; on a CPU activations are in host memory anyway", "student.activation_offload"
    if only(TOKENS):
        yield "a teacher with the student's tokenizer reads the student's rows", "teachers[].max_length"
    if data_kind == "messages":
        yield "chats are read (data.format)", "data.text_key"
    if data_kind == "text":
        yield "texts are read (data.format)", "data.messages_key"
    if all(_is_file(path) for path in (*data_paths, data.validation.path) if path):
        yield "a single file has no splits", "data.split", "data.sources[].split"
    if all("*" in path or Path(path).expanduser().exists() for path in data_paths):
        yield "only data sets of the hub have subsets and revisions", *_OF_HUB
    if all(_is_file(path) and ".txt" not in Path(path.lower()).suffixes for path in data_paths):
        yield "there are no .txt files", "data.sample_by"
    if len(data.sources) == 1:
        yield "there is one source only", "data.sources[].weight"
    if data.bad_rows == "fail":
        yield "bad rows are not skipped", "data.max_bad_rows"
    if not data.concatenate:
        yield "data.concatenate is false", "data.separator", "data.characters_per_sample"
    if data.validation.path is not None:
        yield "data.validation.path gives the validation data", "data.validation.fraction"
    if not validates:
        yield "there are no validation data", "data.validation.max_documents"
    if config.schedule.kind == "constant":
        yield "schedule.kind is constant", "schedule.min_lr_ratio", "schedule.hold_steps", "schedule.steps"
    if config.aligner.workers == 0:
        yield "aligner.workers is 0, so the driver aligns", *_OF_ALIGNERS
    if config.aligner.dp.backend != "cuda":
        yield "aligners use a GPU with aligner.dp.backend=cuda only", "aligner.num_gpus"
    if config.faults.spike_window == 0:
        yield "faults.spike_window is 0, so no step counts as a spike", "faults.spike_factor"
    if not config.evaluate.suites:
        yield "no suites are set", *(f"evaluate.{name}" for name in _SUITES)
    if not validates and not (config.evaluate.suites and config.evaluate.suites_every is None):
        yield "there are no validation data, and no suites that follow it", "evaluate.every"
    if not (suites_every(config) or config.evaluate.at_start or config.evaluate.teachers):
        yield "the suites run at the end of the run only (evaluate.every, evaluate.suites_every)", "evaluate.limit"
    if config.evaluate.engine:
        yield f"{config.evaluate.engine} forms its batches itself", "evaluate.batch_size"
    if config.checkpoint.every == 0:
        yield "checkpoint.every is 0, so checkpoints are written at the end of the run only", *_OF_THE_BEST
    if config.checkpoint.keep_best == 0:
        yield "checkpoint.keep_best is 0", "checkpoint.best_by"
    if config.ray.address is not None:
        yield "they are settings of a Ray that the run starts, and ray.address joins one", *_OF_OWN_RAY


_DEFAULTS = {pattern_of(key): default_of(entry) for key, entry, _ in leaves(Config)}


def no_effect(config: Config, facts: Facts) -> Iterator[str]:
    """Yields what was set without any effect, one line per reason.

    Args:
        facts: of the files; what is not known yet has no line.
    """
    reported = set[str]()
    for reason, *settings in _rows(config, facts):
        changed = {key: text for pattern in settings for key, text in _changed(config, pattern)}
        new = [text for key, text in changed.items() if key not in reported]
        reported |= set(changed)
        if new:
            verb = "has" if len(new) == 1 else "have"
            yield f"{', '.join(new)} {verb} no effect: {reason}"


def _changed(config: Config, pattern: str) -> Iterator[tuple[str, str]]:
    """(key, `key=value`) of a setting that differs from its default; one pair per teacher for `teachers[].x`."""
    # A loss.cross_tokenizer of null is left out: it forbids other tokenizers, which is an effect.
    general = re.sub(r"^teachers\.\d+\.", "teachers[].", pattern)
    for key, value in values(config, general):
        if pattern in (general, key) and value != _DEFAULTS[general] and (key, value) != ("loss.cross_tokenizer", None):
            yield key, f"{key}={as_yaml(value)}"


def _is_folder(model: str) -> bool:
    return Path(model).expanduser().is_dir()


def _is_file(path: str) -> bool:
    return Path(path).expanduser().is_file()
