"""A training step on the device: gradient accumulation, evaluations, the fused optimizer, copies and host waits."""

from __future__ import annotations

import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from distill_rl.config.schema import OptimizerConfig
from distill_rl.gpu_check.material import (
    TOP_K,
    VOCABULARY,
    Shape,
    gradients,
    one_rank,
    relative_error,
    settings,
    target_source,
    weights,
    write_model,
)
from distill_rl.parallel.mesh import World
from distill_rl.student.engine import StudentEngine
from distill_rl.student.optim import build_optimizer, clip_gradients
from distill_rl.student.staging import Staging
from distill_rl.types import IGNORE_INDEX, RankBatch, TokenRows

MODEL = Shape("llama", hidden=64)
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


def check(device: torch.device, tiny: bool) -> dict[str, float]:
    """Check what may fail on a GPU but not on a CPU; relative errors, and host waits per micro-batch.

    `tiny` changes nothing, because all models here are small.

    Raises:
        AssertionError: an error above its bound, an undocumented host wait, or a copy that differs.
    """
    with one_rank(device) as world, tempfile.TemporaryDirectory() as folder:
        student = write_model(Path(folder, "student"), MODEL, seed=1, tied=True)
        figures = {
            "micro-batches, gradient": _micro_batches(world, student),
            "evaluations between steps, weights": _evaluations(world, student),
            "fused AdamW against the CPU": _adamw(world.device),
            "copies that differ": _copies(world.device),
            "host waits per micro-batch": _waits(world, student),
        }
        if device.type == "cuda" and find_spec("liger_kernel") is not None:
            figures["liger's kernels, gradient in bf16"] = _liger(world, student)
    return figures


def _micro_batches(world: World, student: Path) -> float:
    """The gradient of a batch computed in two calls of four micro-batches, against a single micro-batch."""
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
    error = relative_error(results[1], results[0])
    return _at_most(error, GRADIENT_BOUND, "micro-batches must not change the gradient")


def _evaluations(world: World, student: Path) -> float:
    """Weights after three steps with evaluations in between against weights without, relative to their change."""
    start, changes = weights(_engine(world, student).model), []
    for with_evaluations in (False, True):
        engine = _engine(world, student)
        for step in range(3):
            if with_evaluations:
                engine.evaluate(_batch(step), _targets(step))
            engine.train_step(_batch(step), _targets(step))
        changes.append({name: tensor.double() - start[name] for name, tensor in weights(engine.model).items()})
    return _at_most(relative_error(changes[1], changes[0]), WEIGHTS_BOUND, "evaluations must not change training")


def _adamw(device: torch.device) -> float:
    """Three clipped AdamW steps of the device's implementation against foreach on the CPU."""
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
    return _at_most(relative_error(results[1], results[0]), ADAMW_BOUND, "the fused AdamW must compute AdamW")


def _copies(device: torch.device) -> float:
    """The number of tensors that differ from their copies, although the device overwrites them right afterwards."""
    draw = torch.Generator().manual_seed(5)
    sizes = [(), (3,), (1000, 7), (0, 2), (4097,)]
    sources = {str(size): torch.randn(size, generator=draw) for size in sizes}
    tensors = {name: source.to(device, copy=True) for name, source in sources.items()}
    for tensor in tensors.values():
        tensor.add_(1)  # queued on the current stream, which the copies must wait for
    copies = Staging(device, buffer_bytes=2048).copied(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    wrong = sum(not torch.equal(copies[name], source + 1) for name, source in sources.items())
    return _at_most(wrong, 0, "a copy must include work queued before it, and none queued after it")


def _waits(world: World, student: Path) -> float:
    """Synchronising CUDA calls per micro-batch, counted by torch's warnings; 0 on a CPU."""
    if world.device.type != "cuda":
        return 0.0
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
    waits = (counts[1] - counts[0]) / (ROWS - 1)
    return _at_most(waits, WAITS_PER_MICRO_BATCH, "a micro-batch must not make the host wait")


def _liger(world: World, student: Path) -> float:
    results = []
    for kernels in ("torch", "liger"):
        engine = _engine(world, student, dtype="bf16", student__kernels=kernels)
        engine.forward_backward(_batch(0), _targets(0))
        results.append(gradients(engine.model))
    return _at_most(relative_error(results[1], results[0]), LIGER_BOUND, "liger must compute the same as torch")


def _engine(world: World, student: Path, **changes: Any) -> StudentEngine:
    config = settings(student, student, optimizer__lr=1e-3, optimizer__eps=1e-5, **changes)
    return StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=8)


def _batch(seed: int) -> RankBatch:
    """Rows of one document each, with all tokens trained on."""
    ids = np.random.default_rng(seed).integers(5, VOCABULARY, (ROWS, WIDTH)).astype(np.int32)
    labels = np.roll(ids, -1, 1)
    labels[:, -1] = IGNORE_INDEX
    positions = np.tile(np.arange(WIDTH, dtype=np.int32), (ROWS, 1))
    return RankBatch(0, 0, TokenRows(ids, labels, positions), ROWS * (WIDTH - 1))


def _targets(seed: int) -> Any:
    """Random top-k targets in host memory, as they arrive from the object store."""
    draw = torch.Generator().manual_seed(100 + seed)
    logprobs = torch.randn(ROWS * WIDTH, VOCABULARY, generator=draw).mul_(2).log_softmax(1)
    top, ids = logprobs.topk(TOP_K, 1)
    rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(1)
    tensors = {"ids": ids.int(), "logprobs": top, "rest_logprob": rest, "label_logprob": logprobs[:, 0].clone()}
    return target_source(tensors, WIDTH, 1.0)


def _at_most(value: float, bound: float, rule: str) -> float:
    assert value <= bound, f"{rule}: {value:.3g} is above {bound:.3g}"
    return float(value)
