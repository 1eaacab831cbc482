"""Saving beside the training from a GPU: one rank, NCCL for tensors, gloo for the writers."""

import json

import pytest
import torch

from distill_rl.parallel.mesh import close_world, open_world
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
    tensors = engine._snapshot({}).tensors
    return {name: (each.to_local() if hasattr(each, "to_local") else each).cpu() for name, each in tensors.items()}


def test_asynchronous_save_matches_the_gpu_state(world, tmp_path):
    student = write_tiny_model(tmp_path / "student", "llama", seed=61, tie=True)
    config = engine_config(student, loss__kd_weight=0.0, loss__ce_weight=1.0, train__deterministic=True)

    def engine():
        return StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)

    curves, states = {}, {}
    for beside in (False, True):
        mine = engine()
        curves[beside] = []
        for step in range(STEPS):
            curves[beside].append(train(mine, step))
            states[step] = on_host(mine)
            marker = tmp_path / f"written-{step}.json" if beside else None
            mine.save(tmp_path / str(beside) / f"step-{step}", {}, marker)
        mine.finish_saving()
    assert curves[False] == curves[True]
    for step in range(STEPS):
        assert json.loads((tmp_path / f"written-{step}.json").read_text())["error"] is None
        other = engine()
        other.load(tmp_path / "True" / f"step-{step}")
        found = on_host(other)
        assert found.keys() == states[step].keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in states[step].items())


def test_a_copy_holds_no_gpu_memory(world, tmp_path):
    student = write_tiny_model(tmp_path / "student", "llama", seed=61)
    config = engine_config(student, loss__kd_weight=0.0, loss__ce_weight=1.0)
    engine = StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)
    train(engine, 0)
    before = torch.cuda.memory_allocated()
    copy = engine._snapshot({}).copied()
    assert torch.cuda.memory_allocated() == before
    assert {each.device.type for each in copy.tensors.values()} == {"cpu"}
