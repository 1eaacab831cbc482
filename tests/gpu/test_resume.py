"""The same bits from run to run, while saving, and after resuming from synchronous and asynchronous checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distill_rl.parallel.mesh import World
from distill_rl.student.engine import StudentEngine
from distill_rl.teacher.engine import TeacherEngine
from tests.gpu.conftest import Figures
from tests.gpu.material import (
    VOCABULARY,
    batch_of,
    documents,
    middle,
    settings,
    small,
    targets_from,
    weights,
    write_model,
)

pytestmark = pytest.mark.gpu

STEPS, SAVED = 4, 2
Run = tuple[list[float], dict[str, Tensor]]
"""Losses of all steps, weights at the end."""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_runs_repeat_their_bits(world: World, tiny: bool, figures: Figures, tmp_path: Path, dtype: str) -> None:
    """A repeated, a saved and a resumed training have the losses and weights of the first."""
    runs = _runs(tmp_path, dtype, world, tiny)
    first = runs.pop("the first run")
    for what, run in runs.items():
        _same(f"{dtype}, {what}", run, first)
        figures["runs"] = figures.get("runs", 0) + 1
        figures["tensors"] = figures.get("tensors", 0) + len(run[1])


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
