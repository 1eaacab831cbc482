"""Asynchronous saving from a GPU with one rank: NCCL for tensors, gloo for the writers."""

import json

import pytest
import torch

from distill_rl.parallel.mesh import close_world, open_world
from distill_rl.student.checkpoint import Staging
from distill_rl.student.engine import StudentEngine
from tests.helpers.engines import engine_config, no_targets, random_documents, rank_batch, token_rows
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.gpu

VOCABULARY, STEPS = 320, 6


@pytest.fixture
def world():
    world = open_world(rank=0, dp=1, tp=1, device="cuda")
    yield world
    close_world(world)


def train(engine, step):
    rows = token_rows([[document] for document in random_documents(4, seed=step)], 24)
    return engine.train_step(rank_batch(rows, index=step), no_targets)["train/nll_loss"].value


def on_host(engine):
    tensors = engine._snapshot().tensors
    return {
        name: (tensor.to_local() if hasattr(tensor, "to_local") else tensor).cpu() for name, tensor in tensors.items()
    }


def test_asynchronous_save_matches_the_gpu_state(world, tmp_path):
    student = write_tiny_model(tmp_path / "student", "llama", seed=61, tie=True)
    config = engine_config(student, loss__kd_weight=0.0, loss__ce_weight=1.0, train__deterministic=True)

    def engine():
        return StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)

    curves, states = {}, {}
    for asynchronous in (False, True):
        trained = engine()
        curves[asynchronous] = []
        for step in range(STEPS):
            curves[asynchronous].append(train(trained, step))
            states[step] = on_host(trained)
            marker = tmp_path / f"written-{step}.json" if asynchronous else None
            trained.save(tmp_path / str(asynchronous) / f"step-{step}", marker)
        trained.finish_saving()
    assert curves[False] == curves[True]
    for step in range(STEPS):
        assert json.loads((tmp_path / f"written-{step}.json").read_text())["error"] is None
        resumed = engine()
        resumed.load(tmp_path / "True" / f"step-{step}")
        loaded = on_host(resumed)
        assert loaded.keys() == states[step].keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in states[step].items())


def test_a_copy_holds_no_gpu_memory(world, tmp_path):
    student = write_tiny_model(tmp_path / "student", "llama", seed=61)
    config = engine_config(student, loss__kd_weight=0.0, loss__ce_weight=1.0)
    engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)
    train(engine, 0)
    before = torch.cuda.memory_allocated()
    copy = engine._snapshot().copied(Staging(torch.device("cuda", 0)))
    assert torch.cuda.memory_allocated() == before
    assert {tensor.device.type for tensor in copy.tensors.values()} == {"cpu"}
