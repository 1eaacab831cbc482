"""Sizes that follow from a configuration and from what its files say. Pure arithmetic, in bytes and counts.

The memory estimate names each part, so that a user sees what to change. It is compared with measured
peaks by `launch/bench.sh memory` (docs/benchmarks/memory.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import ConfigError

ITEM_SIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
GIB = 2**30

EXPORTS: dict[str, tuple[str, ...]] = {
    "hybrid": ("topk", "logits"),
    "alm": ("topk", "logits"),
    "xtoken": ("logits",),
    "gold": ("logits",),
    "uld": ("logits",),
    "strict": ("logits",),
}
"""Loss across tokenizers → what a teacher may export for it."""

PROCESS_BASE = 400 * 2**20
"""Resident size of a Ray actor on a CPU that has imported torch, transformers and an engine (measured: 388 MiB)."""
TEACHER_CHUNK_TOKENS = 1024
"""A teacher makes logits of at most this many tokens at a time: a larger matrix product is no faster."""
TEACHER_CHUNK_BYTES = 256 * 2**20
"""Bound on one rank's fp32 logits of such a chunk."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model folder says of itself."""

    folder: str
    family: str
    parameters: int
    """counted once where embeddings are tied"""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    vocabulary_columns: int
    """rows of the embedding table, padding included"""
    positions: int | None
    """longest sequence; None: the configuration names no limit"""
    tied: bool
    stored_dtype: str
    bytes_on_disk: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the files say; None where they could not be read."""

    vocabulary_size: int | None = None
    """ids of the student's tokenizer"""
    tokenizer_hash: str | None = None
    num_documents: int | None = None
    """training documents, after the validation split"""
    num_validation_documents: int | None = None
    data_fingerprint: str | None = None
    total_steps: int | None = None
    student: ModelFacts | None = None
    teachers: tuple[ModelFacts | None, ...] = ()
    """in the order of the config"""
    gpus: int = 0
    """GPUs visible on this machine"""
    cpus: int = 1
    """cores of this machine that this process may use"""
    crossings: tuple[str | None, ...] = ()
    """per running teacher: the loss across tokenizers, None where the tokenizer is the student's"""
    teacher_vocabularies: tuple[int | None, ...] = ()
    """ids of each running teacher's tokenizer"""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Estimated peak of one process, by part."""

    worker: str
    """`student` or the teacher's name"""
    count: int
    """how many such processes"""
    weights: int
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    """FSDP's unsharded copy of its largest unit, that unit's gradient, and the buffers of their exchange"""
    scratch: int = 0
    """the optimizer's temporaries of one step"""
    activations: int = 0
    logits: int = 0
    targets: int = 0
    """targets of the micro-batches in flight"""
    loading: int = 0
    """pages of the weight files while they are read; they are given back before anything but the weights is needed"""
    base: int = PROCESS_BASE

    @property
    def parts(self) -> dict[str, int]:
        """Name → bytes of every part but the pages of the files, which count only where they exceed the rest."""
        names = ("weights", "gradients", "optimizer", "gathered", "scratch", "activations", "logits", "targets", "base")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @property
    def total(self) -> int:
        return max(sum(self.parts.values()), self.base + self.weights + self.loading)


@dataclass(frozen=True, slots=True)
class TeacherSizes:
    name: str
    micro_batches: int
    """per data-parallel rank and step, at most"""
    entries: int
    """kept per token: loss.top_k, or the whole vocabulary where that is smaller"""
    bytes_per_token: int
    bytes_per_slot: int
    """targets of one full micro-batch of rows as long as data.max_length"""
    ring_bytes: int
    """all slots of one teacher rank: (prefetch.depth + 1) x micro-batches"""


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


def running_teachers(config: Config) -> list[TeacherConfig]:
    """The teachers that are started: none where loss.kd_weight is 0."""
    return list(config.teachers) if config.loss.kd_weight > 0 else []


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
        memory=_memory(config, facts, teachers),
        checkpoint_bytes=12 * facts.student.parameters if facts.student else None,
    )


def _teacher_sizes(config: Config, teacher: TeacherConfig, facts: Facts, number: int) -> TeacherSizes:
    rows = teacher.micro_batch_size or config.train.micro_batch_size
    micro_batches = ceil(config.train.global_batch_size / (teacher.parallel.dp * rows))
    vocabularies = facts.teacher_vocabularies
    ids = (vocabularies[number] if number < len(vocabularies) else None) or facts.vocabulary_size
    if teacher.export == "logits":
        model = facts.teachers[number] if number < len(facts.teachers) else None
        entries = model.vocabulary_columns if model else ids or 0
        per_token = entries * _wire_size(teacher, facts) + 4  # and the label's log-prob
    else:
        entries = min(config.loss.top_k, ids or config.loss.top_k)
        # An int32 id and a log-prob per entry; rest and label log-prob are fp32.
        per_token = entries * (4 + _wire_size(teacher, facts)) + 8
    slot = rows * config.data.max_length * per_token
    ring = (config.prefetch.depth + 1) * micro_batches * slot
    return TeacherSizes(teacher.name, micro_batches, entries, per_token, slot, ring)


