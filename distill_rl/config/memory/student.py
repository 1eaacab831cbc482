"""The estimated memory of a student, and how it makes its logits and reduces its gradients, which depends on that."""

from __future__ import annotations

from math import ceil

from distill_rl.config.facts import ModelFacts, row_width
from distill_rl.config.memory.parts import FUSED, ITEM_SIZE, WorkerMemory, held
from distill_rl.config.quantization import bytes_of_weights, made_weight_bytes
from distill_rl.config.schema import Config, StudentConfig

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

    With P parameters that are trained, F that are not (`student.lora`), s = dp / replicas · sp shards and b bytes per element
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
    copies_in_background = config.checkpoint.every and config.checkpoint.async_save and not on_gpu
    return WorkerMemory(
        worker="student",
        count=parallel.dp * parallel.ranks_per_row,
        weights=4 * shard + _frozen_weights(config.student, model, shards),
        gradients=4 * shard,
        accumulated=_accumulated(config, model),
        optimizer=8 * shard,
        gathered=2 * item * unit + 8 * in_unit if shards > 1 else item * shard + in_unit * (item + 8),
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
    """Bytes that one rank holds of the weights that are not trained, over `shards` of FSDP.

    Modules to save are taken to be embeddings or the output layer, if these are large enough.
    """
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
    """Bytes of the unsharded fp32 sum of gradients.

    0 if gradients are reduced after every micro-batch, on a single shard, where that sum is the gradient itself, and
    with one micro-batch per step, where there is nothing to sum. Documents that are split make more of them.
    """
    parallel = config.student.parallel
    rows_at_once = parallel.dp * config.train.micro_batch_size
    several = config.train.global_batch_size > rows_at_once or config.may_split_documents
    sharded = parallel.dp * parallel.sp > parallel.replicas
    if not (several and sharded and reduces_once_per_step(config.student, model.trained)):
        return 0
    return 4 * held(model, parallel.tp)[0]


def _activations(config: Config, model: ModelFacts, tokens: int, item: int, on_gpu: bool) -> int:
    """Bytes of the activations of one micro-batch that the backward pass of a Llama-like decoder needs.

    Per token and layer, with b bytes per element:

        2 h (2 b + 4)    input and output of two norms (h: hidden size), and an fp32 copy; not split over tp
        4 b q / tp       queries before and after the rotation, attention's output and its contiguous copy (q: size of
                         all queries of a token)
        3 b k / tp       keys before and after the rotation, values (k: size of all keys of a token)
        4 b i / tp       gate, up, activation, product (i: intermediate size; of a mixture, of the experts that it visits)
        2 b h e          input and output of each of the e experts that it visits

    Families in FUSED split none of these over tp. With activation checkpointing only each layer's input is kept, and
    the activations of the one layer that is being recomputed; on a GPU with activation offload, the inputs of two layers.

    Under sequence parallelism queries, keys, values and attention's output exist a second time, with the other division.

    Args:
        tokens: positions of the micro-batch that this rank holds, padding included.
        item: bytes per element of the compute dtype.
        on_gpu: whether activation offload has an effect.
    """
    student = config.student
    tp = 1 if model.family in FUSED else student.parallel.tp
    hidden, intermediate = model.hidden_size, model.intermediate_size // (1 if model.experts_per_token else tp)
    queries, key_value = model.query_size // tp, model.key_size // tp
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
