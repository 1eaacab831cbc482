"""Training on the device: what one step must compute, and the same bits from run to run and after a checkpoint."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distill_rl.config.schema import OptimizerConfig
from distill_rl.parallel.mesh import World
from distill_rl.student.engine import StudentEngine
from distill_rl.student.optim import build_optimizer, clip_gradients
from distill_rl.student.staging import Staging
from distill_rl.teacher.engine import TeacherEngine
from distill_rl.types import IGNORE_INDEX, RankBatch, TokenRows
from tests.bench.gpu.engines import one_rank
from tests.gpu.check.material import (
    TOP_K,
    VOCABULARY,
    batch_of,
    documents,
    gradients,
    middle,
    relative_error,
    settings,
    small,
    target_source,
    targets_from,
    weights,
    write_model,
)

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
STEPS, SAVED = 4, 2
Run = tuple[list[float], dict[str, Tensor]]
"""Losses of all steps, weights at the end."""


def check_step(device: torch.device, tiny: bool) -> dict[str, float]:
    """Checks what may fail on a GPU but not on a CPU: micro-batches, evaluations, fused AdamW, copies and host waits.

    `tiny` changes nothing, because all models here are small.

    Returns:
        By name: relative errors, the number of copies that differ (always 0), and host waits per micro-batch. The error
        of Liger's kernels is included only on a GPU with `liger_kernel` installed.

    Raises:
        AssertionError: an error above its bound, more host waits than documented, or a copy that differs.
    """
    with one_rank(device) as world, tempfile.TemporaryDirectory() as folder:
        student = write_model(Path(folder, "student"), small("llama", hidden=64), seed=1, tied=True)
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
    """Relative error of a batch's gradient from two calls of four micro-batches, against a single micro-batch.

    A whole-batch evaluation runs between the two calls; it must not change the gradient either.

    Args:
        student: folder of the model.

    Raises:
        AssertionError: the error is above GRADIENT_BOUND.
    """
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
    """Difference of the weights after three steps with and without an evaluation before each, relative to their change.

    Args:
        student: folder of the model.

    Raises:
        AssertionError: the difference is above WEIGHTS_BOUND.
    """
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
    """Relative difference of the weights after three clipped AdamW steps on the device and on the CPU.

    A GPU uses the fused implementation, a CPU foreach. Model and gradients are random and the same on both.

    Raises:
        AssertionError: the difference is above ADAMW_BOUND.
    """
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
    """Checks that `Staging` copies tensors exactly; returns the number of wrong copies, which is 0.

    Each tensor is changed right before the copy, which must include the change, and overwritten right after it.

    Raises:
        AssertionError: a copy is wrong.
    """
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
    """Synchronising CUDA calls that each further micro-batch adds to a step, counted by torch's warnings; 0 on a CPU.

    Args:
        student: folder of the model.

    Raises:
        AssertionError: more than WAITS_PER_MICRO_BATCH.
    """
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
    """Relative difference of one batch's gradients in bf16 with and without Liger's kernels.

    Args:
        student: folder of the model.

    Raises:
        AssertionError: the difference is above LIGER_BOUND.
    """
    results = []
    for kernels in ("torch", "liger"):
        engine = _engine(world, student, dtype="bf16", kernels=kernels)
        engine.forward_backward(_batch(0), _targets(0))
        results.append(gradients(engine.model))
    return _at_most(relative_error(results[1], results[0]), LIGER_BOUND, "liger must compute the same as torch")


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


def _at_most(value: float, bound: float, rule: str) -> float:
    """Returns `value`; raises AssertionError with `rule` and both numbers if it is above `bound`, or NaN."""
    assert value <= bound, f"{rule}: {value:.3g} is above {bound:.3g}"
    return float(value)


def check_resume(device: torch.device, tiny: bool) -> dict[str, float]:
    """Checks that a repeated, a saved and a resumed training have bit for bit the losses and weights of the first.

    Runs in fp32 and in bf16, with a synchronous and an asynchronous save. `tiny` uses a smaller model.

    Returns:
        `runs` and `tensors`: the number of runs compared with a first run, and of their weight tensors.

    Raises:
        AssertionError: a loss or a weight differs in any bit, or an asynchronous save reports an error.
    """
    compared: dict[str, float] = {"runs": 0, "tensors": 0}
    with one_rank(device) as world:
        for dtype in ("fp32", "bf16"):
            with tempfile.TemporaryDirectory() as folder:
                runs = _runs(Path(folder), dtype, world, tiny)
            first = runs.pop("the first run")
            for what, run in runs.items():
                _same(f"{dtype}, {what}", run, first)
                compared["runs"] += 1
                compared["tensors"] += len(run[1])
    return compared


def _runs(root: Path, dtype: str, world: World, tiny: bool) -> dict[str, Run]:
    """The same deterministic training six times, by name: twice straight, and saved and resumed in two ways each.

    Args:
        root: an empty folder, in which models and checkpoints are written.
        dtype: of student and teacher.

    Raises:
        AssertionError: an asynchronous save reports an error.
    """
    shape = small("llama") if tiny else middle("llama")
    student, teacher = write_model(root / "student", shape, seed=1), write_model(root / "teacher", shape, seed=2)
    config = settings(student, teacher, dtype=dtype)
    config.train.deterministic = True
    engine = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)

    def new() -> StudentEngine:
        return StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)

    runs = {name: _train(new(), engine, range(STEPS)) for name in ("the first run", "the second run")}
    return runs | _saved_and_resumed(new, engine, root)


def _saved_and_resumed(new: Callable[[], StudentEngine], teacher: TeacherEngine, root: Path) -> dict[str, Run]:
    """By name, runs that save half-way, and runs that resume from these checkpoints: one each for both kinds of save.

    The losses of a resumed run begin with those from before the save, so that every run has STEPS losses.

    Args:
        new: makes a student engine that has taken no step.
        root: folder for the checkpoints.

    Raises:
        AssertionError: the asynchronous save reports an error.
    """
    runs = {}
    for what, marker in (("a synchronous save", None), ("an asynchronous save", root / "written.json")):
        saved, engine = root / what.replace(" ", "-"), new()
        saved.mkdir()
        losses, _ = _train(engine, teacher, range(SAVED))
        engine.save(saved, marker)
        rest, final = _train(engine, teacher, range(SAVED, STEPS))  # the checkpoint may still be being written
        engine.finish_saving()
        if marker is not None:
            content = json.loads(marker.read_text("utf-8"))
            assert content["error"] is None, f"{what}: {content['error']}"
        runs[f"the run with {what}"] = (losses + rest, final)
        resumed = new()
        resumed.load(saved)
        rest, final = _train(resumed, teacher, range(SAVED, STEPS))
        runs[f"the run resumed from {what}"] = (losses + rest, final)
    return runs


def _train(engine: StudentEngine, teacher: TeacherEngine, steps: Sequence[int]) -> Run:
    """Trains on random documents, the same for the same step number; returns each step's loss and the final weights."""
    losses = []
    for step in steps:
        batch = batch_of(documents(6, 48, seed=step), 128, packing=True, index=step)
        losses.append(engine.train_step(batch, targets_from(teacher, batch))["train/loss"].value)
    return losses, weights(engine.model)


def _same(what: str, run: Run, expected: Run) -> None:
    """Raises AssertionError unless two runs have the same losses and weights, to the bit."""
    for step, (loss, truth) in enumerate(zip(run[0], expected[0], strict=True)):
        assert loss == truth, f"{what}: the loss of step {step + 1} is {loss!r} instead of {truth!r}"
    assert run[1].keys() == expected[1].keys(), f"{what}: other parameters"
    if names := [name for name in expected[1] if not torch.equal(run[1][name], expected[1][name])]:
        error = (run[1][names[0]].double() - expected[1][names[0]].double()).abs().max()
        raise AssertionError(f"{what}: {len(names)} tensors differ, {names[0]} by up to {error:.1e}")
