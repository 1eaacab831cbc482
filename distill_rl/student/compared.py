"""What a student needs of every teacher to be compared with it: a vocabulary projection, an output layer.

Both are opened once at the start, onto this rank's device. Output layers are frozen and not part of a checkpoint. Projections
may be learnt; then they are saved beside an export.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import pad

from distill_rl.align.projection import load_projection
from distill_rl.config.schema import TeacherConfig
from distill_rl.losses import HiddenStates, LearnableProjection, TeacherHidden, VocabularyProjection
from distill_rl.losses.core.rows import accumulator
from distill_rl.losses.targets import Teacher, Wire
from distill_rl.models.files import tokenizer_of, vocabulary_size
from distill_rl.models.load import OutputLayer, read_output_layer
from distill_rl.parallel.mesh import TP, World
from distill_rl.parallel.shards import own_columns
from distill_rl.types import CrossTokenizerSpec

log = logging.getLogger(__name__)

Target = Wire
"""A teacher's targets for one micro-batch, as they arrive."""


@dataclass(frozen=True, slots=True)
class CrossTokenizer:
    """How a student is compared with a teacher of another tokenizer."""

    method: str
    """`loss.cross_tokenizer`"""
    projection: VocabularyProjection | LearnableProjection
    """Between the two vocabularies."""

    def fixed(self) -> VocabularyProjection:
        """The projection with its present values."""
        return self.projection() if isinstance(self.projection, nn.Module) else self.projection


@dataclass(frozen=True, slots=True)
class ComparedTeacher:
    """A teacher, with what the student holds of it."""

    settings: TeacherConfig
    cross: CrossTokenizer | None = None
    """None: it has the student's tokenizer."""
    head: OutputLayer | None = None
    """For the columns that this rank compares; the bias is −inf in those that stand for no token. None: it does not send
    hidden states."""

    def with_head(self, target: Target) -> Teacher:
        """Joins hidden states with the output layer; other targets are returned as they are. No logits are computed here.

        Raises:
            ValueError: hidden states without an output layer.
        """
        if not isinstance(target, HiddenStates):
            return target
        head = self.head
        if head is None:
            raise ValueError("hidden states: need the output layer of their teacher (`head`); got None")
        label = target.label_logprob
        return TeacherHidden(target.hidden, head.weight, head.softcap, head.scale, label_logprob=label, bias=head.bias)


def open_projection(spec: CrossTokenizerSpec, world: World, *, learnable: bool) -> CrossTokenizer:
    """Loads one projection onto the device.

    The first rank logs a warning if the tokenizers differ and the file lacks the stop tokens of either one, as files of
    earlier versions do.

    Args:
        learnable: make a projection of `xtoken` trainable; its parameter is a DTensor, replicated on all ranks if there are several.

    Raises:
        ValueError: a missing or damaged projection.
    """
    stored = load_projection(spec.projection)
    same = stored.student_hash == stored.teacher_hash
    if world.rank == 0 and not same and not (len(stored.student_stops) and len(stored.teacher_stops)):
        log.warning(
            "%s holds no stop tokens of both sides, as written by earlier versions: where an answer ends, they are "
            "compared like other tokens, so a teacher with another stop token may teach not to stop; leave "
            "projection.path out to have the file built anew",
            spec.projection,
        )
    fixed = VocabularyProjection.from_projection(stored).to(world.device)
    if not learnable or spec.method != "xtoken":
        return CrossTokenizer(spec.method, fixed)
    projection = LearnableProjection(fixed)
    if world.world_size > 1:
        # On the mesh of the student's parameters, so that clipping, AdamW and checkpoints handle one kind of parameter.
        mesh = world.parameter_mesh
        placed = DTensor.from_local(projection.logits.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        projection.logits = nn.Parameter(placed)
    return CrossTokenizer(spec.method, projection)


def open_head(
    teacher: TeacherConfig, spec: CrossTokenizerSpec | None, world: World, *, columns: int, tokens: int
) -> OutputLayer | None:
    """Reads a teacher's output layer onto this rank's device; None for a teacher that does not send hidden states.

    If a teacher has the student's tokenizer, a rank holds the rows for its own columns of the student's logits.
    Otherwise it holds all rows, because chunks are compared over the teacher's whole vocabulary.

    Args:
        spec: None if its tokenizer is the student's.
        columns: of the student's logits over all ranks.
        tokens: ids of the student's tokenizer.

    Raises:
        ConfigError: a model or tokenizer that cannot be read.
    """
    if teacher.export != "hidden":
        return None
    rows = None
    if spec is None:
        rows = own_columns(columns, world.mesh[TP])
    else:
        tokens = vocabulary_size(tokenizer_of(teacher))
    layer = read_output_layer(teacher.model, rows, dtype=teacher.dtype, revision=teacher.revision)
    weight, bias = layer.weight, layer.bias
    if rows is not None:  # both models have the same tokens; their tables may be padded differently
        missing, tokens = rows.stop - rows.start - len(weight), tokens - rows.start
        weight = pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else pad(bias, (0, missing))
    known = min(max(tokens, 0), len(weight))
    if bias is not None or known < len(weight):
        bias = weight.new_zeros(len(weight)) if bias is None else bias.clone()
        bias[known:] = -torch.inf
    # A CPU computes in fp32; converting once saves converting for every micro-batch.
    dtype = weight.dtype if world.device.type == "cuda" else accumulator(weight.dtype)
    bias = None if bias is None else bias.to(world.device, dtype)
    return OutputLayer(weight.to(world.device, dtype), bias, layer.scale, layer.softcap)
