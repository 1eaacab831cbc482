"""StudentEngine on the device, against a plain fp64 computation on the CPU (`material`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distill_rl.config.schema import Config
from distill_rl.data.batch.tokenization import Encoded
from distill_rl.parallel.mesh import World
from distill_rl.scaling.shape import Shape
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from tests.gpu.conftest import Figures
from tests.gpu.material import (
    EVERY_MODEL,
    VOCABULARY,
    PlainStudent,
    batch_of,
    documents,
    gradients,
    largest,
    plain_model,
    plain_topk,
    relative_error,
    settings,
    skip_if_large,
    targets_from,
    weights,
    write_model,
)

pytestmark = pytest.mark.gpu

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


@EVERY_MODEL
def test_losses_gradient_and_four_steps_match_fp64(
    world: World, tiny: bool, figures: Figures, tmp_path: Path, shape: Shape
) -> None:
    """Loss and gradient in fp32 on padded and on packed rows, the gradient in bf16, and STEPS whole steps."""
    skip_if_large(shape, tiny)
    assert not torch.backends.cuda.matmul.allow_tf32, "TF32 must be off, but allow_tf32 is set"
    student = write_model(tmp_path / "student", shape, seed=1, tied=True)
    teacher = write_model(tmp_path / "teacher", shape, seed=2)
    config = settings(student, teacher)
    texts = [documents(5, 40, seed=step) for step in range(STEPS)]
    oracle = plain_model(teacher)
    plain = PlainStudent(config, [plain_topk(oracle, step_texts) for step_texts in texts])
    truth = plain.backward(0, texts[0])
    true_gradient = gradients(plain.model)
    for rows, packing in (("padded", False), ("packed", True)):
        losses, gradient = _first_gradient(config, world, texts[0], packing=packing)
        error = largest(abs(loss / expected - 1) for loss, expected in zip(losses, truth))
        figures.within("loss", error, LOSS_BOUND)
        figures.within(f"gradient, {rows}", relative_error(gradient, true_gradient), GRADIENT_BOUND)
    half = settings(student, teacher, dtype="bf16")
    _, gradient = _first_gradient(half, world, texts[0], packing=True)
    figures.within("gradient, bf16", relative_error(gradient, true_gradient), BF16_GRADIENT_BOUND)
    _compare_steps(config, world, texts, plain, figures)


def _first_gradient(
    config: Config, world: World, texts: Sequence[Encoded], *, packing: bool
) -> tuple[tuple[float, float], dict[str, Tensor]]:
    """(KD, CE) and the gradient by parameter of the first step of new engines; updates no weight.

    Args:
        packing: packs several texts into a row; otherwise one text per row.
    """
    batch = batch_of(texts, 96, packing=packing)
    teacher, engine = _engines(config, world)
    metrics = engine.forward_backward(batch, targets_from(teacher, batch))
    return (metrics["train/kl_loss"].value, metrics["train/nll_loss"].value), gradients(engine.model)


def _engines(config: Config, world: World) -> tuple[TeacherEngine, StudentEngine]:
    """A new teacher and a new student engine of one configuration, on this rank."""
    teacher = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
    return teacher, StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)


def _compare_steps(
    config: Config, world: World, texts: Sequence[Sequence[Encoded]], plain: PlainStudent, figures: Figures
) -> None:
    """Trains a new engine and the plain student on packed rows.

    Compares the KD losses after the first step, and the change of the weights over all steps.

    Args:
        texts: the documents of each step.
        plain: the fp64 student; it already holds the gradient of the first step, and is trained on here.
    """
    teacher, engine = _engines(config, world)
    before = weights(plain.model)
    errors: list[float] = []
    for step, step_texts in enumerate(texts):
        batch = batch_of(step_texts, 96, packing=True, index=step)
        metrics = engine.train_step(batch, targets_from(teacher, batch))
        if step:
            kd, _ = plain.backward(step, step_texts)
            errors.append(abs(metrics["train/kl_loss"].value / kd - 1))
        plain.update()
    expected = {name: weight - before[name] for name, weight in weights(plain.model).items()}
    change = {name: weight.double() - before[name] for name, weight in weights(engine.model).items()}
    figures.within("loss, later steps", largest(errors), WEIGHTS_BOUND)
    figures.within("change of weights", relative_error(change, expected), WEIGHTS_BOUND)
