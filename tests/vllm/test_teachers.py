"""A teacher in vLLM against the same teacher in transformers, in fp32; run by `bash launch/test.sh vllm`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed here: bash launch/test.sh vllm")

from distill_rl.config.schema import ParallelConfig
from distill_rl.errors import ConfigError
from distill_rl.parallel.mesh import World, close_world, open_world
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.teacher.scored import ScoredTeacher
from distill_rl.teacher.vllm import VllmScorer
from distill_rl.types import IGNORE_INDEX, RankBatch
from tests.helpers.backends import (
    TOP,
    VOCABULARY,
    WIDTH,
    EveryBackend,
    assert_close_but_for_ties,
    contract_config,
)
from tests.helpers.engines import engine_targets, plain_model, plain_topk, random_documents
from tests.helpers.models import write_tiny_model
from tests.helpers.stores import batch_of
from tests.vllm.material import SHAPE


@pytest.fixture
def world() -> Iterator[World]:
    """A world of one rank on the CPU, in the process group of an engine if one runs. A closed engine has ended its group."""
    opened = open_world(rank=0, dp=1, tp=1)
    yield opened
    close_world(opened)


class TestVllm(EveryBackend):
    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory) -> Path:
        return write_tiny_model(tmp_path_factory.mktemp("teacher"), seed=2, **SHAPE)

    @pytest.fixture(scope="class")
    def scorer(self, model) -> Iterator[VllmScorer]:
        config = contract_config(model, backend="vllm")
        scorer = VllmScorer(config, config.teachers[0])
        yield scorer
        scorer.close()

    @pytest.fixture
    def make(self, world, model, scorer):
        """Backends of one engine, whose start takes seconds."""

        def make(vocabulary_size: int = VOCABULARY, **settings) -> ScoredTeacher:
            config = contract_config(model, backend="vllm", **settings)
            return ScoredTeacher(config, config.teachers[0], world, vocabulary_size=vocabulary_size, scorer=scorer)

        return make

    def test_abandoned_iteration_aborts_its_requests(self, make, batch, scorer):
        backend = make()
        wanted = engine_targets(backend, batch)
        iterator = backend.forward(batch)
        next(iterator)
        iterator.close()
        engine = scorer._engine.llm.llm_engine
        while engine.has_unfinished_requests():  # an aborted request is let go of in the next step
            assert engine.step() == []
        found = engine_targets(backend, batch)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    def test_a_prompt_of_all_positions_is_scored(self, model, scorer):
        prompt = np.arange(5, 5 + WIDTH, dtype=np.int32)
        ((_, scores),) = scorer.score([prompt], TOP)
        assert scores.ids.shape == scores.logprobs.shape == (WIDTH - 1, TOP)

    def test_entries_are_as_many_as_asked(self, scorer):
        prompt = random_documents(1, seed=3)[0]
        wanted = next(scorer.score([prompt], TOP))[1]
        for k in (1, 3):
            found = next(scorer.score([prompt], k))[1]
            np.testing.assert_array_equal(found.ids, wanted.ids[:, :k])
            np.testing.assert_array_equal(found.next_logprobs, wanted.next_logprobs)

    # Last: the engine is closed afterwards.
    def test_closing_twice_is_harmless(self, make, scorer):
        backend = make()
        backend.close()
        backend.close()
        assert scorer._engine.llm is None


def of_hf(model: Path, batch: RankBatch, world: World) -> dict[str, torch.Tensor]:
    config = contract_config(model)
    return engine_targets(TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY), batch)


def of_vllm(model: Path, batch: RankBatch, world: World, **settings) -> dict[str, torch.Tensor]:
    config = contract_config(model, backend="vllm", **settings)
    scorer = VllmScorer(config, config.teachers[0])
    try:
        backend = ScoredTeacher(config, config.teachers[0], world, vocabulary_size=VOCABULARY, scorer=scorer)
        return engine_targets(backend, batch)
    finally:
        scorer.close()


def documents_in_rows(seed: int = 1):
    documents = random_documents(12, seed=seed, longest=WIDTH // 3)
    return batch_of([documents[:3], documents[3:6], documents[6:7], documents[7:10], documents[10:], []], WIDTH)


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "qwen3_moe"])
def test_targets_are_those_of_hf(family, world, tmp_path):
    """Of Transformers itself: our own loader does not know mixtures of experts."""
    model = write_tiny_model(tmp_path, family, seed=3, **SHAPE)
    batch = documents_in_rows()
    labelled = torch.from_numpy(batch.rows.labels.reshape(-1) != IGNORE_INDEX)
    assert labelled.sum() > 60
    found = of_vllm(model, batch, world)
    assert_close_but_for_ties(
        found, plain_topk(plain_model(model, torch.float32), batch.rows, VOCABULARY, TOP), labelled
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs two GPUs")
def test_an_engine_of_two_processes_gives_the_same(world, tmp_path):
    model = write_tiny_model(tmp_path, seed=4, **SHAPE | {"kv_heads": 2})
    batch = documents_in_rows(seed=2)
    hf = of_hf(model, batch, world)
    found = of_vllm(model, batch, world, parallel=ParallelConfig(tp=2))
    assert_close_but_for_ties(found, hf, torch.from_numpy(batch.rows.labels.reshape(-1) != IGNORE_INDEX))


def test_rows_as_long_as_the_positions(world, tmp_path):
    """vLLM refuses such prompts by default, because it always generates a token."""
    model = write_tiny_model(tmp_path, seed=5, **SHAPE | {"positions": WIDTH})
    batch = batch_of([[np.arange(5, 5 + WIDTH, dtype=np.int32)], []], WIDTH)
    hf, vllm = of_hf(model, batch, world), of_vllm(model, batch, world)
    assert_close_but_for_ties(vllm, hf, torch.from_numpy(batch.rows.labels.reshape(-1) != IGNORE_INDEX))


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs have attention for these heads")
def test_unsupported_heads_are_refused(tmp_path):
    model = write_tiny_model(tmp_path)
    config = contract_config(model, backend="vllm")
    with pytest.raises(
        ConfigError, match=r"vllm on CPUs needs attention heads of 32, 64.*; got 8; take the backend hf"
    ):
        VllmScorer(config, config.teachers[0])


def test_weights_with_a_tensor_missing_are_refused_by_name(tmp_path):
    model = write_tiny_model(tmp_path, **SHAPE)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    settings = contract_config(model, backend="vllm")
    with pytest.raises(ConfigError, match=r"vllm must load it; got .*"):
        VllmScorer(settings, settings.teachers[0])
