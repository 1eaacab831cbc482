import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from distill_rl.config.rules import problems
from distill_rl.system.environment import ROOT
from tests.bench import memory
from tests.bench.memory import CASES, EXPERTS, SHAPE, TOLERANCE, configuration

RECORD = ROOT / "docs/benchmarks/memory.json"


def test_the_measured_models_have_fifty_million_parameters():
    with torch.device("meta"):
        models = LlamaForCausalLM(LlamaConfig(**SHAPE)), Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE | EXPERTS))
    assert all(model.num_parameters() > 50_000_000 for model in models)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_configuration_that_could_run(case):
    config = configuration(case, Path("model"))
    config.run.name, config.train.steps, config.data.path = "bench", 1, "data"
    assert problems(config) == []
    assert config.data.max_length <= SHAPE["max_position_embeddings"]


def test_the_recorded_estimates_lie_within_the_tolerance():
    record = json.loads(RECORD.read_text())
    assert [row["case"]["name"] for row in record["cases"]] == [case.name for case in CASES]
    assert all(abs(row["estimate"] / row["measured"] - 1) <= TOLERANCE for row in record["cases"])
    assert record["environment"]["commit"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Both models with one layer each."""
    with pytest.MonkeyPatch.context() as patch:
        # The workers take the folder's shape, and this vocabulary.
        patch.setitem(SHAPE, "num_hidden_layers", 1)
        patch.setitem(EXPERTS, "num_hidden_layers", 1)
        folder = tmp_path_factory.mktemp("models")
        memory.write_models(folder)
        yield folder


@pytest.mark.ranks
@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_worker_reports_the_peak_of_a_process_that_holds_a_model(models, role):
    case = replace(CASES[0], role=role, rows=1, length=16)
    assert 2**28 < memory.measure(case, models / case.model) < 2**31
