"""Saving beside the training: the saved state is that of the save, training is unaffected, all ranks see errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distill_rl.errors import CheckpointError
from distill_rl.parallel.mesh import World, open_world
from distill_rl.student import checkpoint
from distill_rl.student.engine import StudentEngine
from tests.helpers import ranks
from tests.helpers.engines import engine_config, no_targets, random_documents, rank_batch, token_rows
from tests.helpers.models import write_tiny_model

pytestmark = pytest.mark.ranks

VOCABULARY, WIDTH, STEPS = 320, 24, 3


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "student", "llama", seed=61, tie=True, vocab_size=327)


def engine_on(world: World, student: Path) -> StudentEngine:
    config = engine_config(student, loss__kd_weight=0.0, loss__ce_weight=1.0, optimizer__lr=1e-2)
    return StudentEngine(config, world, vocabulary_size=VOCABULARY, total_steps=STEPS)


def train(engine: StudentEngine, step: int) -> list[float]:
    rows = token_rows([[document] for document in random_documents(4, seed=step)], WIDTH)
    metrics = engine.train_step(rank_batch(rows, engine.world.dp_rank, engine.world.dp, step), no_targets)
    return [metrics[name].value for name in ("train/nll_loss", "train/grad_norm") if metrics]


def local_state(engine: StudentEngine) -> dict[str, torch.Tensor]:
    """Copies of this rank's part of everything that is saved."""
    tensors = engine._snapshot().tensors
    return {
        name: (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone() for name, tensor in tensors.items()
    }


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def written_late(dp: int, tp: int, student: Path, folder: Path) -> tuple[bool, bool, int]:
    """Takes a snapshot, copies it, trains on, and only then writes the copy.

    Returns (whether the uncopied snapshot changed, whether the saved state is the old one, number of missing files).
    """
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    engine = engine_on(world, student)
    train(engine, 0)
    before = local_state(engine)
    live = engine._snapshot()
    copy = live.copied(None)
    train(engine, 1)
    still_live = any(
        not torch.equal(before[name], tensor.to_local() if hasattr(tensor, "to_local") else tensor)
        for name, tensor in live.tensors.items()
        if name.startswith("model.")
    )
    files = checkpoint.save(folder, copy, world)
    loaded = engine_on(world, student)
    loaded.load(folder)
    return still_live, equal(local_state(loaded), before), len(set(files) - {path.name for path in folder.iterdir()})


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_a_late_write_holds_the_copied_state(student, tmp_path, dp, tp):
    for still_live, saved_old_state, num_missing in ranks.run_ranks(
        dp * tp, written_late, dp, tp, student, tmp_path / "x"
    ):
        assert still_live, "an uncopied snapshot must change with training, or this test shows nothing"
        assert saved_old_state
        assert num_missing == 0


def with_and_without_saving(dp: int, tp: int, student: Path, folder: Path) -> list[tuple]:
    """Three steps without saves, with an async save after each step, and with a synchronous save after each step."""
    world = open_world(rank=ranks.rank(), dp=dp, tp=tp)
    outcomes: list[tuple] = []
    loaded = engine_on(world, student)
    for mode in ("never", "beside", "at once"):
        engine = engine_on(world, student)
        losses, states = [], {}
        for step in range(STEPS):
            losses += train(engine, step)
            states[step] = local_state(engine)
            target = folder / mode / f"step-{step}"
            if mode != "never":
                engine.save(target, target.with_suffix(".json") if mode == "beside" else None)
        engine.finish_saving()
        for step in range(STEPS) if mode != "never" else ():
            loaded.load(folder / mode / f"step-{step}")
            assert equal(local_state(loaded), states[step])
        outcomes.append((losses, states))
    return outcomes


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
def test_async_saves_change_no_bit_of_the_run(student, tmp_path, dp, tp):
    for never, beside, at_once in ranks.run_ranks(2, with_and_without_saving, dp, tp, student, tmp_path):
        assert never[0] == beside[0] == at_once[0]
        assert all(equal(never[1][step], beside[1][step]) for step in range(STEPS))
    for step in range(STEPS):
        marker = json.loads((tmp_path / "beside" / f"step-{step}.json").read_text())
        assert marker["error"] is None
        assert set(marker["files"]) == {path.name for path in (tmp_path / "beside" / f"step-{step}").iterdir()}


def failing_saves(folder: Path, student: Path) -> list[str]:
    """Rank 1 cannot write two async saves while training goes on; returns the errors that this rank gets.

    The first error is raised by `finish_saving`, the second by the next save. The save after that succeeds.
    """
    world = open_world(rank=ranks.rank(), dp=2, tp=1)
    engine = engine_on(world, student)
    train(engine, 0)
    for name in ("first", "second"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        if world.rank == 1:
            # A folder with the name of this rank's file, __<rank>_<n>.distcp, makes DCP fail to write it.
            (folder / name / "__1_0.distcp").mkdir()
    torch.distributed.barrier()
    errors = []
    engine.save(folder / "first", folder / "first.json")
    train(engine, 1)
    with pytest.raises(CheckpointError) as caught:
        engine.finish_saving()
    errors.append(str(caught.value))
    engine.save(folder / "second", folder / "second.json")
    train(engine, 2)
    with pytest.raises(CheckpointError) as caught:
        engine.save(folder / "third", folder / "third.json")
    errors.append(str(caught.value))
    engine.save(folder / "third", folder / "third.json")
    engine.finish_saving()
    return errors


def test_a_failed_async_write_names_its_rank_and_the_next_works(student, tmp_path):
    for errors in ranks.run_ranks(2, failing_saves, tmp_path, student, timeout=90):
        assert ["rank 1: " in line and "\n" not in line for line in errors] == [True, True]
    markers = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "second", "third")]
    assert ["rank 1: " in (marker["error"] or "") for marker in markers] == [True, True, False]
    assert markers[2]["error"] is None
