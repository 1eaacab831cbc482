"""The settings of a trial: what is chosen for a pair of models, a text and a machine, and why. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distill_rl.config.facts import GPU_WIDTH_MULTIPLE
from distill_rl.config.schema import Config

Settings = dict[str, Any]
"""By dotted key, as of the configuration."""

LONGEST_ROW_GPU, LONGEST_ROW = 2048, 512
SHORTEST_ROW = 128
DOCUMENTS_PER_ROW = 4
"""Rows are to have room for this many documents of the mean length, so that few are longer than a row."""
TOKENS_PER_STEP_GPU, TOKENS_PER_STEP = 16_384, 2048
"""Few enough for hundreds of steps in minutes."""
MOST_DOCUMENTS = 256
MOST_EPOCHS = 20
TOP_K = 64
WARMUP_STEPS = 5
ADAPTERS_LR = 10
"""Adapters take a rate so many times as large."""
LR_OF_A_BILLION, LR_POWER, LR_RANGE = 5e-5, 0.4, (1e-5, 3e-3)
"""Rate for a billion parameters, the power of their number by which it falls, and its limits."""
CE_WEIGHT = 0.5
FEWEST_DOCUMENTS = 16
HELD_OUT_SHARE, LARGEST_SHARE = 0.1, 0.25
"""Most of the documents that may be held out, and most of them where they are few."""
FEWEST_HELD_OUT = 8
"""Documents with which two students can be compared: fewer say little about any other text."""
MEASURE_SHARE = 0.1
"""Part of the time of a training that measuring the larger model once may take."""
MEASURED_TOKENS = (2048, 50_000)
FLOPS_PER_CORE, FLOPS_PER_GPU = 2e10, 5e13
"""What a forward pass gets of a core or a GPU, cautiously."""
_BITS = {"int8": "in 8 bits", "int4": "in 4 bits", "fp8": "in 8 bits", "as_stored": "as it is stored"}


@dataclass(frozen=True, slots=True)
class Known:
    """What the choice depends on."""

    gpus: int
    cores: int
    student_parameters: int
    teacher_parameters: int
    positions: int | None
    """Longest input of both models, in tokens; None: not limited."""
    vocabulary: int
    """Ids of the smaller tokenizer."""
    documents: int
    tokens_per_document: float
    """Mean, of the student's tokenizer."""
    chats: bool
    turns_known: bool
    """Of chats: whether the assistant's turns can be told from the rest."""
    minutes: float
    """Of each training."""
    quantizes: bool = False
    """Whether the package is installed that weights of 8 and 4 bits need."""
    steps: int | None = None
    """Of each training, if it does not end after `minutes`."""

    @property
    def on_gpu(self) -> bool:
        return self.gpus > 0


@dataclass(frozen=True, slots=True)
class Fit:
    """A way to make a training smaller; from fast to small in FITS."""

    micro_batch: int
    checkpointing: bool = False
    apart: bool = False
    """Teacher and student on GPUs of their own."""
    eight_bits: bool = False
    """The teacher's weights in 8 bits."""
    adapters: bool = False
    """Adapters are trained in place of all weights."""
    four_bits: bool = False
    """The teacher's weights, and those of the student beside its adapters, in 4 bits."""

    @property
    def quantized(self) -> bool:
        return self.eight_bits or self.four_bits

    def settings(self) -> Settings:
        chosen: Settings = {"train.micro_batch_size": self.micro_batch}
        if self.checkpointing:
            chosen["student.activation_checkpointing"] = True
        if self.apart:
            chosen["ray.placement"] = "disaggregated"
        if self.eight_bits:
            chosen["teachers.0.quantization"] = "int8"
        if self.adapters:
            chosen["student.lora"] = {}
        if self.four_bits:
            chosen |= {"teachers.0.quantization": "int4", "student.quantization": "int4"}
        return chosen


FITS = (Fit(8), Fit(4), Fit(2), Fit(1), Fit(1, checkpointing=True))
SMALLEST = (
    Fit(1, checkpointing=True, eight_bits=True),
    Fit(1, checkpointing=True, adapters=True),
    Fit(1, checkpointing=True, eight_bits=True, adapters=True),
    Fit(1, checkpointing=True, adapters=True, four_bits=True),
)
"""What changes the result, too, and comes after everything else."""


def fits(known: Known, documents: int) -> Iterator[Fit]:
    """Yields ways to train, the fastest first, for a number of documents per step.

    CPUs gain nothing from more than four rows at a time.
    """
    for fit in FITS:
        if fit.micro_batch <= min(documents, 8 if known.on_gpu else 4):
            yield fit
    if known.gpus > 1:
        yield Fit(1, checkpointing=True, apart=True)
    for fit in SMALLEST:
        if known.quantizes or not fit.quantized:
            yield fit


def row_length(known: Known) -> int:
    """`data.max_length`: room for several documents of the text, within what both models can read."""
    wanted = _power_of_two_from(DOCUMENTS_PER_ROW * known.tokens_per_document)
    length = min(max(wanted, SHORTEST_ROW), LONGEST_ROW_GPU if known.on_gpu else LONGEST_ROW)
    if known.positions is None:
        return length
    # Rows on a GPU are padded to a multiple, and the padded width counts.
    limit = known.positions // GPU_WIDTH_MULTIPLE * GPU_WIDTH_MULTIPLE if known.on_gpu else known.positions
    return min(length, limit or known.positions)


def documents_per_step(known: Known, length: int) -> int:
    """`train.global_batch_size`: a power of two, at most a quarter of the text."""
    tokens = TOKENS_PER_STEP_GPU if known.on_gpu else TOKENS_PER_STEP
    each = min(known.tokens_per_document, length) if known.chats else known.tokens_per_document
    most = min(tokens / max(each, 1.0), MOST_DOCUMENTS, known.documents / 4)
    return 2 ** math.floor(math.log2(max(most, 1)))


