"""Sizes that follow from a configuration and from the contents of its files: pure arithmetic, in bytes and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, lcm
from typing import get_args

from distill_rl.config.facts import Facts, TeacherFacts, row_width
from distill_rl.config.layout import world
from distill_rl.config.memory import ITEM_SIZE, WorkerMemory, worker_memory
from distill_rl.config.schema import Config, CrossTokenizerLoss, ScheduleConfig, TeacherConfig
from distill_rl.errors import ConfigError

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

    None if train.epochs is set and the number of documents is not known yet, and if neither setting is given; with
    train.minutes it is the most that the run may take. The epochs' permutations of the data are concatenated before they
    are cut into batches, so only the last batch of the run can be smaller than the others.
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
        short = f"the run ends at step {last_step}: the warm-up takes {warmup_steps(schedule, last_step)}"
        return f"schedule.warmup_steps is {configured}, but {short}"
    return f"the run ends at step {last_step}, within the warm-up of {configured} steps: it does not reach optimizer.lr"


def rows_unit(config: Config) -> int:
    """Smallest number of rows that the student and every running teacher divide evenly over ranks and micro-batches."""
    shares = [config.student.parallel.dp * config.train.micro_batch_size]
    return lcm(*shares, *(rows_per_slot(config, teacher) for teacher in config.running_teachers))


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
    batch, unit, needs_whole_batch = config.train.global_batch_size, rows_unit(config), config.wants_whole_batch
    rows_per_sub_batch, slots = batch, {}
    for teacher in config.running_teachers:
        rows = rows_per_slot(config, teacher)
        limit = config.prefetch.slots
        if limit is None and teacher.export == "logits" and not needs_whole_batch:
            limit = 2 * unit // rows
        slots[teacher.name] = (config.prefetch.depth + 1) * (batch // rows)
        if limit is not None:
            slots[teacher.name] = min(slots[teacher.name], limit)
            if not needs_whole_batch:
                rows_per_sub_batch = min(rows_per_sub_batch, max(limit * rows // 2 // unit * unit, unit))
    sub_batches = ceil(batch / rows_per_sub_batch)
    rows_per_sub_batch = ceil(batch / sub_batches / unit) * unit
    rows_of = {teacher.name: rows_per_slot(config, teacher) for teacher in config.running_teachers}
    return RingPlan(rows_per_sub_batch, slots, {name: rows_per_sub_batch // rows for name, rows in rows_of.items()})


def rows_per_slot(config: Config, teacher: TeacherConfig) -> int:
    """Rows of a batch that fill one slot in every replica of a teacher: its dp times its micro-batch size."""
    return teacher.parallel.dp * config.rows_of(teacher)


def sizes(config: Config, facts: Facts) -> DerivedSizes:
    """All derived sizes of a configuration without problems.

    What depends on unknown facts is None or left out (steps, epochs, checkpoint size, memory of a worker), or 0
    (entries of a teacher of unknown width or vocabulary, and the bytes that follow from them). `facts.total_steps`,
    where known, takes precedence over the settings.
    """
    batch = config.train.global_batch_size
    steps = facts.total_steps if facts.total_steps is not None else total_steps(config, facts.num_documents)
    teachers = tuple(_teacher_sizes(config, teacher, known, facts) for teacher, known in facts.by_teacher(config))
    slots = [teacher.bytes_per_slot for teacher in teachers]
    return DerivedSizes(
        micro_batches=ceil(batch / (config.student.parallel.dp * config.train.micro_batch_size)),
        total_steps=steps,
        epochs=_epochs(config, steps, facts.num_documents),
        teachers=teachers,
        world=world(config, facts.gpus, facts.cpus),
        memory=worker_memory(config, facts, slots, [teacher.ring_bytes for teacher in teachers]),
        # fp32 weights and two Adam moments
        checkpoint_bytes=12 * facts.student.trained if facts.student else None,
    )


def _epochs(config: Config, steps: int | None, num_documents: int | None) -> float | None:
    """Passes over the data in so many steps, of which the last may be shorter; None if that is not known."""
    if steps is None or not num_documents:
        return None
    documents = steps * config.train.global_batch_size
    if config.train.epochs is not None:
        documents = min(documents, max(round(config.train.epochs * num_documents), 1))
    return documents / num_documents


def all_rings(config: Config, facts: Facts) -> int:
    """Bytes of the rings of all teacher replicas together; as in `sizes`, those of unknown size are left out."""
    rings = [teacher.ring_bytes for teacher in sizes(config, facts).teachers]
    return sum(ring * teacher.parallel.dp for ring, teacher in zip(rings, config.running_teachers))


def stored_targets(config: Config, facts: Facts) -> int:
    """Bytes of targets in Ray's object store at a time, if they travel through it.

    This is twice every ring, because a slot's object is freed only after its successor exists.
    """
    return 2 * all_rings(config, facts)


def _teacher_sizes(config: Config, teacher: TeacherConfig, known: TeacherFacts, facts: Facts) -> TeacherSizes:
    """Sizes of the targets and the ring of one running teacher."""
    # Where facts are missing, a top-k teacher counts loss.top_k entries per token, a sampled one loss.draws, and a teacher that exports
    # logits or hidden states 0. `wire_dtype: auto` means fp16 with GPUs, else fp32; hidden states travel in the teacher's own dtype.
    num_ids, model = known.vocabulary_size or facts.vocabulary_size, known.model
    dtype = teacher.sent_dtype(on_gpu=facts.gpus > 0)
    if teacher.export == "logits":
        entries = model.vocabulary_columns if model else num_ids or 0
    elif teacher.export == "hidden":
        entries, dtype = model.hidden_size if model else 0, teacher.dtype
    elif teacher.export == "sampled":
        entries = min(config.loss.draws, model.vocabulary_columns if model else config.loss.draws)
    else:
        entries = min(config.loss.top_k, num_ids or config.loss.top_k)
    bytes_per_token = target_bytes_per_token(teacher.export, entries, ITEM_SIZE[dtype])
    rows = config.rows_of(teacher)
    width = row_width(config.length_of(teacher), on_gpu=facts.gpus > 0, divisor=config.width_divisor)
    bytes_per_slot = rows * width * bytes_per_token
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


def has_validation(config: Config) -> bool:
    """Whether the run has validation data."""
    return bool(config.data.validation.path) or config.data.validation.fraction > 0


def target_bytes_per_token(export: str, entries: int, item_size: int) -> int:
    """Bytes of the targets that a teacher sends per token, the fp32 log-prob of the label included.

    Top-k targets also have an int32 id per entry, and the mass outside the top k (fp32). Draws are an int32 id and an int16
    count per entry, and have their mean log-prob (fp32).

    Args:
        export: `teachers[].export`.
        entries: per token: the top k, the draws, the vocabulary's columns, or the width of the hidden states.
        item_size: bytes of one log-prob, logit or element of the hidden states.
    """
    if export == "topk":
        return entries * (4 + item_size) + 8
    if export == "sampled":
        return entries * (4 + 2) + 8
    return entries * item_size + 4
