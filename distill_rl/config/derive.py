"""Sizes that follow from a configuration and from what its files say. Pure arithmetic, in bytes and counts.

The memory estimate names each part, so that a user sees what to change. It is compared with measured
peaks by `launch/bench.sh memory` (docs/benchmarks/memory.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, lcm

from distill_rl.config.facts import Facts, row_width, running_teachers, teacher_rows
from distill_rl.config.memory import ITEM_SIZE, WorkerMemory, worker_memory
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import ConfigError

GIB = 2**30

EXPORTS: dict[str, tuple[str, ...]] = {
    "hybrid": ("topk", "logits", "hidden"),
    "alm": ("topk", "logits", "hidden"),
    "xtoken": ("logits", "hidden"),
    "gold": ("logits", "hidden"),
    "hkl": ("logits", "hidden"),
    "uld": ("logits", "hidden"),
    "strict": ("logits", "hidden"),
}
"""Loss across tokenizers → what a teacher may export for it."""


@dataclass(frozen=True, slots=True)
class TeacherSizes:
    name: str
    micro_batches: int
    """per data-parallel rank and step, at most"""
    entries: int
    """kept per token: loss.top_k, or the whole vocabulary where that is smaller; of hidden states their width"""
    bytes_per_token: int
    bytes_per_slot: int
    """targets of one full micro-batch of the widest rows"""
    ring_bytes: int
    """all slots of one teacher rank"""
    slots: int
    """of that ring; see `ring_plan`"""


@dataclass(frozen=True, slots=True)
class RingPlan:
    """How the teachers' rings hold a batch's targets.

    A batch whose targets are not meant to fit at once is taught and trained on in *sub-batches*: runs of rows that every
    teacher and the student divide evenly. Their number follows from the ring, never from `prefetch.depth`.
    """

    sub_batches: int
    rows_per_sub_batch: int
    slots: Mapping[str, int]
    """of one rank's ring, by teacher"""
    slots_per_sub_batch: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class DerivedSizes:
    documents_per_step: int
    max_tokens_per_step: int
    micro_batches: int
    """the student's, per data-parallel rank and step, at most"""
    total_steps: int | None
    epochs: float | None
    """passes over the data that the run makes"""
    teachers: tuple[TeacherSizes, ...]
    world: dict[str, str] = field(default_factory=dict)
    """role → its processes: `student` → `dp 2 x tp 1 = 2 processes`"""
    processes: int = 0
    memory: tuple[WorkerMemory, ...] = ()
    checkpoint_bytes: int | None = None


def total_steps(config: Config, num_documents: int | None) -> int | None:
    """Optimizer steps of the run: train.steps or train.epochs, whichever ends first; None while not known.

    The order of the data is the epochs' permutations one after another, so that only the run's last
    batch can be smaller than the others.
    """
    steps, epochs = config.train.steps, config.train.epochs
    if epochs is None:
        return steps
    if num_documents is None:
        return None
    by_epochs = ceil(max(round(epochs * num_documents), 1) / config.train.global_batch_size)
    return by_epochs if steps is None else min(steps, by_epochs)


def wants_whole_batch(config: Config) -> bool:
    """Whether the first gradient of a batch needs what all of its targets say."""
    return config.loss.dynamic_scale != "off" or any(teacher.score != "static" for teacher in running_teachers(config))


def rows_unit(config: Config) -> int:
    """Rows that the student and every running teacher divide evenly over ranks and micro-batches."""
    shares = [config.student.parallel.dp * config.train.micro_batch_size]
    return lcm(*shares, *(rows_per_slot(config, teacher) for teacher in running_teachers(config)))


