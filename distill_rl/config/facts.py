"""What is known of a run before it starts: what its files say, and which of its teachers run."""

from __future__ import annotations

from dataclasses import dataclass

from distill_rl.config.schema import Config, TeacherConfig

GPU_WIDTH_MULTIPLE = 128
"""Rows for GPUs are as wide as a multiple of this: whole tiles for attention kernels, and few widths to plan for. At
S % 128 == 64 cuDNN's backward gives NaN gradients on H100 and H200 (pytorch#196678)."""
CPU_WIDTH_MULTIPLE = 8
"""Rows for CPUs, where every position more costs time."""


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
    cross_tokenizer_losses: tuple[str | None, ...] = ()
    """per running teacher: the loss across tokenizers, None where the tokenizer is the student's"""
    teacher_vocabularies: tuple[int | None, ...] = ()
    """ids of each running teacher's tokenizer"""


def running_teachers(config: Config) -> list[TeacherConfig]:
    """The teachers that are started: none where loss.kd_weight is 0."""
    return list(config.teachers) if config.loss.kd_weight > 0 else []


def teacher_rows(config: Config, teacher: TeacherConfig) -> int:
    """Rows per forward of a teacher's rank."""
    return config.train.micro_batch_size if teacher.micro_batch_size is None else teacher.micro_batch_size


def row_width(longest: int, *, on_gpu: bool) -> int:
    """Positions of rows of which the longest holds this many tokens; what is left over is padding.

    So the widest row of a run is `row_width(config.data.max_length)`, which may be more than `data.max_length`.
    """
    multiple = GPU_WIDTH_MULTIPLE if on_gpu else CPU_WIDTH_MULTIPLE
    return -(-max(longest, 1) // multiple) * multiple
