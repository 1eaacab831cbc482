"""Sharded load, training and export, compared with the same steps written in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill_rl.models.files import read_tokenizer
from distill_rl.parallel.mesh import open_world
from distill_rl.student.engine import StudentEngine
from distill_rl.student.optim import Schedule
from distill_rl.teacher.engine import TeacherEngine
from tests.helpers import ranks
from tests.helpers.engines import (
    engine_config,
    engine_targets,
    fixed_targets,
    plain_logits,
    plain_losses,
    plain_model,
    plain_topk,
    random_documents,
    rank_batch,
    token_rows,
)
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.ranks

VOCABULARY, WIDTH, STEPS = 320, 24, 5
SETTINGS = {
    "loss__ce_weight": 0.25,
    "optimizer__lr": 1e-3,
    # Entries with a gradient below epsilon would move by its rounding error alone.
    "optimizer__eps": 1e-5,
    "optimizer__weight_decay": 0.1,
    "schedule__warmup_steps": 2,
    "train__max_grad_norm": 0.5,
}


def rows_of_step(step: int):
    return token_rows([[document] for document in random_documents(4, seed=100 + step)], WIDTH)


def train_and_export(dp: int, tp: int, student: Path, teacher: Path, out: Path) -> None:
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    config = engine_config(student, [teacher], **SETTINGS)
    teacher_engine = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
    engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)
    for step in range(STEPS):
        batch = rank_batch(rows_of_step(step), world.dp_rank, dp, step)
        source = fixed_targets([engine_targets(teacher_engine, batch)], WIDTH, first_row=batch.first_row)
        engine.train_step(batch, source)
    engine.export(out, read_tokenizer(student), card="# A student")


def plain_run(student: Path, teacher: Path) -> dict[str, torch.Tensor]:
    """AdamW as in the paper, with clipping and the schedule, in fp64 on one process."""
    config = engine_config(student, [teacher], **SETTINGS)
    settings, schedule = config.optimizer, Schedule(config.schedule, peak=config.optimizer.lr, total_steps=STEPS)
    model, teacher_model = plain_model(student), plain_model(teacher)
    parameters = list(model.parameters())
    first = [torch.zeros_like(parameter) for parameter in parameters]
    second = [torch.zeros_like(parameter) for parameter in parameters]
    for step in range(1, STEPS + 1):
        rows = rows_of_step(step - 1)
        target = plain_topk(teacher_model, rows, VOCABULARY, config.loss.top_k)
        kd, ce = plain_losses(plain_logits(model, rows, VOCABULARY), rows.labels, target)
        gradients = torch.autograd.grad((kd + 0.25 * ce) / rank_batch(rows).num_labels, parameters)
        norm = sum(gradient.square().sum() for gradient in gradients).sqrt()
        scale, rate, (beta1, beta2) = min(1.0, 0.5 / norm.item()), schedule(step), settings.betas
        with torch.no_grad():
            for parameter, gradient, mean, square in zip(parameters, gradients, first, second):
                mean.mul_(beta1).add_(scale * gradient, alpha=1 - beta1)
                square.mul_(beta2).add_((scale * gradient).square(), alpha=1 - beta2)
                decay = settings.weight_decay if parameter.ndim > 1 else 0.0
                change = (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + settings.eps)
                parameter.sub_(rate * (change + decay * parameter))
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    root = tmp_path_factory.mktemp("models")
    student = write_tiny_model(root / "student", "qwen3", seed=41, tie=True)
    teacher = write_tiny_model(root / "teacher", "qwen3", seed=42, hidden=48)
    return student, teacher, plain_run(student, teacher)


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2)], ids=["dp1tp1", "dp2tp2"])
def test_the_exported_student_matches_a_plain_run(folders, tmp_path, dp: int, tp: int):
    student, teacher, wanted = folders
    ranks.run_ranks(dp * tp, train_and_export, dp, tp, student, teacher, tmp_path / "out")
    before = dict(plain_model(student).named_parameters())
    exported = dict(plain_model(tmp_path / "out").named_parameters())
    assert exported.keys() == wanted.keys()
    assert max((exported[name] - before[name]).abs().max().item() for name in wanted) > 1e-3
    worst = max((exported[name] - wanted[name]).abs().max().item() for name in wanted)
    assert worst < 1e-5