def _wire_size(teacher: TeacherConfig, facts: Facts) -> int:
    name = teacher.wire_dtype
    if name == "auto":
        name = "fp16" if facts.gpus else "fp32"
    return ITEM_SIZE[name]


def crossing(config: Config, teacher: TeacherConfig, *, same: bool) -> str | None:
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
    chosen = "half the GPUs, at least 1" if config.ray.address is None else "half the GPUs, where the cores suffice"
    if config.aligner.workers is not None:
        chosen = "as configured"
    plural = "process" if aligners == 1 else "processes"
    world["aligner"] = f"{aligners} {plural} ({chosen})" if aligners else "none: the driver aligns"
    return world, processes


def _memory(config: Config, facts: Facts, teachers: tuple[TeacherSizes, ...]) -> tuple[WorkerMemory, ...]:
    workers = []
    on_gpu = facts.gpus > 0
    if facts.student is not None:
        in_flight = sum(teacher.bytes_per_slot for teacher in teachers)
        workers.append(student_memory(config, facts.student, targets=in_flight, on_gpu=on_gpu))
    running = running_teachers(config)
    for teacher, size, model in zip(running, teachers, facts.teachers[: len(running)]):
        if model is not None:
            workers.append(teacher_memory(config, teacher, model, targets=2 * size.bytes_per_slot, on_gpu=on_gpu))
    return tuple(workers)


def student_memory(config: Config, model: ModelFacts, *, targets: int = 0, on_gpu: bool = False) -> WorkerMemory:
    """Peak of one student process: fp32 weights, gradients, two Adam moments and AdamW's temporaries, all sharded
    over dp x tp, the unsharded copy of the largest FSDP unit, activations of one micro-batch, and its logits."""
    dp, tp = config.student.parallel.dp, config.student.parallel.tp
    item = ITEM_SIZE[config.student.dtype]
    shard = ceil(model.parameters / (dp * tp))
    tokens = config.train.micro_batch_size * config.data.max_length
    embedding = model.vocabulary_columns * model.hidden_size
    tables = embedding if model.tied else 2 * embedding
    layer = (model.parameters - tables) // max(model.num_layers, 1)
    unit = max(layer, tables) // tp
    return WorkerMemory(
        worker="student",
        count=dp * tp,
        weights=4 * shard,
        gradients=4 * shard,
        optimizer=8 * shard,
        gathered=unit * _bytes_per_gathered(item, dp),
        scratch=4 * shard,
        activations=_activations(config, model, tokens, item, tp),
        logits=tokens * ceil(model.vocabulary_columns / tp) * 3 * item,  # logits, log-softmax, gradient
        targets=targets,
        loading=0 if on_gpu else model.bytes_on_disk // (dp * tp),
    )


def _bytes_per_gathered(item: int, dp: int) -> int:
    """Per parameter of the unit that is whole: its copy and gradient in the compute dtype, the gradient in fp32 for
    the reduction, and with several ranks the buffer that the copy is gathered into."""
    if dp == 1:
        return 2 * item + (4 if item < 4 else 0)
    return 3 * item + 4


def teacher_memory(
    config: Config, teacher: TeacherConfig, model: ModelFacts, *, targets: int = 0, on_gpu: bool = False
) -> WorkerMemory:
    """Peak of one teacher process: its weights over tp, the widest activations of one layer, logits of one chunk.

    On a CPU the pages of the weight files count too: while it reads them they are the peak.
    """
    tp, item = teacher.parallel.tp, ITEM_SIZE[teacher.dtype]
    rows = teacher.micro_batch_size or config.train.micro_batch_size
    tokens = rows * config.data.max_length
    columns = ceil(model.vocabulary_columns / tp)
    chunk = max(1, min(TEACHER_CHUNK_TOKENS, TEACHER_CHUNK_BYTES // (4 * columns), tokens))
    return WorkerMemory(
        worker=teacher.name,
        count=teacher.parallel.dp * tp,
        weights=item * ceil(model.parameters / tp),
        activations=tokens * item * (6 * model.hidden_size + 3 * model.intermediate_size // tp),
        logits=chunk * columns * (item + 8),  # and in fp32, twice
        targets=targets,
        loading=0 if on_gpu else model.bytes_on_disk // tp,
    )


def _activations(config: Config, model: ModelFacts, tokens: int, item: int, tp: int) -> int:
    """Kept for backward, per token and layer of a Llama-like decoder.

    Hidden-sized: two inputs and outputs of the norms with their fp32 copies, queries before and after
    the rotation, attention's output. Key-value-sized: keys before and after, values.
    Intermediate-sized: gate, up, activation, product.
    """
    hidden, intermediate = model.hidden_size, model.intermediate_size // tp
    key_value = hidden * model.num_key_value_heads // max(model.num_heads, 1) // tp
    norms = 2 * hidden * (2 * item + 4)
    layer = norms + item * (4 * hidden // tp + 3 * key_value + 4 * intermediate)
    if config.student.activation_checkpointing:
        return tokens * (model.num_layers * hidden * item + layer)
    return tokens * model.num_layers * layer
