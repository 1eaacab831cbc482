"""Estimated peak memory of every worker of a run, part by part, and how a student makes its logits and reduces its gradients,
which depends on that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil

from distill_rl.config.facts import Facts, ModelFacts, row_width
from distill_rl.config.quantization import bytes_of_weights, made_weight_bytes, weight_bytes
from distill_rl.config.schema import Config, StudentConfig, TeacherConfig

ITEM_SIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes per element."""
FUSED = ("gpt2", "phi3")
"""Families that compute several projections with one matrix, whose whole output every tensor-parallel rank holds."""

PROCESS_BASE = 435 * 2**20
"""Resident size of a Ray actor on a CPU that has imported torch, transformers and an engine and taken a step (measured with
models of a few thousand weights: 443 MiB a teacher, 464 MiB a student)."""
OVERESTIMATE = 1.13
"""The most by which an estimate was above the measured peak (docs/benchmarks/memory.md)."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Estimated peak memory of one process, by part, in bytes."""

    worker: str
    """`student`, `evaluator` or the teacher's name."""
    count: int
    """Number of such processes."""
    weights: int
    gradients: int = 0
    accumulated: int = 0
    """The unsharded fp32 gradient that a rank sums over its micro-batches if gradients are reduced once per step."""
    optimizer: int = 0
    gathered: int = 0
    """FSDP's unsharded copy of its largest unit, the gradient of that unit, and the communication buffers of both. On one rank what
    exists beside the parameters in the compute dtype."""
    scratch: int = 0
    """Temporaries of one optimizer step; of a teacher with quantised weights, the one that a layer computes with."""
    activations: int = 0
    logits: int = 0
    targets: int = 0
    """Targets of the micro-batches in flight."""
    heads: int = 0
    """Output layers of the teachers that export hidden states."""
    cache: int = 0
    """Keys and values of the prompts that are run together."""
    saving: int = 0
    """Host copy of weights and optimizer state from which a checkpoint is written while training continues."""
    loading: int = 0
    """Pages of the weight files, which are freed before anything but the weights is allocated."""
    base: int = PROCESS_BASE

    @property
    def parts(self) -> dict[str, int]:
        """Name → bytes of every part that is not 0, without `loading`, which does not coincide with the others."""
        sizes = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: size for name, size in sizes.items() if size and name not in ("worker", "count", "loading")}

    @property
    def peak(self) -> dict[str, int]:
        """Name → bytes of what the process holds at the higher of its two peaks: training, or loading the weights."""
        loading = {"weights": self.weights, "loading": self.loading, "base": self.base}
        return max(self.parts, loading, key=lambda parts: sum(parts.values()))

    @property
    def total(self) -> int:
        """The sum of the peak."""
        return sum(self.peak.values())

    @property
    def least(self) -> int:
        """Bytes of all such processes together that cannot be shared, reclaimed or overestimated."""
        return int(self.count * (sum(self.parts.values()) - self.base) / OVERESTIMATE)


def held(model: ModelFacts, tp: int) -> tuple[int, int]:
    """Parameters that a student trains, and that it does not, of a tensor-parallel rank, which FSDP2 then shards.

    Tensor parallelism does not split routed experts. With adapters they are not trained.
    """
    experts = (model.expert_parameters, 0) if model.adapters is None else (0, model.expert_parameters)
    return tuple(ceil((part - own) / tp) + own for part, own in zip((model.trained, model.frozen), experts))  # type: ignore[return-value]


# The estimated memory of a student, and how it makes its logits and reduces its gradients, which depends on that.

FUSED_FROM_BYTES = 256 * 2**20
"""`loss.fused: auto` computes logits in chunks if those of a micro-batch would take more on a rank, in the compute dtype."""
FUSED_CHUNK_BYTES, FUSED_CHUNK_BYTES_GPU = 192 * 2**20, 2**30
"""What a chunk's logits and all that is computed from them may take together in the fused loss, on a CPU and on a GPU."""
FUSED_LEAST_ROWS = 16
"""Rows of a chunk at least, however many columns they have."""
FUSED_BYTES_PER_LOGIT = 32
"""What a logit of such a chunk takes, with a dense teacher's beside it."""
WHOLE_GRADIENT_BYTES = 16 * 2**30
"""`student.gradient_sync: auto` keeps the whole fp32 gradient on every rank up to this size: 4 billion parameters at tp 1."""


