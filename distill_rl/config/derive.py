"""Sizes that follow from a configuration and from the contents of its files: pure arithmetic, in bytes and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, lcm
from typing import get_args

from distill_rl.config.facts import (
    Facts,
    TeacherFacts,
    gpu_share,
    gpus_per_rank,
    ranks_per_replica,
    row_width,
    running_teachers,
    runs_model,
    teacher_length,
    teacher_rows,
    wants_whole_batch,
    wire_dtype,
)
from distill_rl.config.memory import ITEM_SIZE, WorkerMemory, target_bytes_per_token, worker_memory
from distill_rl.config.schema import Config, CrossTokenizerLoss, ScheduleConfig, TeacherConfig
from distill_rl.errors import ConfigError, problem
from distill_rl.system.redact import in_text

GIB = 2**30

EXPORTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(get_args(CrossTokenizerLoss), ("logits", "hidden")),
    **dict.fromkeys(("hybrid", "alm"), ("topk", "logits", "hidden")),
}
"""Cross-tokenizer loss → the values of `teachers[].export` that it works with."""


@dataclass(frozen=True, slots=True)
class TeacherSizes:
    name: str
    entries: int
    """Per token: loss.top_k or loss.draws, or the vocabulary if that is smaller; the vocabulary's columns; or the width of the
    hidden states."""
    bytes_per_token: int
    bytes_per_slot: int
    """Targets of one full micro-batch of the widest rows."""
    ring_bytes: int
    """All slots of one teacher rank."""
    slots: int
    """Number of slots in that ring; see `ring_plan`."""


@dataclass(frozen=True, slots=True)
class RingPlan:
    """How the targets of a batch fit into the teachers' rings.

    A batch that does not fit as a whole is processed in *sub-batches*: consecutive rows whose number the student and
    every teacher divide evenly. Their size depends on the size of the rings, never on `prefetch.depth`.
    """

    rows_per_sub_batch: int
    """Most rows of a sub-batch; a batch has as many sub-batches as its rows need."""
    slots: Mapping[str, int]
    """Slots in the ring of one rank, by teacher."""
    slots_per_sub_batch: Mapping[str, int]
    """Slots that one sub-batch takes, by teacher."""


@dataclass(frozen=True, slots=True)
class DerivedSizes:
    micro_batches: int
    """Of the student: maximum per data-parallel rank and step."""
    total_steps: int | None
    epochs: float | None
    """Passes over the data in the whole run."""
    teachers: tuple[TeacherSizes, ...]
    world: dict[str, str] = field(default_factory=dict)
    """Role → a description of its processes: `student` → `dp 2 x tp 1 = 2 processes`."""
    memory: tuple[WorkerMemory, ...] = ()
    checkpoint_bytes: int | None = None


def total_steps(config: Config, num_documents: int | None) -> int | None:
    """Optimizer steps of the run: train.steps or the steps that train.epochs takes, whichever is fewer.

    None if train.epochs is set and the number of documents is not known yet, and if neither setting is given. The
    epochs' permutations of the data are concatenated before they are cut into batches, so only the last batch of the
    run can be smaller than the others.
    """
    steps, epochs = config.train.steps, config.train.epochs
    if epochs is None:
        return steps
    if num_documents is None:
        return None
    by_epochs = ceil(max(round(epochs * num_documents), 1) / config.train.global_batch_size)
    return by_epochs if steps is None else min(steps, by_epochs)


def warmup_steps(schedule: ScheduleConfig, horizon: int) -> int:
    """Steps of the warm-up: as configured or, if that is longer than the whole schedule, a tenth of it, at least one.

    A function of the settings and the horizon alone, as the learning rate must be.

    Args:
        horizon: schedule.steps, or else the last step of the run.
    """
    return schedule.warmup_steps if schedule.warmup_steps <= horizon else max(1, horizon // 10)


def warmup_note(schedule: ScheduleConfig, last_step: int | None) -> str | None:
    """A line on a warm-up that a run is too short for; None if there is nothing to say, or the length is not known.

    Args:
        last_step: of the run.
    """
    configured = schedule.warmup_steps
    if last_step is None or configured <= last_step:
        return None
    if schedule.steps is None:
        clamped = warmup_steps(schedule, last_step)
        return (
            f"schedule.warmup_steps is {configured}, but the run ends at step {last_step}: the warm-up takes {clamped}"
        )
    return f"the run ends at step {last_step}, within the warm-up of {configured} steps: it does not reach optimizer.lr"


def rows_unit(config: Config) -> int:
    """Smallest number of rows that the student and every running teacher divide evenly over ranks and micro-batches."""
    shares = [config.student.parallel.dp * config.train.micro_batch_size]
    return lcm(*shares, *(rows_per_slot(config, teacher) for teacher in running_teachers(config)))


def ring_plan(config: Config) -> RingPlan:
    """Slots of the teachers' rings, and the sub-batches of a batch, for a configuration without problems.

    1. Size of a ring. Unless limited, it holds all micro-batches of depth + 1 batches. `prefetch.slots` limits it;
       without that setting, a teacher that exports logits is limited to two sub-batches of `rows_unit` rows, unless the
       loss needs the whole batch at once (`wants_whole_batch`).
    2. Rows of a sub-batch. Half of the smallest limited ring, so that a teacher fills one half while the student reads
       the other, rounded down to a multiple of `rows_unit`, but at least one such unit. No limit, or a loss that needs
       the whole batch: one sub-batch.
    3. Balance. The number of sub-batches of a batch with a document per row is kept and their rows are evened out, so
       that the last is not much smaller.
    """
    batch, unit, configured = config.train.global_batch_size, rows_unit(config), config.prefetch.slots
    needs_whole_batch = wants_whole_batch(config)
    rows_per_sub_batch, slots = batch, {}
    for teacher in running_teachers(config):
        rows = rows_per_slot(config, teacher)
        limit = configured
        if limit is None and teacher.export == "logits" and not needs_whole_batch:
            limit = 2 * unit // rows
        slots[teacher.name] = (config.prefetch.depth + 1) * (batch // rows)
        if limit is not None:
            slots[teacher.name] = min(slots[teacher.name], limit)
            if not needs_whole_batch:
                rows_per_sub_batch = min(rows_per_sub_batch, max(limit * rows // 2 // unit * unit, unit))
    sub_batches = ceil(batch / rows_per_sub_batch)
    rows_per_sub_batch = ceil(batch / sub_batches / unit) * unit
    per_sub_batch = {
        teacher.name: rows_per_sub_batch // rows_per_slot(config, teacher) for teacher in running_teachers(config)
    }
    return RingPlan(rows_per_sub_batch, slots, per_sub_batch)


def rows_per_slot(config: Config, teacher: TeacherConfig) -> int:
    """Rows of a batch that fill one slot in every replica of a teacher: its dp times its micro-batch size."""
    return teacher.parallel.dp * teacher_rows(config, teacher)


def sizes(config: Config, facts: Facts) -> DerivedSizes:
    """All derived sizes of a configuration without problems.

    What depends on unknown facts is None or left out (steps, epochs, checkpoint size, memory of a worker), or 0
    (entries of a teacher of unknown width or vocabulary, and the bytes that follow from them). `facts.total_steps`,
    where known, takes precedence over the settings.
    """
    batch = config.train.global_batch_size
    steps = facts.total_steps if facts.total_steps is not None else total_steps(config, facts.num_documents)
    teachers = tuple(_teacher_sizes(config, teacher, known, facts) for teacher, known in facts.by_teacher(config))
    return DerivedSizes(
        micro_batches=ceil(batch / (config.student.parallel.dp * config.train.micro_batch_size)),
        total_steps=steps,
        epochs=steps * batch / facts.num_documents if steps is not None and facts.num_documents else None,
        teachers=teachers,
        world=_world(config, facts.gpus, facts.cpus),
        memory=worker_memory(
            config,
            facts,
            slots=[teacher.bytes_per_slot for teacher in teachers],
            rings=[teacher.ring_bytes for teacher in teachers],
        ),
        # fp32 weights and two Adam moments
        checkpoint_bytes=12 * facts.student.parameters if facts.student else None,
    )


def all_rings(config: Config, facts: Facts) -> int:
    """Bytes of the rings of all teacher replicas together; as in `sizes`, those of unknown size are left out."""
    rings = [teacher.ring_bytes for teacher in sizes(config, facts).teachers]
    return sum(ring * teacher.parallel.dp for ring, teacher in zip(rings, running_teachers(config)))


def stored_targets(config: Config, facts: Facts) -> int:
    """Bytes of targets in Ray's object store at a time, if they travel through it.

    This is twice every ring, because a slot's object is freed only after its successor exists.
    """
    return 2 * all_rings(config, facts)


def _teacher_sizes(config: Config, teacher: TeacherConfig, known: TeacherFacts, facts: Facts) -> TeacherSizes:
    """Sizes of the targets and the ring of one running teacher.

    Where facts are missing, a top-k teacher counts loss.top_k entries per token, a sampled one loss.draws, and a teacher that exports logits or
    hidden states 0. `wire_dtype: auto` means fp16 with GPUs, else fp32; hidden states travel in the teacher's own
    dtype.

    Args:
        known: about this teacher.
        facts: about the run.
    """
    num_ids, model = known.vocabulary_size or facts.vocabulary_size, known.model
    dtype = wire_dtype(teacher, on_gpu=facts.gpus > 0)
    if teacher.export == "logits":
        entries = model.vocabulary_columns if model else num_ids or 0
    elif teacher.export == "hidden":
        entries, dtype = model.hidden_size if model else 0, teacher.dtype
    elif teacher.export == "sampled":
        entries = min(config.loss.draws, model.vocabulary_columns if model else config.loss.draws)
    else:
        entries = min(config.loss.top_k, num_ids or config.loss.top_k)
    bytes_per_token = target_bytes_per_token(teacher.export, entries, ITEM_SIZE[dtype])
    rows = teacher_rows(config, teacher)
    bytes_per_slot = rows * row_width(teacher_length(config, teacher), on_gpu=facts.gpus > 0) * bytes_per_token
    slots = ring_plan(config).slots[teacher.name]
    return TeacherSizes(
        name=teacher.name,
        entries=entries,
        bytes_per_token=bytes_per_token,
        bytes_per_slot=bytes_per_slot,
        ring_bytes=slots * bytes_per_slot,
        slots=slots,
    )


def cross_tokenizer_loss(config: Config, teacher: TeacherConfig, *, same: bool) -> str | None:
    """The cross-tokenizer loss of a teacher, None for a teacher that is compared token by token.

    Args:
        same: whether the teacher has the student's tokenizer.

    Raises:
        ConfigError: the teacher has another tokenizer, and the settings do not allow that.
    """
    if teacher.loss not in (None, "same"):
        return teacher.loss
    if same:
        return None
    if teacher.loss == "same" or config.loss.cross_tokenizer is None:
        setting = "loss: same" if teacher.loss == "same" else "loss.cross_tokenizer: null"
        remedy = "use a teacher with the student's tokenizer, or set loss.cross_tokenizer=hybrid"
        rule = f"must have the student's vocabulary ({setting}); the tokenizers differ"
        raise ConfigError(f"teacher {teacher.name}", rule, None, remedy)
    return config.loss.cross_tokenizer


def compute_groups(config: Config) -> list[int]:
    """Number of ranks of the student, then of each running teacher."""
    student = config.student.parallel
    teachers = [teacher.parallel.dp * ranks_per_replica(teacher) for teacher in running_teachers(config)]
    return [student.dp * student.tp, *teachers]


def gpu_groups(config: Config) -> list[int]:
    """Number of GPUs of the student, then of each running teacher that uses any where there are any."""
    per_rank = [1, *map(gpus_per_rank, running_teachers(config))]
    return [ranks * gpus for ranks, gpus in zip(compute_groups(config), per_rank) if gpus]


def shares_gpus(config: Config, teacher: TeacherConfig) -> bool:
    """Whether the ranks of a teacher share GPUs with those of others. A rank with several GPUs has them for itself."""
    return config.ray.placement == "colocated" and gpus_per_rank(teacher) == 1


def gpus_of_ranks(config: Config) -> int:
    """Number of GPUs that student and teachers use: colocated, one for the i-th rank of all that share GPUs."""
    student, *of_teachers = compute_groups(config)
    shared, own = [student], 0
    for teacher, ranks in zip(running_teachers(config), of_teachers):
        if shares_gpus(config, teacher):
            shared.append(ranks)
        else:
            own += ranks * gpus_per_rank(teacher)
    return max(shared) + own


def gpus_of_run(config: Config) -> int:
    """Number of GPUs that the run uses. The evaluator shares those of the ranks, but vllm's tensor parallelism cannot."""
    ranks, evaluate = gpus_of_ranks(config), config.evaluate
    tp = evaluate.parallel.tp if evaluate.suites else 1
    if tp == 1:
        return ranks
    return ranks + tp if evaluate.backend == "vllm" else max(ranks, tp)


