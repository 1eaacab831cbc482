"""StudentEngine and TeacherEngine on the device, against the plain fp64 training on the CPU (`material`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from distill_rl.config.schema import Config
from distill_rl.data.collate import Encoded
from distill_rl.gpu_check.material import (
    VOCABULARY,
    PlainStudent,
    Shape,
    batch_of,
    documents,
    gradients,
    on_every_model,
    plain_model,
    plain_topk,
    relative_error,
    settings,
    targets_from,
    weights,
    write_model,
)
from distill_rl.parallel.mesh import World
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine

STEPS = 4
LOSS_BOUND = 1e-5
GRADIENT_BOUND = 2e-5
"""fp32 rounds by 6e-8, and a gradient goes through a few hundred roundings in sums that partly cancel: CPUs reach 1e-6.
TF32, which must be off, would give 1e-3, and attention across documents 1e-1."""
WEIGHTS_BOUND = 1e-4
"""Relative to the change over four steps. AdamW divides a gradient by its size, which amplifies the rounding of small
gradients."""
BF16_GRADIENT_BOUND = 0.06
"""bf16 rounds by 4e-3, and a gradient goes through the layers twice; CPUs reach half of this."""


def check(device: torch.device, tiny: bool) -> dict[str, float]:
    """The largest errors over all models, relative to fp64.

    Raises:
        AssertionError: an error above its bound; TF32 is on.
    """
    assert not torch.backends.cuda.matmul.allow_tf32, "TF32 must be off, but allow_tf32 is set"
    return on_every_model(device, tiny, _errors)


def _errors(folder: Path, shape: Shape, world: World) -> Iterator[tuple[str, float, float]]:
    """(what, error, bound)"""
    student = write_model(folder / "student", shape, seed=1, tied=True)
    teacher = write_model(folder / "teacher", shape, seed=2)
    # An epsilon well above the rounding errors of gradients, which AdamW would otherwise scale up to full steps.
    config = settings(student, teacher, optimizer__lr=1e-3, optimizer__eps=1e-5)
    texts = [documents(5, 40, seed=step) for step in range(STEPS)]
    oracle = plain_model(teacher)
    plain = PlainStudent(config, [plain_topk(oracle, step_texts) for step_texts in texts])
    truth = plain.backward(0, texts[0])
    true_gradient = gradients(plain.model)
    for rows, packing in (("padded", False), ("packed", True)):
        losses, gradient = _first_gradient(config, world, texts[0], packing=packing)
        yield "loss", max(abs(loss / expected - 1) for loss, expected in zip(losses, truth)), LOSS_BOUND
        yield f"gradient, {rows}", relative_error(gradient, true_gradient), GRADIENT_BOUND
    half = settings(student, teacher, dtype="bf16")
    _, gradient = _first_gradient(half, world, texts[0], packing=True)
    yield "gradient, bf16", relative_error(gradient, true_gradient), BF16_GRADIENT_BOUND
    yield from _steps(config, world, texts, plain)


def _first_gradient(
    config: Config, world: World, texts: Sequence[Encoded], *, packing: bool
) -> tuple[tuple[float, float], dict[str, torch.Tensor]]:
    """(KD, CE) and the gradient of the first step."""
    batch = batch_of(texts, 96, packing=packing)
    teacher = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
    engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)
    metrics = engine.forward_backward(batch, targets_from(teacher, batch))
    return (metrics["train/kl_loss"].value, metrics["train/nll_loss"].value), gradients(engine.model)


def _steps(
    config: Config, world: World, texts: Sequence[Sequence[Encoded]], plain: PlainStudent
) -> Iterator[tuple[str, float, float]]:
    """Errors over a few steps on packed rows; `plain` already holds the gradient of the first step."""
    teacher = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
    engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)
    before, worst = weights(plain.model), 0.0
    for step, step_texts in enumerate(texts):
        batch = batch_of(step_texts, 96, packing=True, index=step)
        metrics = engine.train_step(batch, targets_from(teacher, batch))
        if step:
            kd, _ = plain.backward(step, step_texts)
            worst = max(worst, abs(metrics["train/kl_loss"].value / kd - 1))
        plain.update()
    expected = {name: weight - before[name] for name, weight in weights(plain.model).items()}
    change = {name: weight.double() - before[name] for name, weight in weights(engine.model).items()}
    yield "loss, later steps", worst, WEIGHTS_BOUND
    yield "change of weights", relative_error(change, expected), WEIGHTS_BOUND
