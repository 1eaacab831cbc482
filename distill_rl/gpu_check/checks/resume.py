"""Bit-identical training with `train.deterministic`: run to run, while saving, and after resuming a checkpoint."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from distill_rl.gpu_check.material import (
    VOCABULARY,
    Shape,
    batch_of,
    differing,
    documents,
    one_rank,
    settings,
    targets_from,
    weights,
    write_model,
)
from distill_rl.parallel.mesh import World
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine

STEPS, SAVED = 4, 2
Run = tuple[list[float], dict[str, Tensor]]
"""Losses of all steps, weights at the end."""


def check(device: torch.device, tiny: bool) -> dict[str, float]:
    """The number of runs and tensors that were compared bit for bit.

    Raises:
        AssertionError: a loss or a weight differs in any bit, or a checkpoint was not written.
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
    """The same training six times: twice straight, and saved and resumed in two ways."""
    shape = Shape("llama") if tiny else Shape("llama", 384, 4, 6, 2)
    student, teacher = write_model(root / "student", shape, seed=1), write_model(root / "teacher", shape, seed=2)
    config = settings(student, teacher, dtype=dtype, optimizer__lr=1e-3, train__deterministic=True)
    engine = TeacherEngine(config, config.teachers[0], world, vocabulary_size=VOCABULARY)

    def new() -> StudentEngine:
        return StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)

    runs = {name: _train(new(), engine, range(STEPS)) for name in ("the first run", "the second run")}
    return runs | _saved_and_resumed(new, engine, root)


def _saved_and_resumed(new: Callable[[], StudentEngine], teacher: TeacherEngine, root: Path) -> dict[str, Run]:
    """Runs that save half-way, and runs that resume from these checkpoints."""
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
    losses = []
    for step in steps:
        batch = batch_of(documents(6, 48, seed=step), 128, packing=True, index=step)
        losses.append(engine.train_step(batch, targets_from(teacher, batch))["train/loss"].value)
    return losses, weights(engine.model)


def _same(what: str, run: Run, expected: Run) -> None:
    for step, (loss, truth) in enumerate(zip(run[0], expected[0], strict=True)):
        assert loss == truth, f"{what}: the loss of step {step + 1} is {loss!r} instead of {truth!r}"
    if names := differing(run[1], expected[1]):
        error = (run[1][names[0]].double() - expected[1][names[0]].double()).abs().max()
        raise AssertionError(f"{what}: {len(names)} tensors differ, {names[0]} by up to {error:.1e}")