def student_memory(
    config: Config, model: ModelFacts, *, targets: int = 0, heads: int = 0, on_gpu: bool = False
) -> WorkerMemory:
    """Estimated peak memory of one student process.

    With P parameters that are trained, F that are not (with adapters), s = dp / replicas · sp shards and b bytes per element
    of the compute dtype, one rank holds in bytes (routed experts, which tensor parallelism does not split, count tp times):

        weights, gradients     4 P / (s tp) each    fp32 master weights and their gradient
        weights                + b F / (s tp)       what is not trained, in the compute dtype; quantised layers take less,
                                                    and each shard holds them all (`_frozen_weights`)
        optimizer              8 P / (s tp)         two Adam moments
        scratch                4 P / (s tp)         temporaries of AdamW; 0 on GPUs, where it is fused; and of quantised
                                                    weights what exists in the compute dtype (`_dequantized`)
        saving                 12 P / (s tp)        copy for a checkpoint in the background; CPUs only
        accumulated            4 P / tp             if gradients are reduced once per step (`_accumulated`)
        gathered, s > 1        U (2 b + 8) / tp     the largest FSDP unit, of U parameters (a decoder layer, or the
                                                    embeddings and output layer): its copy and its fp32 gradient, and
                                                    a buffer for each; 2 b for what is not trained
        gathered, s = 1        b P / tp             copies of all weights, from the first forward to the last backward
                               + U (b + 8) / tp     of what is trained: the rest is used as it is
        gathered, one rank     b P if b < 4         the same copies; fp32 computes with the weights themselves
                               + U b                gradients that are not added to the others yet
        logits                 3 b T V / tp         T tokens per micro-batch, of which a rank has 1 / sp, V columns:
                                                    logits, log-softmax, gradient
        logits, fused          32 T V / tp          but at most 192 MiB, on GPUs 1 GiB: a chunk of them
                               + 4 V H / tp + 4 T H the gradients of the output layer and of its input, H wide
                               + b V H / tp         for every teacher after the first: its gradient of the output layer

    and the activations of one micro-batch (`_activations`).

    Args:
        targets: bytes of the teachers' targets that a micro-batch reads.
        heads: bytes of the teachers' output layers.
        on_gpu: rows are padded wider, and what only CPUs need is 0.
    """
    parallel, item = config.student.parallel, ITEM_SIZE[config.student.dtype]
    tp, shards = parallel.tp, parallel.dp // parallel.replicas * parallel.sp
    trained, frozen = held(model, tp)
    shard, quantization = ceil(trained / shards), config.student.quantization
    tokens = _tokens(config, config.train.micro_batch_size, on_gpu)
    # FSDP does not see quantised weights.
    seen = trained + frozen - model.tables // tp if quantization is None else trained
    unit = max(seen // max(model.num_layers, 1), model.tables // tp)
    whole = model.parameters - model.frozen  # trained as a whole, unlike those with adapters
    in_unit = min(unit, max(whole, (model.trained - whole) // max(model.num_layers, 1)))
    if parallel.dp * parallel.ranks_per_row == 1:
        gathered = (item * shard if item < ITEM_SIZE["fp32"] else 0) + item * in_unit
    elif shards > 1:
        gathered = 2 * item * unit + 8 * in_unit
    else:
        gathered = item * shard + in_unit * (item + 8)
    copies_in_background = config.checkpoint.every and config.checkpoint.async_save and not on_gpu
    return WorkerMemory(
        worker="student",
        count=parallel.dp * parallel.ranks_per_row,
        weights=4 * shard + _frozen_weights(config.student, model, shards),
        gradients=4 * shard,
        accumulated=_accumulated(config, model),
        optimizer=8 * shard,
        gathered=gathered,
        scratch=(0 if on_gpu else 4 * shard) + _dequantized(config.student, model),
        activations=_activations(config, model, tokens, item, on_gpu),
        logits=_logits(config, model, on_gpu),
        targets=targets,
        heads=heads,
        saving=12 * shard if copies_in_background else 0,
        loading=0 if on_gpu else model.bytes_on_disk // ((shards if quantization is None else 1) * tp),
    )


def _dequantized(student: StudentConfig, model: ModelFacts) -> int:
    """Bytes of the quantised weights that exist in the compute dtype at once."""
    if student.quantization is None:
        return 0
    item = ITEM_SIZE[student.dtype]
    # The largest weight; and, because autograd keeps them, the experts of all layers, or of the one that is recomputed.
    experts = model.expert_parameters // (max(model.num_layers, 1) if student.activation_checkpointing else 1)
    return made_weight_bytes(student.quantization, model, item) // student.parallel.tp + item * experts


def _frozen_weights(student: StudentConfig, model: ModelFacts, shards: int) -> int:
    """Bytes that one rank holds of the weights that are not trained, over `shards` of FSDP."""
    # Modules to save are taken to be embeddings or the output layer, if these are large enough.
    item, tp = ITEM_SIZE[student.dtype], student.parallel.tp
    _, frozen = held(model, tp)
    if student.quantization is None:
        return item * ceil(frozen / shards)
    plain = ceil(max(0, model.tables - (model.parameters - model.frozen)) / tp)
    layers = bytes_of_weights(student.quantization, model, item, frozen - plain)
    return layers + item * ceil(plain / shards)


def fused_loss(config: Config, columns: int, *, known_head: bool, on_gpu: bool) -> bool:
    """Whether the student's logits are made a chunk at a time (`loss.fused`).

    Args:
        columns: of the student's output layer, over all tensor-parallel ranks.
        known_head: see `ModelFacts`; of another model only its own forward can make the logits.
        on_gpu: rows are padded wider.
    """
    if config.loss.fused != "auto" or not known_head:
        return config.loss.fused == "on"
    return micro_batch_logits(config, columns, on_gpu=on_gpu) > FUSED_FROM_BYTES


def micro_batch_logits(config: Config, columns: int, *, on_gpu: bool) -> int:
    """Bytes of a micro-batch's logits on one rank, in the compute dtype."""
    tokens = _tokens(config, config.train.micro_batch_size, on_gpu)
    return tokens * ceil(columns / config.student.parallel.tp) * ITEM_SIZE[config.student.dtype]


def fused_chunk(config: Config, columns: int, *, on_gpu: bool) -> int:
    """Bytes of the logits that a fused loss holds at once on one rank, with all that is computed from them, at most."""
    tokens = _tokens(config, config.train.micro_batch_size, on_gpu)
    row = FUSED_BYTES_PER_LOGIT * ceil(columns / config.student.parallel.tp)
    most = FUSED_CHUNK_BYTES_GPU if on_gpu else FUSED_CHUNK_BYTES
    return min(row * tokens, max(most, row * FUSED_LEAST_ROWS))


def _logits(config: Config, model: ModelFacts, on_gpu: bool) -> int:
    """Bytes of the student's logits and of what the loss makes of them; the formulas are in `student_memory`."""
    if not fused_loss(config, model.vocabulary_columns, known_head=model.known_head, on_gpu=on_gpu):
        return 3 * micro_batch_logits(config, model.vocabulary_columns, on_gpu=on_gpu)
    tokens = _tokens(config, config.train.micro_batch_size, on_gpu)
    columns = ceil(model.vocabulary_columns / config.student.parallel.tp)
    chunk = fused_chunk(config, model.vocabulary_columns, on_gpu=on_gpu)
    others = max(0, len(config.running_teachers) - 1) * ITEM_SIZE[config.student.dtype]
    return chunk + (4 + others) * columns * model.hidden_size + 4 * tokens * model.hidden_size


def reduces_once_per_step(student: StudentConfig, parameters: int) -> bool:
    """Whether gradients are reduced once per step, after its last micro-batch (`student.gradient_sync`).

    Args:
        parameters: number of parameters of the whole model.
    """
    if student.gradient_sync == "auto":
        return 4 * parameters // student.parallel.tp <= WHOLE_GRADIENT_BYTES
    return student.gradient_sync == "step"


def _accumulated(config: Config, model: ModelFacts) -> int:
    """Bytes of the unsharded fp32 sum of gradients."""
    # 0 if gradients are reduced after every micro-batch, on a single shard, where that sum is the gradient itself, and with one micro-batch
    # per step, where there is nothing to sum. Documents that are split make more of them.
    parallel = config.student.parallel
    rows_at_once = parallel.dp * config.train.micro_batch_size
    splits = any(config.splits_documents(kind) for kind in ("text", "messages"))
    several = config.train.global_batch_size > rows_at_once or splits
    sharded = parallel.dp * parallel.sp > parallel.replicas
    if not (several and sharded and reduces_once_per_step(config.student, model.trained)):
        return 0
    return 4 * held(model, parallel.tp)[0]


def _activations(config: Config, model: ModelFacts, tokens: int, item: int, on_gpu: bool) -> int:
    """Bytes of the activations of one micro-batch that the backward pass of a Llama-like decoder needs."""
    # Per token and layer, with b bytes per element:
    #     2 h (2 b + 4)    input and output of two norms (h: hidden size), and an fp32 copy; not split over tp
    #     4 b q / tp       queries before and after the rotation, attention's output and its contiguous copy (q: size of
    #                      all queries of a token)
    #     3 b k / tp       keys before and after the rotation, values (k: size of all keys of a token)
    #     4 b i / tp       gate, up, activation, product (i: intermediate size; of a mixture, of the experts that it visits)
    #     2 b h e          input and output of each of the e experts that it visits
    # Families in FUSED split none of these over tp. With activation checkpointing only each layer's input is kept, and the activations of
    # the one layer that is being recomputed; on a GPU with activation offload, the inputs of two layers.
    # Under sequence parallelism queries, keys, values and attention's output exist a second time, with the other division.
    student = config.student
    tp = 1 if model.family in FUSED else student.parallel.tp
    hidden, intermediate = model.hidden_size, model.intermediate_size // (1 if model.experts_per_token else tp)
    queries, key_value = model.head_size * model.num_heads // tp, model.key_size // tp
    norms = 2 * hidden * (2 * item + 4)
    experts = 2 * hidden * model.experts_per_token
    layer = norms + item * (4 * queries + 3 * key_value + 4 * intermediate + experts)
    if student.parallel.sp > 1:
        repeated = key_value * max(1, student.parallel.sp * tp // max(model.num_key_value_heads, 1))
        layer += item * (2 * queries + 2 * repeated)
    if student.activation_checkpointing:
        kept = min(2, model.num_layers) if student.activation_offload and on_gpu else model.num_layers
        return tokens * (kept * hidden * item + layer)
    return tokens * model.num_layers * layer


def _tokens(config: Config, rows: int, on_gpu: bool) -> int:
    """Positions, padding included, that one rank holds of `rows` of the student's rows of the maximum width."""
    width = row_width(config.data.max_length, on_gpu=on_gpu, divisor=config.width_divisor)
    return rows * width // config.student.parallel.sp


# The estimated memory of a teacher, and of a process that evaluates models.

TEACHER_CHUNK_TOKENS = 1024
"""A teacher computes the logits of at most this many tokens at a time: a larger matrix product is no faster."""
TEACHER_CHUNK_BYTES = 256 * 2**20
"""Upper bound on the fp32 logits of such a chunk on one rank."""
PROMPT_TOKENS = 1024
"""Assumed tokens of a prompt with its answer in an evaluation; the cache grows in proportion to them."""


def teacher_memory(
    config: Config, teacher: TeacherConfig, model: ModelFacts, *, targets: int = 0, on_gpu: bool = False
) -> WorkerMemory:
    """Estimated peak memory of one teacher process.

    It holds its weights over tp (`quantization.weight_bytes`), the widest activations of one layer for its positions, and the
    logits of one chunk.

    On a CPU the pages of the weight files count as memory of the process, and reading them may be its peak.

    Args:
        targets: bytes of the ring or slots that the process holds.
    """
    tp, item = teacher.parallel.tp, ITEM_SIZE[teacher.dtype]
    intermediate = model.intermediate_size // (1 if model.family in FUSED or model.experts_per_token else tp)
    tokens = _teacher_tokens(config, teacher, on_gpu)
    return WorkerMemory(
        worker=teacher.name,
        count=teacher.parallel.dp * teacher.parallel.ranks_per_row,
        weights=ceil(weight_bytes(teacher.quantization, model, item) * sum(held(model, tp)) / model.parameters),
        scratch=made_weight_bytes(teacher.quantization, model, item) // tp,
        activations=tokens * item * ((6 + 3 * model.experts_per_token) * model.hidden_size + 3 * intermediate),
        logits=teacher_logits(config, teacher, model, on_gpu=on_gpu),
        targets=targets,
        loading=0 if on_gpu else model.bytes_on_disk // tp,
    )


def teacher_logits(config: Config, teacher: TeacherConfig, model: ModelFacts, *, on_gpu: bool) -> int:
    """Bytes of the logits that a teacher's rank holds at once, in its dtype and in two fp32 copies.

    It may take fewer tokens at a time where little is free on a GPU.
    """
    columns = ceil(model.vocabulary_columns / teacher.parallel.tp)
    tokens = _teacher_tokens(config, teacher, on_gpu)
    chunk = max(1, min(TEACHER_CHUNK_TOKENS, TEACHER_CHUNK_BYTES // (4 * columns), tokens))
    return chunk * columns * (ITEM_SIZE[teacher.dtype] + 8)


def evaluator_memory(config: Config, model: ModelFacts, *, on_gpu: bool = False) -> WorkerMemory:
    """Estimated peak memory of a process that evaluates a model, the student's copy or a teacher, on suites.

    These are the weights in the dtype of their files (fp32 on a CPU) and, for a batch of prompts with PROMPT_TOKENS
    tokens each, the keys and values, and the logits of one position per prompt. Tensor parallelism splits the weights
    and, unless the family is in FUSED, the keys and values, but not the logits.
    """
    tp = config.evaluate.parallel.tp
    item = max(1, model.bytes_on_disk // max(model.parameters, 1)) if on_gpu else 4
    rows = config.evaluate.batch_size
    cache = rows * PROMPT_TOKENS * model.num_layers * 2 * model.key_size * item
    return WorkerMemory(
        worker="evaluator",
        count=tp,
        weights=item * sum(held(model, tp)),
        logits=rows * model.vocabulary_columns * (item + 8),
        cache=cache if model.family in FUSED else cache // tp,
        loading=0 if on_gpu else model.bytes_on_disk // tp,
    )


def _teacher_tokens(config: Config, teacher: TeacherConfig, on_gpu: bool) -> int:
    """Positions, padding included, that one rank holds of a teacher's micro-batch of the maximum width."""
    width = row_width(config.length_of(teacher), on_gpu=on_gpu, divisor=config.width_divisor)
    return config.rows_of(teacher) * width // teacher.parallel.sp


# The estimated memory of all workers of a run.


def worker_memory(config: Config, facts: Facts, slots: Sequence[int], rings: Sequence[int]) -> tuple[WorkerMemory, ...]:
    """Estimates for the student, the running teachers and, with suites, the evaluator, in this order.

    A worker whose model's facts are not known is left out, and teachers that an engine runs, which takes what it is given.

    Args:
        slots: bytes of one slot, per running teacher.
        rings: bytes of all slots of one rank, per running teacher.
    """
    workers = []
    on_gpu, running = facts.gpus > 0, config.running_teachers
    if facts.student is not None:
        heads = _heads(config, facts, facts.student, on_gpu)
        # A student micro-batch reads at least one whole slot of each teacher, and several if it has more rows than a slot.
        rows = config.train.micro_batch_size
        read = sum(max(slot, slot * rows // config.rows_of(teacher)) for slot, teacher in zip(slots, running))
        workers.append(student_memory(config, facts.student, targets=read, heads=heads, on_gpu=on_gpu))
    # The ring is memory of the teacher's process, except with Ray's object store, which holds the slots itself.
    owned = config.transport in ("shared_memory", "cuda_ipc") or (on_gpu and config.transport == "auto")
    for (teacher, known), slot, ring in zip(facts.by_teacher(config), slots, rings):
        if known.model is not None and not teacher.origin.engine:
            targets = ring + slot if owned else 2 * slot
            workers.append(teacher_memory(config, teacher, known.model, targets=targets, on_gpu=on_gpu))
    if facts.student is not None and config.evaluate.suites:
        evaluated = [facts.student]
        if config.evaluate.teachers:
            evaluated += [known.model for _, known in facts.by_teacher(config) if known.model is not None]
        memory = (evaluator_memory(config, model, on_gpu=on_gpu) for model in evaluated)
        workers.append(max(memory, key=lambda worker: worker.total))
    return tuple(workers)


def _heads(config: Config, facts: Facts, student: ModelFacts, on_gpu: bool) -> int:
    """Bytes of the teachers' output layers in one student process."""
    # Token by token, a rank needs the columns of its own vocabulary shard only; a cross-tokenizer loss needs all columns. CPUs keep the
    # layers in fp32, the dtype they compute in. 0 without a teacher that exports hidden states.
    total = 0
    for teacher, known in facts.by_teacher(config):
        model = known.model
        if teacher.export != "hidden" or model is None:
            continue
        columns = ceil(student.vocabulary_columns / config.student.parallel.tp)
        if known.cross_tokenizer_loss is not None:
            columns = model.vocabulary_columns
        total += columns * model.hidden_size * (ITEM_SIZE[teacher.dtype] if on_gpu else 4)
    return total
