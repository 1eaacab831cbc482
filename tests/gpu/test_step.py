"""What may fail in a training step on a GPU but not on a CPU: micro-batches, evaluations, fused AdamW, copies, host waits.

All models here are small.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distill_rl.config.schema import OptimizerConfig
from distill_rl.parallel.mesh import World
from distill_rl.student.checkpoint import Staging
from distill_rl.student.engine import StudentEngine
from distill_rl.student.optim import build_optimizer, clip_gradients
from distill_rl.types import IGNORE_INDEX, RankBatch, TokenRows
from tests.gpu.conftest import Figures
from tests.gpu.material import (
    TOP_K,
    VOCABULARY,
    gradients,
    relative_error,
    settings,
    small,
    target_source,
    weights,
    write_model,
)

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 8, 64
GRADIENT_BOUND = 1e-5
"""fp32: the same products, summed in another order."""
WEIGHTS_BOUND = 1e-4
"""Relative to the change over three steps. AdamW divides a gradient by its size, which amplifies the rounding of small
gradients."""
ADAMW_BOUND = 1e-6
"""Two fp32 kernels for the same formula."""
LIGER_BOUND = 0.06
"""Two bf16 gradients that round by 4e-3 in different places; on such a model each is up to 0.03 from fp32."""
WAITS_PER_MICRO_BATCH = 1
"""transformers checks whether positions restart; see docs/architecture.md."""


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("student"), small("llama", hidden=64), seed=1, tied=True)


def test_micro_batches_do_not_change_the_gradient(world: World, student: Path, figures: Figures) -> None:
    """Two calls of four micro-batches against a single one; nor does an evaluation between the two calls."""
    engine, batch = _engine(world, student), _batch(0)
    results = []
    for size in (ROWS, 1):
        engine.config.train.micro_batch_size = size
        half = ROWS // 2 if size == 1 else ROWS
        for first in range(0, ROWS, half):
            part = RankBatch(0, first, batch.rows[first : first + half], batch.num_labels)
            engine.forward_backward(part, _targets(0), last=first + half == ROWS)
            if first + half < ROWS:
                engine.evaluate(batch, _targets(0))
        results.append(gradients(engine.model))
        engine.optimizer.zero_grad()
    figures.within("micro-batches, gradient", relative_error(results[1], results[0]), GRADIENT_BOUND)


def test_evaluations_between_steps_do_not_change_training(world: World, student: Path, figures: Figures) -> None:
    start, changes = weights(_engine(world, student).model), []
    for with_evaluations in (False, True):
        engine = _engine(world, student)
        for step in range(3):
            if with_evaluations:
                engine.evaluate(_batch(step), _targets(step))
            engine.train_step(_batch(step), _targets(step))
        changes.append({name: tensor.double() - start[name] for name, tensor in weights(engine.model).items()})
    figures.within("evaluations between steps, weights", relative_error(changes[1], changes[0]), WEIGHTS_BOUND)


def test_fused_adamw_computes_what_the_cpu_computes(device: torch.device, figures: Figures) -> None:
    """Weights after three clipped steps; a GPU uses the fused implementation, a CPU foreach."""
    config, results = OptimizerConfig(lr=1e-2, weight_decay=0.1), []
    for optimizer_device in (torch.device("cpu"), device):
        draw = torch.Generator().manual_seed(3)
        model = nn.Sequential(nn.Linear(65, 33), nn.Linear(33, 7))
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw)
        model.to(optimizer_device)
        optimizer = build_optimizer(model, config, fused=optimizer_device.type == "cuda")
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw).to(optimizer_device)
            clip_gradients(list(model.parameters()), 1.0)
            optimizer.step()
        results.append(weights(model))
    figures.within("fused AdamW against the CPU", relative_error(results[1], results[0]), ADAMW_BOUND)


@pytest.mark.parametrize("size", [(), (3,), (1000, 7), (0, 2), (4097,)])
def test_a_copy_has_the_work_queued_before_it_and_none_after(device: torch.device, size: tuple[int, ...]) -> None:
    sources = [torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    tensors = {str(i): source.to(device, copy=True) for i, source in enumerate(sources)}
    for tensor in tensors.values():
        tensor.add_(1)  # queued on the current stream, which the copies must wait for
    copies = Staging(device, buffer_bytes=2048).copied(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert all(torch.equal(copies[str(i)], source + 1) for i, source in enumerate(sources))


def test_a_micro_batch_does_not_make_the_host_wait(world: World, student: Path, figures: Figures) -> None:
    """Synchronising CUDA calls that each further micro-batch adds to a step, counted by torch's warnings."""
    if world.device.type != "cuda":
        pytest.skip("a CPU has none to wait for")
    engine, counts = _engine(world, student), []
    for size in (ROWS, 1):
        engine.config.train.micro_batch_size = size
        engine.train_step(_batch(0), _targets(0))
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                engine.forward_backward(_batch(0), _targets(0))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(warning.message) for warning in caught))
        engine.optim_step()
    figures.within("host waits per micro-batch", (counts[1] - counts[0]) / (ROWS - 1), WAITS_PER_MICRO_BATCH)


def test_ligers_kernels_give_the_gradient_of_torch(world: World, student: Path, figures: Figures) -> None:
    if world.device.type != "cuda":
        pytest.skip("Liger's kernels need a GPU")
    pytest.importorskip("liger_kernel")
    results = []
    for kernels in ("torch", "liger"):
        engine = _engine(world, student, dtype="bf16", kernels=kernels)
        engine.forward_backward(_batch(0), _targets(0))
        results.append(gradients(engine.model))
    figures.within("liger's kernels, gradient in bf16", relative_error(results[1], results[0]), LIGER_BOUND)


def _engine(world: World, student: Path, **options: str) -> StudentEngine:
    """A new student engine with the weights of the folder `student`; `options` are passed to `material.settings`."""
    return StudentEngine(settings(student, student, **options), world, vocabulary_size=VOCABULARY, total_steps=8)


def _batch(seed: int) -> RankBatch:
    """A batch of ROWS random documents, one per row and WIDTH tokens each, with all tokens trained on."""
    ids = np.random.default_rng(seed).integers(5, VOCABULARY, (ROWS, WIDTH)).astype(np.int32)
    labels = np.roll(ids, -1, 1)
    labels[:, -1] = IGNORE_INDEX
    positions = np.tile(np.arange(WIDTH, dtype=np.int32), (ROWS, 1))
    return RankBatch(0, 0, TokenRows(ids, labels, positions), ROWS * (WIDTH - 1))


def _targets(seed: int) -> Any:
    """A target source for `StudentEngine` with random top-k targets in host memory, for a batch of `_batch`.

    `label_logprob` is a placeholder: it does not belong to the batch's labels.
    """
    draw = torch.Generator().manual_seed(100 + seed)
    logprobs = torch.randn(ROWS * WIDTH, VOCABULARY, generator=draw).mul_(2).log_softmax(1)
    top, ids = logprobs.topk(TOP_K, 1)
    rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(1)
    tensors = {"ids": ids.int(), "logprobs": top, "rest_logprob": rest, "label_logprob": logprobs[:, 0].clone()}
    return target_source(tensors, WIDTH, 1.0)