def evaluator_ranks(backend: str, tp: int) -> int:
    """Number of actors that hold one copy of an evaluated model: vllm splits it in processes of its own."""
    return tp if backend == "hf" else 1


def evaluators(config: Config) -> int:
    """Number of actors of the run's evaluator; 0 without suites."""
    evaluate = config.evaluate
    return evaluator_ranks(evaluate.backend, evaluate.parallel.tp) if evaluate.suites else 0


def evaluator_problem(config: Config, gpus: float) -> str | None:
    """What is wrong with the GPUs of the evaluator's tensor parallelism, as one line; None if nothing is.

    Args:
        gpus: in the cluster or on this machine; 0: everything runs on CPUs.
    """
    evaluate, used = config.evaluate, gpus_of_ranks(config)
    tp = evaluate.parallel.tp
    if not evaluate.suites or tp == 1 or not gpus:
        return None
    key, remedy = "evaluate.parallel.tp", "lower it"
    if gpus < tp:
        return problem(key, f"{tp} GPUs are asked, there are {gpus:g}", None, remedy)
    if evaluate.backend == "vllm" and gpus < gpus_of_run(config):
        rule = f"vllm needs {tp} free GPUs; student and teachers use {used} of {gpus:g}"
        return problem(key, rule, None, f"{remedy}, or set evaluate.backend=hf")
    return None


