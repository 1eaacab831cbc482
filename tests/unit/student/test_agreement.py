"""What a validation pass says about the agreement of student and teachers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from distill_rl.losses import TopKLogprobs, VocabularyProjection
from distill_rl.student.engine import StudentEngine
from distill_rl.student.objective import agreement_of_chunks, one_to_one_rows
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import ChunkRows
from tests.helpers.engines import (
    engine_config,
    engine_targets,
    fixed_targets,
    random_documents,
    rank_batch,
    token_rows,
)
from tests.helpers.models import write_tiny_model

VOCABULARY, WIDTH = 300, 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / name, "llama", seed=i, vocab_size=VOCABULARY) for i, name in enumerate("ab")]


def validated(world, student: Path, teachers: list[Path], fused: str = "off", export: str = "topk", **settings):
    rows = rank_batch(token_rows([[each] for each in random_documents(6, seed=7, vocabulary=VOCABULARY)], WIDTH))
    config = engine_config(student, teachers, loss__fused=fused, train__micro_batch_size=3, **settings)
    for teacher in config.teachers:
        teacher.export = export
    made = [TeacherEngine(config, teacher, world, vocabulary_size=VOCABULARY) for teacher in config.teachers]
    temperature = config.loss.temperature
    source = fixed_targets([engine_targets(each, rows) for each in made], WIDTH, temperature=temperature)
    engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)
    trained = {name: metric.value for name, metric in engine.forward_backward(rows, source).items()}
    assert not any("top1" in name or "acceptance" in name for name in trained)
    found = engine.evaluate(rows, source)
    assert all(metric.weight == rows.num_labels and metric.reduction == "mean" for metric in found.values())
    return {name.removeprefix("validation/"): metric.value for name, metric in found.items()}


@pytest.mark.parametrize("export", ["topk", "hidden", "logits"])
def test_fused_and_whole_logits_give_the_same_agreement(world, folders, export: str):
    fused, whole = (validated(world, folders[0], folders[1:], each, export) for each in ("on", "off"))
    shares, entropies = ["acceptance"], ["teacher_entropy"]
    if export == "topk":
        shares, entropies = ([f"{name}_{bound}" for bound in ("low", "high")] for name in (*shares, *entropies))
    assert set(whole) == {"kl_loss", "nll_loss", "top1_agreement", "student_entropy", *shares, *entropies}
    assert fused == pytest.approx(whole, rel=1e-5)
    assert 0 < whole[shares[0]] <= whole[shares[-1]] < 1
    same = validated(world, folders[0], folders[:1], "off", export)
    assert same["top1_agreement"] == 1
    assert same[shares[-1]] == pytest.approx(1, abs=1e-5)
    assert same[entropies[0]] <= same["student_entropy"] + 1e-5
    assert same["student_entropy"] <= same[entropies[-1]] + 1e-5


def test_a_top_k_tells_bounds_of_the_acceptance(world, folders):
    """What whole logits tell lies between them, and they are one where the top k is the vocabulary."""
    exact = validated(world, folders[0], folders[1:], export="logits")["acceptance"]
    few = validated(world, folders[0], folders[1:], loss__top_k=16)
    assert few["acceptance_low"] + 0.02 < exact < few["acceptance_high"] - 0.02
    whole = validated(world, folders[0], folders[1:], loss__top_k=VOCABULARY)
    assert (whole["acceptance_low"], whole["acceptance_high"]) == pytest.approx((exact, exact), abs=1e-5)


def test_several_teachers_have_one_value_each(world, folders):
    found = validated(world, folders[0], folders)
    bounds = [f"{name}_{bound}" for name in ("acceptance", "teacher_entropy") for bound in ("low", "high")]
    measured = ("kl_loss", "top1_agreement", "student_entropy", *bounds)
    names = {f"{name}/{teacher}" for name in measured for teacher in ("t0", "t1")}
    assert set(found) == {"kl_loss", "nll_loss"} | names
    assert found["top1_agreement/t0"] == 1 > found["top1_agreement/t1"]


def test_top_k_at_another_temperature_has_no_acceptance(world, folders):
    assert set(validated(world, folders[0], folders[:1], loss__temperature=2.0)) == {
        "kl_loss", "nll_loss", "top1_agreement",
    }  # fmt: skip
    dense = validated(world, folders[0], folders[1:], export="hidden", loss__temperature=2.0)
    assert dense["acceptance"] == pytest.approx(
        validated(world, folders[0], folders[1:], export="hidden")["acceptance"], abs=1e-6
    )


def test_draws_have_no_acceptance(world, folders):
    found = validated(world, folders[0], folders[1:], export="sampled", loss__draws=300)
    assert set(found) == {"kl_loss", "nll_loss", "top1_agreement"}
    whole = validated(world, folders[0], folders[1:], export="logits")
    assert found["nll_loss"] == pytest.approx(whole["nll_loss"], rel=1e-5)
    assert found["kl_loss"] == pytest.approx(whole["kl_loss"], rel=0.05)
    same = validated(world, folders[0], folders[:1], export="sampled", loss__draws=300)
    assert same["kl_loss"] == pytest.approx(0, abs=1e-5)
    # The token drawn most often is the most likely one, unless others are as likely to within one draw in 300.
    assert same["top1_agreement"] > 0.5


@pytest.mark.parametrize("unpaired", [0, -1], ids=["without counterpart", "absent"])
def test_chunks_of_one_token_with_a_counterpart_are_compared(unpaired):
    # Chunks of row 0: 1:1, 2:1, 1:1; of row 1: 1:1, 1:1 and 1:2.
    student = np.array([[0, 1, 1, 2, -1], [0, -1, 1, 2, -1]], np.int32)
    teacher = np.array([[-1, 0, 1, 2, -1], [0, 1, 2, 2, -1]], np.int32)
    rows = ChunkRows(student, teacher, 6, 4, 7)
    assert [side.tolist() for side in one_to_one_rows(rows)] == [[0, 3, 5, 7], [1, 3, 5, 6]]
    projection = VocabularyProjection.from_arrays(
        indptr=[0, 1, 2, 3], indices=[4, 3, 2], values=[1.0] * 3, num_teacher=5, student_common=[0, 1, 2],
        teacher_common=[4, 3, 2],
    )  # fmt: skip
    logits = torch.zeros(2, 5, 3)
    logits[0, 0, 1] = logits[0, 3, 2] = logits[1, 0, 0] = logits[1, 2, 1] = 1.0
    first = torch.zeros(10, dtype=torch.int64)  # the teacher's token 0 has no counterpart
    first[6] = unpaired
    first[[1, 3, 5]] = torch.tensor([3, 2, 3])  # the student's 1 and 2, as it says; then 1, where it says 0
    target = TopKLogprobs(first[:, None], torch.full((10, 1), -0.5))
    found = agreement_of_chunks(logits, torch.zeros(2, 5, dtype=torch.int64), target, rows, projection)
    assert found.tolist() == [2, 3, *[0] * 6]
    none = ChunkRows(np.full_like(student, -1), np.full_like(teacher, -1), 0, 0, 0)
    empty = agreement_of_chunks(logits, torch.zeros(2, 5, dtype=torch.int64), target, none, projection)
    assert empty.tolist() == [0] * 8
