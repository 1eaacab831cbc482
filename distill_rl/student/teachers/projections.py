"""Loads vocabulary projections onto the student's device, once at the start, and saves those that were learned."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from distill_rl.align.projection import load_projection, save_projection
from distill_rl.losses import LearnableProjection, VocabularyProjection
from distill_rl.parallel.mesh import World
from distill_rl.system.folders import replacing
from distill_rl.types import CrossTokenizerSpec

log = logging.getLogger(__name__)

CrossTokenizerLoss = tuple[str, VocabularyProjection | LearnableProjection]
"""The cross-tokenizer method (`loss.cross_tokenizer`) and the projection between the two vocabularies."""


def open_projections(
    cross_tokenizer_specs: Sequence[CrossTokenizerSpec | None], world: World, *, learnable: bool
) -> list[CrossTokenizerLoss | None]:
    """Loads the projection of each teacher with another tokenizer onto this rank's device.

    Args:
        cross_tokenizer_specs: per teacher, None for one with the student's tokenizer.
        learnable: make the projections of `xtoken` trainable; their parameters are DTensors, replicated on all ranks.

    Returns:
        Per teacher its cross-tokenizer method and projection, or None like its spec.

    Raises:
        ValueError: a missing or damaged projection.
    """
    return [None if spec is None else _open(spec, world, learnable) for spec in cross_tokenizer_specs]


def _open(spec: CrossTokenizerSpec, world: World, learnable: bool) -> CrossTokenizerLoss:
    """Loads one projection onto the device; a trainable one if `learnable` and the method is `xtoken`.

    The first rank logs a warning if the tokenizers differ and the file lacks the stop tokens of either one, as files of
    earlier versions do.
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
        return spec.method, fixed
    projection = LearnableProjection(fixed)
    # On the mesh of the student's parameters, so that clipping, AdamW and checkpoints handle one kind of parameter.
    mesh = world.parameter_mesh
    placed = DTensor.from_local(projection.logits.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    projection.logits = nn.Parameter(placed)
    return spec.method, projection


def save_learned(
    projections: nn.ModuleDict,
    cross_tokenizer_specs: Sequence[CrossTokenizerSpec | None],
    folder: Path,
) -> None:
    """Writes the learned projections into `folder` as `INDEX.safetensors`, in the format that `projection.path` takes.

    The folder is created only if there are any, and replaces an earlier one as a whole.

    Args:
        projections: by the index of the teacher, as in `Objective`.
        cross_tokenizer_specs: per teacher; they name the files that the projections were loaded from.
    """
    if not projections:
        return
    with replacing(folder) as new:
        for teacher, projection in projections.items():
            spec = cross_tokenizer_specs[int(teacher)]
            assert spec is not None
            values = projection().values.detach().cpu().numpy()
            save_projection(replace(load_projection(spec.projection), values=values), new / f"{teacher}.safetensors")


def complete_gradient(parameter: nn.Parameter) -> None:
    """Replaces the gradient of a replicated parameter, of which each rank has a share, by its sum over the ranks.

    Collective over the parameter's mesh. Does nothing if there is no gradient, or if it is not a DTensor.
    """
    if isinstance(parameter.grad, DTensor):
        parameter.grad = parameter.grad.redistribute(placements=[Replicate()] * parameter.grad.device_mesh.ndim)
