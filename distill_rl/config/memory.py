"""Estimated memory of the workers; `launch/bench.sh memory` compares it with what they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from distill_rl.config.facts import Facts, ModelFacts, row_width, running_teachers, teacher_rows
from distill_rl.config.schema import Config, StudentConfig, TeacherConfig

ITEM_SIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
FUSED = ("gpt2", "phi3")
"""Families whose layers hold several projections in one: every tensor-parallel rank has all of what these make."""

PROCESS_BASE = 400 * 2**20
"""Resident size of a Ray actor on a CPU that has imported torch, transformers and an engine (measured: 388 MiB)."""
TEACHER_CHUNK_TOKENS = 1024
"""A teacher makes logits of at most this many tokens at a time: a larger matrix product is no faster."""
TEACHER_CHUNK_BYTES = 256 * 2**20
"""Bound on one rank's fp32 logits of such a chunk."""
WHOLE_GRADIENT_BYTES = 16 * 2**30
"""`student.gradient_sync: auto` keeps a whole fp32 gradient per rank up to this size: 4 billion parameters at tp 1."""
PROMPT_TOKENS = 1024
"""Tokens of prompt and answer that an evaluator is estimated for; longer ones take as much more."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Estimated peak of one process, by part."""

    worker: str
    """`student` or the teacher's name"""
    count: int
    """how many such processes"""
    weights: int
    gradients: int = 0
    accumulated: int = 0
    """the whole fp32 gradient of a rank's own micro-batches, where gradients are reduced once per step"""
    optimizer: int = 0
    gathered: int = 0
    """FSDP's unsharded copy of its largest unit, that unit's gradient, and the buffers of their exchange"""
    scratch: int = 0
    """the optimizer's temporaries of one step"""
    activations: int = 0
    logits: int = 0
    targets: int = 0
    """targets of the micro-batches in flight"""
    heads: int = 0
    """output layers of the teachers that export hidden states, and the logits that are made of these across tokenizers"""
    cache: int = 0
    """keys and values of the prompts that are run together"""
    saving: int = 0
    """the copy of weights and optimizer state that a checkpoint is written from beside the training"""
    loading: int = 0
    """pages of the weight files while they are read; they are given back before anything but the weights is needed"""
    base: int = PROCESS_BASE

    @property
    def parts(self) -> dict[str, int]:
        """Name → bytes of every part but the pages of the files, which count only where they exceed the rest."""
        names = (
            "weights", "gradients", "accumulated", "optimizer", "gathered", "scratch", "activations", "logits", "targets", "heads",
            "cache", "saving", "base",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @property
    def total(self) -> int:
        return max(sum(self.parts.values()), self.base + self.weights + self.loading)


def worker_memory(config: Config, facts: Facts, slots: Sequence[int], rings: Sequence[int]) -> tuple[WorkerMemory, ...]:
    """Of the student and every running teacher whose facts are known.

    Args:
        slots: bytes of a slot of each teacher, `rings` of all of a rank's.
    """
    workers = []
    on_gpu, running = facts.gpus > 0, running_teachers(config)
    if facts.student is not None:
        heads = _heads(config, facts, facts.student, on_gpu)
        rows = config.train.micro_batch_size
        read = sum(max(slot, slot * rows // teacher_rows(config, each)) for slot, each in zip(slots, running))
        workers.append(student_memory(config, facts.student, targets=read, heads=heads, on_gpu=on_gpu))
    # A ring is the teacher's own memory, unless it is Ray's object store that holds the slots.
    owned = config.transport in ("shared_memory", "cuda_ipc") or (on_gpu and config.transport == "auto")
    for teacher, slot, ring, model in zip(running, slots, rings, facts.teachers[: len(running)]):
        if model is not None:
            targets = ring + slot if owned else 2 * slot
            workers.append(teacher_memory(config, teacher, model, targets=targets, on_gpu=on_gpu))
    if facts.student is not None and config.evaluate.suites:
        workers.append(evaluator_memory(config, facts.student, on_gpu=on_gpu))
    return tuple(workers)


def _heads(config: Config, facts: Facts, student: ModelFacts, on_gpu: bool) -> int:
    """Of one student process. A CPU keeps the layers in the fp32 that it works in."""
    total, tokens = 0, config.train.micro_batch_size * row_width(config.data.max_length, on_gpu=on_gpu)
    for number, (teacher, model) in enumerate(zip(running_teachers(config), facts.teachers)):
        if teacher.export != "hidden" or model is None:
            continue
        crosses = number < len(facts.cross_tokenizer_losses) and facts.cross_tokenizer_losses[number] is not None
        columns = model.vocabulary_columns if crosses else ceil(student.vocabulary_columns / config.student.parallel.tp)
        total += columns * model.hidden_size * (ITEM_SIZE[teacher.dtype] if on_gpu else 4)
        total += 4 * tokens * columns if crosses else 0
    return total


def student_memory(
    config: Config, model: ModelFacts, *, targets: int = 0, heads: int = 0, on_gpu: bool = False
) -> WorkerMemory:
    """Peak of one student process: fp32 weights, gradients, two Adam moments and AdamW's temporaries, all sharded
    over dp / replicas x tp, the gathered copy of the largest FSDP unit (of all units where there is one shard),
    activations of one micro-batch, and its logits."""
    parallel = config.student.parallel
    tp, shards = parallel.tp, parallel.dp // parallel.replicas
    item = ITEM_SIZE[config.student.dtype]
    shard = ceil(model.parameters / (shards * tp))
    tokens = config.train.micro_batch_size * row_width(config.data.max_length, on_gpu=on_gpu)
    embedding = model.vocabulary_columns * model.hidden_size
    tables = embedding if model.tied else 2 * embedding
    layer = (model.parameters - tables) // max(model.num_layers, 1)
    unit = max(layer, tables) // tp
    return WorkerMemory(
        worker="student",
        count=parallel.dp * tp,
        weights=4 * shard,
        gradients=4 * shard,
        accumulated=_accumulated(config, model.parameters),
        optimizer=8 * shard,
        gathered=unit * (2 * item + 8) if shards > 1 else item * shard + unit * (item + 8),
        scratch=0 if on_gpu else 4 * shard,  # the fused AdamW of GPUs has none
        activations=_activations(config, model, tokens, item, tp),
        logits=tokens * ceil(model.vocabulary_columns / tp) * 3 * item,  # logits, log-softmax, gradient
        targets=targets,
        heads=heads,
        saving=12 * shard if config.checkpoint.every and config.checkpoint.async_save and not on_gpu else 0,
        loading=0 if on_gpu else model.bytes_on_disk // (shards * tp),
    )


def reduces_once_per_step(student: StudentConfig, parameters: int) -> bool:
    """Whether gradients are reduced after the step's last micro-batch only (`student.gradient_sync`).

    Args:
        parameters: of the whole model.
    """
    if student.gradient_sync == "auto":
        return 4 * parameters // student.parallel.tp <= WHOLE_GRADIENT_BYTES
    return student.gradient_sync == "step"


def _accumulated(config: Config, parameters: int) -> int:
    """On one shard this *is* the gradient; a step of one micro-batch has nothing to add up."""
    parallel = config.student.parallel
    several = config.train.global_batch_size > parallel.dp * config.train.micro_batch_size
    sharded = parallel.dp > parallel.replicas
    if not (several and sharded and reduces_once_per_step(config.student, parameters)):
        return 0
    return 4 * ceil(parameters / parallel.tp)


def teacher_memory(
    config: Config, teacher: TeacherConfig, model: ModelFacts, *, targets: int = 0, on_gpu: bool = False
) -> WorkerMemory:
    """Peak of one teacher process: its weights over tp, the widest activations of one layer, logits of one chunk.

    On a CPU the pages of the weight files count too: while it reads them they are the peak.
    """
    tp, item = teacher.parallel.tp, ITEM_SIZE[teacher.dtype]
    intermediate = model.intermediate_size if model.family in FUSED else model.intermediate_size // tp
    rows = teacher_rows(config, teacher)
    tokens = rows * row_width(config.data.max_length, on_gpu=on_gpu)
    columns = ceil(model.vocabulary_columns / tp)
    chunk = max(1, min(TEACHER_CHUNK_TOKENS, TEACHER_CHUNK_BYTES // (4 * columns), tokens))
    return WorkerMemory(
        worker=teacher.name,
        count=teacher.parallel.dp * tp,
        weights=item * ceil(model.parameters / tp),
        activations=tokens * item * (6 * model.hidden_size + 3 * intermediate),
        logits=chunk * columns * (item + 8),  # and in fp32, twice
        targets=targets,
        loading=0 if on_gpu else model.bytes_on_disk // tp,
    )


def evaluator_memory(config: Config, model: ModelFacts, *, on_gpu: bool = False) -> WorkerMemory:
    """Peak of the process that evaluates copies of the student: the model in the dtype of its files (on a CPU fp32), and
    keys and values of a batch of prompts of PROMPT_TOKENS."""
    item = max(1, model.bytes_on_disk // max(model.parameters, 1)) if on_gpu else 4
    key_value = model.hidden_size * model.num_key_value_heads // max(model.num_heads, 1)
    rows = config.evaluate.batch_size
    return WorkerMemory(
        worker="evaluator",
        count=1,
        weights=item * model.parameters,
        logits=rows * model.vocabulary_columns * (item + 8),
        cache=rows * PROMPT_TOKENS * model.num_layers * 2 * key_value * item,
        loading=0 if on_gpu else model.bytes_on_disk,
    )


def _activations(config: Config, model: ModelFacts, tokens: int, item: int, tp: int) -> int:
    """Kept for backward, per token and layer of a Llama-like decoder.

    Hidden-sized: two inputs and outputs of the norms with their fp32 copies, queries before and after
    the rotation, attention's output. Key-value-sized: keys before and after, values.
    Intermediate-sized: gate, up, activation, product.
    """
    tp = 1 if model.family in FUSED else tp
    hidden, intermediate = model.hidden_size, model.intermediate_size // tp
    key_value = hidden * model.num_key_value_heads // max(model.num_heads, 1) // tp
    norms = 2 * hidden * (2 * item + 4)
    layer = norms + item * (4 * hidden // tp + 3 * key_value + 4 * intermediate)
    if config.student.activation_checkpointing:
        return tokens * (model.num_layers * hidden * item + layer)
    return tokens * model.num_layers * layer
