"""A teacher's targets do not depend on how it is split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill_rl.parallel.mesh import open_world
from distill_rl.teacher import engine as targets_module
from distill_rl.teacher.engine import TeacherEngine
from tests.helpers import ranks
from tests.helpers.engines import (
    engine_config,
    engine_targets,
    plain_model,
    plain_topk,
    random_documents,
    rank_batch,
    token_rows,
)
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.ranks

VOCABULARY, WIDTH, TOP, TEMPERATURE = 320, 40, 24, 1.5


def rows_of_two_documents():
    documents = random_documents(8, seed=5, longest=20)
    return token_rows([documents[i : i + 2] for i in range(0, 8, 2)], WIDTH)


def targets_on(dp: int, tp: int, teachers: dict[str, Path], chunk_tokens: int) -> dict[str, dict]:
    targets_module.CHUNK_TOKENS = chunk_tokens
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    batch = rank_batch(rows_of_two_documents(), world.dp_rank, dp)
    targets = {}
    for name, path in teachers.items():
        config = engine_config("unused", [path], loss__top_k=TOP, loss__temperature=TEMPERATURE)
        engine = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
        assert engine.head.chunk == chunk_tokens
        assert not any(parameter.requires_grad for parameter in engine.model.parameters())
        targets[name] = engine_targets(engine, batch)
    return targets


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("teachers")
    return {
        "llama": write_tiny_model(root / "llama", "llama", seed=61),
        "qwen3-uneven": write_tiny_model(root / "qwen3", "qwen3", seed=62, vocab_size=337, tie=True),
        # The second rank holds only padding.
        "qwen2-padding": write_tiny_model(root / "qwen2", "qwen2", seed=63, vocab_size=640),
        "phi3": write_tiny_model(root / "phi3", "phi3", seed=64),
        "gpt2": write_tiny_model(root / "gpt2", "gpt2", seed=65, vocab_size=337, tie=True),
    }


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2)], ids=["dp1tp2", "dp2tp2"])
def test_targets_of_a_split_teacher_match_the_plain_model(teachers, dp: int, tp: int):
    results = ranks.run_ranks(dp * tp, targets_on, dp, tp, teachers, 17)
    for name, path in teachers.items():
        exact = plain_topk(plain_model(path), rows_of_two_documents(), VOCABULARY, TOP, TEMPERATURE)
        for rank in range(0, dp * tp, tp):
            one, other = results[rank][name], results[rank + 1][name]
            assert all(torch.equal(one[key], other[key]) for key in one), "tensor-parallel ranks must agree to the bit"
        targets = {key: torch.cat([results[rank][name][key] for rank in range(0, dp * tp, tp)]) for key in exact}
        assert_same_targets(targets, exact)


def test_split_and_whole_teacher_choose_the_same_entries(teachers):
    (whole,) = ranks.run_ranks(1, targets_on, 1, 1, teachers, 1024)
    split = ranks.run_ranks(2, targets_on, 1, 2, teachers, 17)[0]
    for name in teachers:
        assert_same_targets(split[name], whole[name])


def assert_same_targets(targets: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Equal ids, except where two log-probs differ only by rounding, and equal numbers within 1e-5."""
    assert targets["ids"].shape == wanted["ids"].shape
    differing = targets["ids"] != wanted["ids"]
    assert differing.float().mean() < 0.01
    for key in ("logprobs", "rest_logprob"):
        torch.testing.assert_close(targets[key].double(), wanted[key].double(), rtol=1e-5, atol=2e-5)
    # Only where there is a label: plain_topk and the engine may differ elsewhere.
    labelled = torch.tensor(rows_of_two_documents().labels).flatten() >= 0
    torch.testing.assert_close(
        targets["label_logprob"][labelled].double(), wanted["label_logprob"][labelled].double(), rtol=1e-5, atol=2e-5
    )


def draws_on(dp: int, tp: int, path: Path) -> dict[str, torch.Tensor]:
    targets_module.CHUNK_TOKENS = 17
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    config = engine_config("unused", [path], loss__draws=20, loss__temperature=TEMPERATURE)
    config.teachers[0].export = "sampled"
    engine = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
    return engine_targets(engine, rank_batch(rows_of_two_documents(), world.dp_rank, dp))


@pytest.mark.parametrize("name", ["qwen3-uneven", "qwen2-padding"])
def test_draws_do_not_depend_on_the_layout(teachers, name: str):
    (whole,) = ranks.run_ranks(1, draws_on, 1, 1, teachers[name])
    results = ranks.run_ranks(4, draws_on, 2, 2, teachers[name])
    for first in (0, 2):
        one, other = results[first : first + 2]
        assert all(torch.equal(one[key], other[key]) for key in one), "tensor-parallel ranks must agree to the bit"
    split = {key: torch.cat([results[0][key], results[2][key]]) for key in whole}
    # Split products round logits otherwise, which moves a draw of twenty once in 10,000 rows.
    same = (split["ids"] == whole["ids"]).all(1)
    assert same.float().mean() > 0.98
    assert torch.equal(split["counts"][same], whole["counts"][same])
    for key in ("mean_logprob", "label_logprob"):
        torch.testing.assert_close(split[key][same], whole[key][same], rtol=1e-5, atol=2e-5)


def logits_on(tp: int, path: Path) -> dict[str, torch.Tensor]:
    world = open_world(rank=ranks.rank(), dp=1, tp=tp)
    config = engine_config("unused", [path])
    config.teachers[0].export = "logits"
    engine = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)
    return engine_targets(engine, rank_batch(rows_of_two_documents()))


def test_logits_of_a_split_teacher_are_whole_on_every_rank(teachers):
    (whole,) = ranks.run_ranks(1, logits_on, 1, teachers["qwen3-uneven"])
    one, other = ranks.run_ranks(2, logits_on, 2, teachers["qwen3-uneven"])
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["logits"].shape[1] == 337
    torch.testing.assert_close(one["logits"], whole["logits"], rtol=1e-5, atol=2e-5)
