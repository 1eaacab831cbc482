"""Output layers of teachers that send hidden states: opened once at the start, frozen, not part of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from distill_rl.config.schema import TeacherConfig
from distill_rl.losses import HiddenStates, TeacherHidden
from distill_rl.losses.core.streaming import accumulator
from distill_rl.models.files.hub import tokenizer_of, vocabulary_size
from distill_rl.models.load import OutputLayer, read_output_layer
from distill_rl.parallel.mesh import TP, World
from distill_rl.parallel.shards import own_columns
from distill_rl.types import CrossTokenizerSpec


@dataclass(frozen=True)
class TeacherHead(OutputLayer):
    """Computes logits from a teacher's hidden states, for the columns that this rank compares.

    The bias is −inf in columns that stand for no token.
    """

    def attach(self, states: HiddenStates) -> TeacherHidden:
        """Returns a target that joins hidden states with this output layer; its logits are not computed here.

        The loss computes them a chunk at a time.
        """
        return TeacherHidden(
            states.hidden, self.weight, self.softcap, self.scale, label_logprob=states.label_logprob, bias=self.bias
        )


def open_heads(
    teachers: Sequence[TeacherConfig],
    cross_tokenizer_specs: Sequence[CrossTokenizerSpec | None],
    world: World,
    *,
    columns: int,
    tokens: int,
) -> list[TeacherHead | None]:
    """Reads per teacher its output layer onto this rank's device; None for a teacher that does not send hidden states.

    If a teacher has the student's tokenizer, a rank holds the rows for its own columns of the student's logits.
    Otherwise it holds all rows, because chunks are compared over the teacher's whole vocabulary.

    Args:
        cross_tokenizer_specs: per teacher, None if its tokenizer is the student's; empty if all are.
        columns: of the student's logits over all ranks.
        tokens: ids of the student's tokenizer.

    Raises:
        ConfigError: a model or tokenizer that cannot be read.
    """
    local_columns = own_columns(columns, world.mesh[TP])
    heads: list[TeacherHead | None] = []
    for teacher, spec in zip(teachers, tuple(cross_tokenizer_specs) or (None,) * len(teachers)):
        if teacher.export != "hidden":
            heads.append(None)
        elif spec is None:
            heads.append(_open(teacher, local_columns, tokens, world.device))
        else:
            heads.append(_open(teacher, None, vocabulary_size(tokenizer_of(teacher)), world.device))
    return heads


def _open(teacher: TeacherConfig, rows: slice | None, tokens: int, device: torch.device) -> TeacherHead:
    """Reads `rows` of a teacher's output layer (None: all) onto `device`.

    Rows beyond the teacher's last one are zeros, and the bias of every column from `tokens` on is −inf. On a CPU weight
    and bias are converted to fp32; on a GPU they keep the teacher's dtype.
    """
    layer = read_output_layer(teacher.model, rows, dtype=teacher.dtype, revision=teacher.revision)
    weight, bias, first = layer.weight, layer.bias, 0 if rows is None else rows.start
    missing = 0 if rows is None else rows.stop - rows.start - len(weight)
    weight = pad(weight, (0, 0, 0, missing))  # both models have the same tokens; their tables may be padded differently
    known = min(max(tokens - first, 0), len(weight))
    if bias is not None or known < len(weight):
        bias = weight.new_zeros(len(weight)) if bias is None else pad(bias, (0, missing))
        bias[known:] = -torch.inf
    # A CPU computes in fp32; converting once saves converting for every micro-batch.
    dtype = weight.dtype if device.type == "cuda" else accumulator(weight.dtype)
    bias = None if bias is None else bias.to(device, dtype)
    return TeacherHead(weight.to(device, dtype), bias, layer.scale, layer.softcap)