def aligner_workers(config: Config, *, gpus: float, cpus: float) -> int:
    """Number of aligner actors on a machine or cluster of this size.

    As configured, or half the number of GPUs that the run uses, at most the cores that its ranks leave free, and at
    least 1.
    """
    if config.aligner.workers is not None:
        return config.aligner.workers
    ranks = compute_groups(config)
    return int(max(1, min(min(max(ranks), gpus) // 2, cpus - sum(ranks))))


def _world(config: Config, gpus: int, cpus: int) -> dict[str, str]:
    """Role → its processes in words (`dp 2 x tp 1 = 2 processes`), to print.

    Roles are the student, every running teacher by name, `aligner` and, with suites, `evaluator`.

    Args:
        gpus, cpus: size of this machine; ignored if the run joins a cluster, whose size is not known yet.
    """
    roles = {"student": config.student.parallel}
    roles |= {teacher.name: teacher.parallel for teacher in running_teachers(config)}
    world = {}
    if config.ray.address is not None:  # the size of a cluster is not known before it is joined
        gpus = cpus = 10**6
    aligners = aligner_workers(config, gpus=gpus, cpus=cpus)
    for name, parallel in roles.items():
        count = parallel.dp * parallel.tp
        world[name] = f"dp {parallel.dp} x tp {parallel.tp} = {_processes(count)}"
        if parallel.replicas > 1:
            sharded = parallel.dp // parallel.replicas * parallel.tp
            world[name] += f", {parallel.replicas} replicas over {sharded} each"
    for teacher in running_teachers(config):
        clients = _processes(teacher.parallel.dp)
        if teacher.backend == "endpoint":
            world[teacher.name] = f"{clients} to ask {', '.join(map(in_text, teacher.url))}"
        elif not runs_model(teacher):
            world[teacher.name] = f"{clients} to read {teacher.store}"
        elif teacher.backend == "vllm":
            world[teacher.name] = _engines(config, teacher, gpus)
    if config.aligner.workers is not None:
        reason = "as configured"
    elif config.ray.address is None:
        reason = "half the GPUs, at least 1"
    else:
        reason = "half the GPUs, where the cores suffice"
    world["aligner"] = f"{_processes(aligners)} ({reason})" if aligners else "none: the driver aligns"
    if config.evaluate.suites:
        every = suites_every(config)
        when = f"every {every} steps on a copy of the student, and at the end" if every else "at the end"
        tp = config.evaluate.parallel.tp
        processes = _processes(1) if tp == 1 else f"tp {tp} = {_processes(tp)}"
        world["evaluator"] = f"{processes}: {', '.join(config.evaluate.suites)} {when}"
    return world


def _engines(config: Config, teacher: TeacherConfig, gpus: int) -> str:
    """The engines of a teacher that vLLM runs, in words."""
    parallel = teacher.parallel
    text = f"dp {parallel.dp} = {parallel.dp} vLLM engine{'s' if parallel.dp > 1 else ''}"
    if not gpus:
        return text if parallel.tp == 1 else f"{text}, each of {_processes(parallel.tp)}"
    share = gpu_share(teacher, shared=shares_gpus(config, teacher))
    where = "a GPU" if parallel.tp == 1 else f"{parallel.tp} GPUs"
    return f"{text}, each with {'' if share == 1 else f'{share:g} of '}{where}"


def _processes(count: int) -> str:
    return f"{count} process" if count == 1 else f"{count} processes"


def has_validation(config: Config) -> bool:
    """Whether the run has validation data."""
    return bool(config.data.validation.path) or config.data.validation.fraction > 0


def suites_every(config: Config) -> int:
    """Optimizer steps between evaluations on the suites; 0: only at the end of the run."""
    evaluate = config.evaluate
    return evaluate.every if evaluate.suites_every is None else evaluate.suites_every
