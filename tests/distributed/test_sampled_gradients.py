"""Draws give one gradient, that of the plain loss over the same draws, however the student is split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill_rl.losses import reference
from distill_rl.losses.targets import target_of
from distill_rl.parallel.mesh import open_world
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from tests.helpers import ranks
from tests.helpers.engines import (
    engine_config,
    engine_targets,
    fixed_targets,
    plain_logits,
    plain_model,
    random_documents,
    rank_batch,
    relative_l2,
    token_rows,
    whole_gradients,
)
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.ranks

VOCABULARY, WIDTH, TEMPERATURE, CE_WEIGHT, DRAWS = 320, 24, 2.0, 0.5, 12


def batch_rows():
    """Four rows with two, one, no and two documents, so that ranks differ in their number of labels."""
    documents = random_documents(5, seed=11, longest=12)
    return token_rows([documents[:2], documents[2:3], [], documents[3:]], WIDTH)


def config_of(student: Path, teacher: Path, fused: str = "off"):
    config = engine_config(
        student, [teacher], loss__temperature=TEMPERATURE, loss__ce_weight=CE_WEIGHT, loss__draws=DRAWS,
        loss__fused=fused,
    )  # fmt: skip
    config.teachers[0].export = "sampled"
    return config


def drawn(student: Path, teacher: Path) -> dict[str, torch.Tensor]:
    """Runs on one rank. The targets of the whole batch."""
    world, config = open_world(rank=ranks.rank(), dp=1, tp=1), config_of(student, teacher)
    return engine_targets(
        TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY), rank_batch(batch_rows())
    )


def gradients(dp: int, tp: int, student: Path, teacher: Path, targets: dict[str, torch.Tensor]) -> dict:
    """Runs on a rank. The whole gradient, by fused loss and micro-batch size."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    batch = rank_batch(batch_rows(), world.dp_rank, dp)
    source = fixed_targets([targets], WIDTH, temperature=TEMPERATURE)
    results = {}
    for fused in ("off", "on"):
        config = config_of(student, teacher, fused)
        engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
        for size in (1, 2):
            config.train.micro_batch_size = size
            engine.forward_backward(batch, source)
            results[fused, size] = whole_gradients(engine.model)
            engine.optimizer.zero_grad()
    return results


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> tuple:
    """Student, teacher, the teacher's draws, and the fp64 gradient of the plain loss over them."""
    root = tmp_path_factory.mktemp("models")
    student = write_tiny_model(root / "student", "llama", seed=20, vocab_size=507, kv_heads=4)
    teacher = write_tiny_model(root / "teacher", "llama", seed=21)
    (targets,) = ranks.run_ranks(1, drawn, student, teacher)
    rows, model = batch_rows(), plain_model(student)
    output = reference.kd_loss(
        plain_logits(model, rows, VOCABULARY), target_of(targets, TEMPERATURE), temperature=TEMPERATURE,
        labels=torch.tensor(rows.labels, dtype=torch.long), kd_ratio=1 / (1 + CE_WEIGHT), reduction="sum",
    )  # fmt: skip
    (output.loss * (1 + CE_WEIGHT) / rank_batch(rows).num_labels).backward()
    return student, teacher, targets, whole_gradients(model)


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (1, 4)], ids=lambda size: str(size))
def test_draws_give_the_reference_gradient(case, dp: int, tp: int):
    *arguments, wanted = case
    for results in ranks.run_ranks(dp * tp, gradients, dp, tp, *arguments):
        for setting, gradient in results.items():
            error = relative_l2(gradient, wanted)
            assert error < 1e-5, f"{setting}: {error:.1e}"