def ring_plan(config: Config) -> RingPlan:
    """Slots of the teachers' rings and the sub-batches of a batch; for a configuration without problems.

    A ring holds all micro-batches of depth + 1 batches; of a teacher that exports logits two sub-batches of the fewest rows;
    or `prefetch.slots`, in sub-batches of half a ring, so that a teacher fills one half while the student reads the other.
    """
    batch, unit = config.train.global_batch_size, rows_unit(config)
    whole, asked = wants_whole_batch(config), config.prefetch.slots
    rows_per_sub_batch, slots = batch, {}
    for teacher in running_teachers(config):
        rows = rows_per_slot(config, teacher)
        room = (config.prefetch.depth + 1) * (batch // rows)
        wanted = 2 * unit // rows if teacher.export == "logits" and asked is None else asked
        if wanted is not None and not whole:
            rows_per_sub_batch = min(rows_per_sub_batch, max(wanted * rows // 2 // unit * unit, unit))
        slots[teacher.name] = room if wanted is None or (whole and asked is None) else min(room, wanted)
    sub_batches = ceil(batch / rows_per_sub_batch)
    rows_per_sub_batch = ceil(batch / sub_batches / unit) * unit  # the last one is not much smaller than the others
    per_sub_batch = {
        teacher.name: rows_per_sub_batch // rows_per_slot(config, teacher) for teacher in running_teachers(config)
    }
    return RingPlan(sub_batches, rows_per_sub_batch, slots, per_sub_batch)


def rows_per_slot(config: Config, teacher: TeacherConfig) -> int:
    """Rows of a batch that the replicas of a teacher write into one slot each."""
    return teacher.parallel.dp * teacher_rows(config, teacher)


def sizes(config: Config, facts: Facts) -> DerivedSizes:
    """All derived sizes; memory of a model is left out where its facts are not known."""
    batch = config.train.global_batch_size
    steps = facts.total_steps if facts.total_steps is not None else total_steps(config, facts.num_documents)
    teachers = tuple(
        _teacher_sizes(config, teacher, facts, number) for number, teacher in enumerate(running_teachers(config))
    )
    world, processes = _world(config, facts.gpus, facts.cpus)
    return DerivedSizes(
        documents_per_step=batch,
        max_tokens_per_step=batch * config.data.max_length,
        micro_batches=ceil(batch / (config.student.parallel.dp * config.train.micro_batch_size)),
        total_steps=steps,
        epochs=steps * batch / facts.num_documents if steps is not None and facts.num_documents else None,
        teachers=teachers,
        world=world,
        processes=processes,
        memory=worker_memory(
            config, facts, [each.bytes_per_slot for each in teachers], [each.ring_bytes for each in teachers]
        ),
        checkpoint_bytes=12 * facts.student.parameters if facts.student else None,
    )


def _teacher_sizes(config: Config, teacher: TeacherConfig, facts: Facts, number: int) -> TeacherSizes:
    rows = teacher_rows(config, teacher)
    micro_batches = ceil(config.train.global_batch_size / (teacher.parallel.dp * rows))
    vocabularies = facts.teacher_vocabularies
    ids = (vocabularies[number] if number < len(vocabularies) else None) or facts.vocabulary_size
    model = facts.teachers[number] if number < len(facts.teachers) else None
    if teacher.export == "logits":
        entries = model.vocabulary_columns if model else ids or 0
        per_token = entries * _wire_size(teacher, facts) + 4  # and the label's log-prob
    elif teacher.export == "hidden":
        entries = model.hidden_size if model else 0
        per_token = entries * ITEM_SIZE[teacher.dtype] + 4
    else:
        entries = min(config.loss.top_k, ids or config.loss.top_k)
        # An int32 id and a log-prob per entry; rest and label log-prob are fp32.
        per_token = entries * (4 + _wire_size(teacher, facts)) + 8
    slot = rows * row_width(config.data.max_length, on_gpu=facts.gpus > 0) * per_token
    slots = ring_plan(config).slots[teacher.name]
    return TeacherSizes(teacher.name, micro_batches, entries, per_token, slot, slots * slot, slots)


def _wire_size(teacher: TeacherConfig, facts: Facts) -> int:
    name = teacher.wire_dtype
    if name == "auto":
        name = "fp16" if facts.gpus else "fp32"
    return ITEM_SIZE[name]


def cross_tokenizer_loss(config: Config, teacher: TeacherConfig, *, same: bool) -> str | None:
    """The loss across tokenizers that a teacher takes, None for one that is compared token by token.

    Args:
        same: its tokenizer is the student's.

    Raises:
        ConfigError: the settings ask for the student's tokenizer, and it has another.
    """
    if teacher.loss not in (None, "same"):
        return teacher.loss
    if same:
        return None
    if teacher.loss == "same" or config.loss.cross_tokenizer is None:
        asked = "loss: same" if teacher.loss == "same" else "loss.cross_tokenizer: null"
        remedy = "take a teacher with the student's tokenizer, or set loss.cross_tokenizer=hybrid"
        rule = f"must have the student's vocabulary ({asked}); the tokenizers differ"
        raise ConfigError(f"teacher {teacher.name}", rule, None, remedy)
    return config.loss.cross_tokenizer


def compute_groups(config: Config) -> list[int]:
    """Ranks of the student, and of each running teacher."""
    layouts = [config.student.parallel, *(teacher.parallel for teacher in running_teachers(config))]
    return [layout.dp * layout.tp for layout in layouts]


def aligner_workers(config: Config, *, gpus: float, cpus: float) -> int:
    """Aligner actors on a machine or cluster of this size: as configured, or half the GPUs that the job uses, at least
    one, at most the cores that its other actors leave free."""
    if config.aligner.workers is not None:
        return config.aligner.workers
    ranks = compute_groups(config)
    return int(max(1, min(min(max(ranks), gpus) // 2, cpus - sum(ranks))))


def _world(config: Config, gpus: int, cpus: int) -> tuple[dict[str, str], int]:
    roles = {"student": config.student.parallel}
    roles |= {teacher.name: teacher.parallel for teacher in running_teachers(config)}
    world = {}
    if config.ray.address is not None:  # the cluster's own numbers are not known before it is joined
        gpus = cpus = 10**6
    aligners = aligner_workers(config, gpus=gpus, cpus=cpus)
    processes = aligners
    for name, parallel in roles.items():
        count = parallel.dp * parallel.tp
        processes += count
        plural = "process" if count == 1 else "processes"
        world[name] = f"dp {parallel.dp} x tp {parallel.tp} = {count} {plural}"
        if parallel.replicas > 1:
            sharded = parallel.dp // parallel.replicas * parallel.tp
            world[name] += f", {parallel.replicas} replicas over {sharded} each"
    chosen = "half the GPUs, at least 1" if config.ray.address is None else "half the GPUs, where the cores suffice"
    if config.aligner.workers is not None:
        chosen = "as configured"
    plural = "process" if aligners == 1 else "processes"
    world["aligner"] = f"{aligners} {plural} ({chosen})" if aligners else "none: the driver aligns"
    if config.evaluate.suites:
        processes += 1
        every = suites_every(config)
        when = f"every {every} steps on a copy of the student, and at the end" if every else "at the end"
        world["evaluator"] = f"1 process: {', '.join(config.evaluate.suites)} {when}"
    return world, processes


def suites_every(config: Config) -> int:
    """Steps between evaluations on the suites; 0: only at the end."""
    evaluate = config.evaluate
    return evaluate.every if evaluate.suites_every is None else evaluate.suites_every