def learning_rate(parameters: int, *, adapters: bool = False) -> float:
    """`optimizer.lr`, with one digit; smaller models take larger rates, and so do adapters."""
    low, high = LR_RANGE
    rate = LR_OF_A_BILLION * (1e9 / max(parameters, 1)) ** LR_POWER * (ADAPTERS_LR if adapters else 1)
    return float(f"{min(max(rate, low), high):.0e}")


def held_out(known: Known) -> int:
    """Number of documents that are held out: as many as the larger model can read in a tenth of `minutes`.

    At most a tenth of the text; but at least FEWEST_HELD_OUT, or a quarter of a text that is shorter than four times that.
    """
    count = min(_readable_tokens(known) / max(known.tokens_per_document, 1.0), HELD_OUT_SHARE * known.documents)
    fewest = min(FEWEST_HELD_OUT, math.floor(LARGEST_SHARE * known.documents))
    return max(round(count), fewest, 1)


def longest_measured(known: Known) -> int | None:
    """Most tokens of a held-out text that are measured, so that long texts take no longer; None: all. Chats are not cut."""
    count, tokens = held_out(known), _readable_tokens(known)
    if known.chats or round(tokens / max(known.tokens_per_document, 1.0)) >= count:
        return None
    return math.floor(tokens / count)


def _readable_tokens(known: Known) -> float:
    """Tokens that the larger model can read in a tenth of `minutes`, within MEASURED_TOKENS."""
    flops = known.gpus * FLOPS_PER_GPU if known.on_gpu else known.cores * FLOPS_PER_CORE
    largest = max(known.student_parameters, known.teacher_parameters, 1)
    low, high = MEASURED_TOKENS
    return min(max(MEASURE_SHARE * 60 * known.minutes * flops / (2 * largest), low), high)


def choose(known: Known, fit: Fit, *, adapters: bool | None = None) -> Settings:
    """All settings of the training with the teacher, but for models, data, length and folder.

    Args:
        adapters: whether adapters are trained, which the rate depends on; None: as `fit` says.
    """
    length = row_length(known)
    precision = "bf16" if known.on_gpu else "fp32"
    chosen: Settings = {
        "student.dtype": precision,
        "teachers.0.dtype": precision,
        "data.max_length": length,
        "data.validation.fraction": held_out(known) / known.documents,
        "data.validation.max_documents": held_out(known),
        "loss.top_k": min(TOP_K, known.vocabulary),
        "loss.kd_weight": 1.0,
        "loss.ce_weight": CE_WEIGHT,
        "optimizer.lr": learning_rate(
            known.student_parameters, adapters=fit.adapters if adapters is None else adapters
        ),
        "schedule.warmup_steps": WARMUP_STEPS,
        "train.epochs": float(MOST_EPOCHS),
        "train.global_batch_size": documents_per_step(known, length),
        "checkpoint.keep_last": 1,
    }
    if known.chats and known.turns_known:
        chosen["data.loss_on"] = "assistant"
    return chosen | fit.settings()


WITHOUT_TEACHER: Mapping[str, Any] = {"loss.kd_weight": 0.0, "loss.ce_weight": 1.0}


def reasons(known: Known, method: str, config: Config) -> list[str]:
    """What was chosen and why, a line each.

    Args:
        method: how teacher and student are compared: `same` for token by token, or the cross-tokenizer loss.
        config: of the training, with what the user chose instead.
    """
    loss, batch = config.loss, config.train.global_batch_size
    if method == "same":
        how = f"same tokenizer: token by token, the teacher's {loss.top_k} likeliest tokens and the rest as one"
    else:
        how = f"different tokenizers: {method}, over chunks of text that both can spell"
    on = "the assistant's turns" if config.data.loss_on == "assistant" else "all tokens"
    ce = f", with {loss.ce_weight:g} x cross-entropy with the text" if loss.ce_weight else ""
    device = f"{known.gpus} GPU{'s' if known.gpus > 1 else ''}" if known.on_gpu else f"CPU, {known.cores} cores"
    documents = f"documents of {known.tokens_per_document:,.0f} tokens on average"
    why = f"few, for many steps in {known.minutes:g} min" if known.steps is None else f"{known.steps:,} of them"
    return [
        f"method    {how}; on {on}{ce}",
        f"rows      of {config.data.max_length} tokens, for {documents}; {way(config)}",
        f"step      {batch} document{'s' if batch > 1 else ''}: {why}",
        f"rate      {config.optimizer.lr:g}: smaller models take larger ones; {config.schedule.warmup_steps} steps of warm-up, "
        f"then a {config.schedule.kind} to the end",
        f"device    {device}: {config.student.dtype}",
    ]


def way(config: Config) -> str:
    """How rows are trained on, with what makes the training smaller."""
    rows, teacher, student = config.train.micro_batch_size, config.teachers[0].quantization, config.student.quantization
    more = [", activations computed again"] if config.student.activation_checkpointing else []
    more += [", teacher and student on GPUs of their own"] if config.ray.placement == "disaggregated" else []
    more += [f", the teacher {_BITS[teacher]}"] if teacher else []
    more += [", low-rank adapters in place of all weights"] if config.student.lora is not None else []
    more += [f", the student's other weights {_BITS[student]}"] if student else []
    return f"{rows} row{'' if rows == 1 else 's'} at a time{''.join(more)}"


def _power_of_two_from(number: float) -> int:
    """The smallest power of two that is not below a number."""
    return int(2 ** math.ceil(math.log2(max(number, 1.0))))
