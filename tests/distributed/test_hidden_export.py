"""Hidden states give the same gradient as whole logits, however teacher and student are split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill_rl.losses import DenseLogits, reference
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
from tests.helpers.zoo import write_model

pytestmark = pytest.mark.ranks

VOCABULARY, WIDTH, TEMPERATURE, CE_WEIGHT = 320, 24, 2.0, 0.5
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]
# Vocabularies wider and narrower than the student's 507; tied and untied, split and whole, with and without a soft cap.
TEACHERS = {
    "qwen2": {"tie": True, "vocab_size": 352},
    "llama": {"vocab_size": 640, "hidden": 48, "kv_heads": 4},
    "gemma2": {"vocab_size": 337},
}
DIVERGENCES = {"qwen2": "forward_kl", "llama": "reverse_kl", "gemma2": "jsd"}


def batch_rows():
    """Four rows with two, one, no and two documents, so that ranks differ in their number of labels."""
    documents = random_documents(5, seed=11, longest=12)
    return token_rows([documents[:2], documents[2:3], [], documents[3:]], WIDTH)


def gradients(dp: int, tp: int, student: Path, teachers: dict[str, Path]) -> dict:
    """Runs on a rank. The whole gradient per teacher, export and micro-batch size."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    batch = rank_batch(batch_rows(), world.dp_rank, dp)
    results = {}
    for name, path in teachers.items():
        for export, sizes in (("hidden", (1, 2)), ("logits", (2,))):
            config = engine_config(
                student, [path], loss__temperature=TEMPERATURE, loss__ce_weight=CE_WEIGHT,
                loss__divergence=DIVERGENCES[name],
            )  # fmt: skip
            config.teachers[0].export = export
            # A teacher of another family, or with too few heads for four ranks, is whole on every rank.
            split = tp == 1 or (name == "qwen2" and tp == 2) or name == "llama"
            teacher_world = world if split else open_world(rank=ranks.rank(), dp=dp * tp, tp=1)
            targets = engine_targets(
                TeacherEngine(config, config.teachers[0], teacher_world, vocabulary_size=VOCABULARY), batch
            )
            source = fixed_targets([targets], WIDTH, first_row=batch.first_row, temperature=TEMPERATURE)
            engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
            for size in sizes:
                config.train.micro_batch_size = size
                engine.forward_backward(batch, source)
                results[name, export, size] = whole_gradients(engine.model)
                engine.evaluate(batch, source)
                engine.optimizer.zero_grad()
            assert not any("head" in parameter for parameter in dict(engine.objective.named_parameters()))
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp("models")
    student = write_tiny_model(root / "student", "llama", seed=20, vocab_size=507, kv_heads=4)
    return student, {name: write_model(root / name, name, **kind) for name, kind in TEACHERS.items()}


@pytest.fixture(scope="module")
def references(folders) -> dict[str, dict[str, torch.Tensor]]:
    """fp64 gradients of plain models with the plain loss over all columns, one document at a time."""
    student, teachers = folders
    rows = batch_rows()
    labels = torch.tensor(rows.labels, dtype=torch.long)
    wanted = {}
    for name, path in teachers.items():
        model = plain_model(student)
        with torch.no_grad():
            target = DenseLogits(plain_logits(plain_model(path), rows, VOCABULARY).flatten(0, 1))
        output = reference.kd_loss(
            plain_logits(model, rows, VOCABULARY), target, labels=labels, divergence=DIVERGENCES[name],
            temperature=TEMPERATURE, kd_ratio=1 / (1 + CE_WEIGHT), reduction="sum",
        )  # fmt: skip
        (output.loss * (1 + CE_WEIGHT) / rank_batch(rows).num_labels).backward()
        wanted[name] = whole_gradients(model)
    return wanted


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS, ids=[f"dp{dp}tp{tp}" for dp, tp in LAYOUTS])
def test_hidden_states_and_logits_give_the_reference_gradient(folders, references, dp: int, tp: int):
    for rank, results in enumerate(ranks.run_ranks(dp * tp, gradients, dp, tp, *folders)):
        for (name, export, size), gradient in results.items():
            error = relative_l2(gradient, references[name])
            assert error < 1e-5, f"{export} of {name}, micro-batch {size}, rank {rank}: {error:.1e}"


def parts(dp: int, tp: int, student: Path, teacher: Path) -> tuple[list[int], float]:
    """(shape of the teacher's output layer on this rank, decrease of KD over three steps)."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    config = engine_config(student, [teacher], optimizer__lr=1e-2)
    config.teachers[0].export = "hidden"
    batch = rank_batch(batch_rows(), world.dp_rank, dp)
    targets = engine_targets(TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY), batch)
    engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
    source = fixed_targets([targets], WIDTH, first_row=batch.first_row)
    before = engine.objective.teachers[0].head.weight.clone()
    history = [engine.train_step(batch, source) for _ in range(3)]
    assert torch.equal(engine.objective.teachers[0].head.weight, before), "the teacher must not be trained"
    kds = [metrics["train/kl_loss"].value for metrics in history if metrics]
    return list(before.shape), kds[0] - kds[-1] if kds else 0.0


def test_a_rank_holds_only_its_columns_of_the_teachers_head(folders):
    student, teachers = folders
    results = ranks.run_ranks(2, parts, 1, 2, student, teachers["llama"])
    assert [shape for shape, _ in results] == [[254, 48], [253, 48]]
    assert results[0][1] > 0.01
