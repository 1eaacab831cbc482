"""A training step whose loss makes the logits itself gives the loss and the gradient of one that gets them whole."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distill_rl.config import memory
from distill_rl.losses.core import logits
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import TokenRows
from tests.helpers.engines import (
    engine_config,
    engine_targets,
    fixed_targets,
    no_targets,
    random_documents,
    rank_batch,
    relative_l2,
    token_rows,
    whole_gradients,
)
from tests.helpers.models import write_tiny_model
from tests.helpers.zoo import write_model

VOCABULARY, WIDTH = 300, 24
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie": True},
    "gpt2": {},
    "gemma2": {},  # a softcap
    "granite": {},  # a divisor of the logits
    "cohere": {},  # a factor on the logits
}
SETTINGS: dict[str, dict[str, Any]] = {
    "one teacher": {"teachers": 1},
    "two teachers": {"teachers": 2},
    "a lost teacher": {"teachers": 2, "lost": 0},
    "no teacher": {"teachers": 0, "loss__kd_weight": 0.0, "loss__ce_weight": 1.0},
    "scaled to each other": {"teachers": 1, "loss__dynamic_scale": "exact"},
    "bf16": {"teachers": 1, "student__dtype": "bf16"},
}


@pytest.fixture(scope="module")
def rows() -> TokenRows:
    return token_rows([[document] for document in random_documents(6, seed=7, vocabulary=VOCABULARY)], WIDTH)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("teachers")
    return [
        write_tiny_model(root / name, "llama", seed=5 + number, vocab_size=VOCABULARY)
        for number, name in enumerate("ab")
    ]


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(logits, "PRODUCT_ROWS", 16)


def engine(world, folder: Path, paths, fused: str, **settings) -> StudentEngine:
    settings = {"loss__ce_weight": 0.5, "train__micro_batch_size": 3, **settings}
    config = engine_config(folder, paths, loss__fused=fused, **settings)
    return StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=4)


def source_of(world, paths, rows: TokenRows, lost: int | None):
    if not paths:
        return no_targets
    config = engine_config("unused", paths)
    made = [TeacherEngine(config, teacher, world, vocabulary_size=VOCABULARY) for teacher in config.teachers]
    whole = fixed_targets([engine_targets(teacher, rank_batch(rows)) for teacher in made], WIDTH)

    @contextmanager
    def source(row: int, num_rows: int):
        with whole(row, num_rows) as targets:
            yield [None if number == lost else target for number, target in enumerate(targets)]

    return source


def trained(world, folder, paths, rows, fused: str, *, lost: int | None = None, **settings):
    found = engine(world, folder, paths, fused, **settings)
    assert found.fused == (fused == "on")
    scores = () if lost is None else [float("inf") if number == lost else 0.0 for number in range(len(paths))]
    metrics = found.forward_backward(rank_batch(rows), source_of(world, paths, rows, lost), scores=scores)
    return {name: metric.value for name, metric in metrics.items()}, whole_gradients(found.model)


def assert_same(one, other, bound: float) -> None:
    assert one[0] == pytest.approx(other[0], rel=bound)
    assert relative_l2(one[1], other[1]) < bound


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_a_known_head(world, tmp_path, teachers, rows, family: str):
    folder = write_model(tmp_path / family, family.removesuffix("-tied"), vocab_size=VOCABULARY, **FAMILIES[family])
    assert_same(*(trained(world, folder, teachers[:1], rows, fused) for fused in ("on", "off")), 1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_composition_of_the_objective(world, tmp_path, teachers, rows, name: str):
    settings = dict(SETTINGS[name])
    paths = teachers[: settings.pop("teachers")]
    folder = write_tiny_model(tmp_path / "student", "llama", seed=9, vocab_size=VOCABULARY)
    # Unfused logits are rounded to bf16, fused ones are not.
    bound = 2e-2 if settings.get("student__dtype") == "bf16" else 1e-5
    assert_same(*(trained(world, folder, paths, rows, fused, **settings) for fused in ("on", "off")), bound)


def test_auto_follows_the_size_of_the_logits(world, tmp_path, monkeypatch):
    folder = write_tiny_model(tmp_path / "student", "llama", seed=9, vocab_size=VOCABULARY)
    assert [engine(world, folder, [], fused).fused for fused in ("auto", "on", "off")] == [False, True, False]
    monkeypatch.setattr(memory, "FUSED_FROM_BYTES", 0)
    assert engine(world, folder, [], "auto").fused
