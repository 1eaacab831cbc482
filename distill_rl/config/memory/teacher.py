"""The estimated memory of a teacher, and of a process that evaluates models."""

from __future__ import annotations

from math import ceil

from distill_rl.config.facts import ModelFacts, row_width
from distill_rl.config.memory.parts import FUSED, ITEM_SIZE, WorkerMemory, held
from distill_rl.config.quantization import made_weight_bytes, weight_bytes
from distill_rl.config.schema import Config, TeacherConfig

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
    intermediate = (
        model.intermediate_size if model.family in FUSED or model.experts_per_token else model.intermediate_size // tp
    )
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
