"""Activations in host memory, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from distill_rl.parallel.mesh import close_world, open_world
from distill_rl.student.engine import StudentEngine
from tests.helpers.engines import engine_config, no_targets, random_documents, rank_batch, token_rows, whole_gradients
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.gpu

LAYERS, HIDDEN, WIDTH, ROWS = 16, 256, 512, 8


def test_offload_frees_the_inputs_of_layers_and_changes_no_bit(tmp_path):
    student = write_tiny_model(tmp_path / "student", "llama", hidden=HIDDEN, layers=LAYERS, positions=WIDTH)
    documents = random_documents(ROWS, seed=4, longest=WIDTH)
    batch = rank_batch(token_rows([[document] for document in documents], WIDTH))
    world = open_world(rank=0, dp=1, tp=1, device="cuda")
    gradients, peaks = [], []
    try:
        for offload in (False, True):
            config = engine_config(
                student,
                student__activation_checkpointing=True,
                student__activation_offload=offload,
                loss__kd_weight=0.0,
                loss__ce_weight=1.0,
                train__micro_batch_size=ROWS,
                train__deterministic=True,
            )
            engine = StudentEngine(config, world, vocabulary_size=320, total_steps=4)
            engine.forward_backward(batch, no_targets)  # once for what is allocated only at the first time
            engine.optimizer.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            engine.forward_backward(batch, no_targets)
            peaks.append(torch.cuda.max_memory_allocated() - before)
            gradients.append(whole_gradients(engine.model))
            del engine
    finally:
        close_world(world)
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
    inputs = LAYERS * ROWS * WIDTH * HIDDEN * 4
    assert peaks[0] - peaks[1] > inputs / 2, (peaks, inputs)
