"""Vocabulary projections from their files to the student's device; done once, at the start."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from distill_rl.align.projection import load_projection, save_projection
from distill_rl.losses import LearnableProjection, VocabularyProjection
from distill_rl.parallel.mesh import World
from distill_rl.types import CrossTokenizerSpec

log = logging.getLogger(__name__)

CrossTokenizerLoss = tuple[str, VocabularyProjection | LearnableProjection]
"""The loss across tokenizers, and the way from one vocabulary to the other."""


def open_projections(
    cross_tokenizer_specs: Sequence[CrossTokenizerSpec | None], world: World, *, learnable: bool
) -> list[CrossTokenizerLoss | None]:
    """Per teacher how the student learns from it, None for one that has the student's tokenizer.

    Args:
        learnable: train the projections that are projected through (xtoken).

    Raises:
        ValueError: a damaged projection.
    """
    return [None if spec is None else _open(spec, world, learnable) for spec in cross_tokenizer_specs]


def _open(spec: CrossTokenizerSpec, world: World, learnable: bool) -> CrossTokenizerLoss:
    found = load_projection(spec.projection)
    same = found.student_hash == found.teacher_hash
    if world.rank == 0 and not same and not (len(found.student_stops) and len(found.teacher_stops)):
        log.warning(
            "%s holds no stop tokens of both sides, as files of earlier versions do not: they are compared like other "
            "tokens where an answer ends, and a teacher that stops by another may teach not to stop; leave "
            "projection.path out to have the file built anew",
            spec.projection,
        )
    bridge = VocabularyProjection.from_projection(found).to(world.device)
    if not learnable or spec.method != "xtoken":
        return spec.method, bridge
    projection = LearnableProjection(bridge)
    # On the mesh of the student's parameters, so that clipping, AdamW and checkpoints know one kind.
    mesh = world.parameter_mesh
    placed = DTensor.from_local(projection.logits.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    projection.logits = nn.Parameter(placed)
    return spec.method, projection


def save_learned(
    projections: Mapping[str, LearnableProjection],
    cross_tokenizer_specs: Sequence[CrossTokenizerSpec | None],
    folder: Path,
) -> None:
    """Writes what was learnt of each projection into `folder`, in the form that `projection.path` takes.

    Args:
        projections: by the teacher's number, as `Objective` keeps them.
    """
    for number, projection in projections.items():
        spec = cross_tokenizer_specs[int(number)]
        assert spec is not None
        values = projection().values.detach().cpu().numpy()
        folder.mkdir(exist_ok=True)
        save_projection(replace(load_projection(spec.projection), values=values), folder / f"{number}.safetensors")


def complete_gradient(parameter: nn.Parameter) -> None:
    """Adds up a replicated parameter's gradient, of which every rank has a share. Collective over the mesh."""
    if isinstance(parameter.grad, DTensor):
        parameter.grad = parameter.grad.redistribute(placements=[Replicate()] * parameter.grad.device_mesh.ndim)
