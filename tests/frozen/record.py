"""What today's code makes of a frozen past: what it loads, the next batch, the next three steps, the scores.

`make.py` writes this down at the commit that is frozen; the tests make it again and compare.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill_rl.config.load import load_config
from distill_rl.config.schema import Config
from distill_rl.parallel.mesh import World, close_world, open_world
from distill_rl.student.checkpoint import trained_tensors
from tests.helpers.one_process import Batch, OneProcess

RUNS = {"two-teachers": "step-4", "lora": "step-4"}
"""Run → its newest checkpoint, from which it goes on."""
STORES = ("exact", "compact")
STEPS = 3
MEASURED = ("train/loss", "train/kl_loss", "train/nll_loss", "train/grad_norm")


@contextmanager
def one_thread() -> Iterator[World]:
    """A world of one rank, whose torch uses one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    world = open_world(rank=0, dp=1, tp=1)
    try:
        yield world
    finally:
        close_world(world)
        torch.set_num_threads(before)


def run_config(name: str, settings: Sequence[str] = ()) -> Config:
    """The settings with which a frozen run is extended by three steps; paths are relative to the frozen folder.

    Args:
        settings: what it needs besides since a correction.
    """
    return load_config(f"runs/{name}/config.yaml", [f"train.steps={4 + STEPS}", *settings])


def checkpoint_of(name: str) -> Path:
    return Path("runs", name, "checkpoints", RUNS[name])


def store_config(store: str) -> Config:
    """A training from a frozen store, from its first step."""
    return load_config("yaml/from-store.yaml", [f"teachers.0.store=targets/{store}", f"train.steps={STEPS}"])


def loaded(run: OneProcess) -> dict[str, Tensor]:
    """Everything that was read from the checkpoint, by the name that it has there, and torch's random state."""
    engine = run.student
    trained = trained_tensors(
        {
            **{name: tensor for name, tensor in engine.model.named_parameters() if tensor.requires_grad},
            **dict(engine.objective.named_parameters(prefix="objective")),
        },
        engine.optimizer,
    )
    whole = {name: _whole(tensor) for name, tensor in trained.items()}
    return whole | {"random.0.cpu": torch.get_rng_state()}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def sha256(tensor: Tensor) -> str:
    """Of dtype, shape and bytes."""
    described = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(described + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def batch_record(batch: Batch) -> dict[str, Any]:
    """The documents of a batch, its position, and its token ids and labels."""
    cursor = batch.documents.cursor
    rows = [part.rows for part in batch.student]
    return {
        "index": batch.documents.index,
        "row_numbers": list(batch.documents.row_numbers),
        "cursor": {name: getattr(cursor, name) for name in ("epoch", "position")},
        "input_ids": [part.input_ids.tolist() for part in rows],
        "labels": [part.labels.tolist() for part in rows],
        "teachers": [[part.rows.input_ids.tolist() for part in theirs] for theirs in batch.teachers],
    }


def steps_of(run: OneProcess) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """The next batch, and what is measured of the next three steps."""
    first: dict[str, Any] = {}
    steps = []
    for batch in run.batches():
        first = first or batch_record(batch)
        metrics = run.step(batch)
        steps.append({name: metrics[name].value for name in MEASURED})
    assert len(steps) == STEPS
    return first, steps


def record_run(name: str, world: World) -> dict[str, Any]:
    run = OneProcess(run_config(name), world, checkpoint_of(name))
    tensors = {key: sha256(tensor) for key, tensor in loaded(run).items()}
    batch, steps = steps_of(run)
    return {"step": run.saved.train.step, "tensors": tensors, "next_batch": batch, "steps": steps}


def record_store(store: str, world: World) -> list[dict[str, float]]:
    return steps_of(OneProcess(store_config(store), world))[1]


def scores(results: Path) -> Mapping[str, Any]:
    """Of an evaluation's folder: score and outcomes of every model, by folder."""
    found = {}
    for file in sorted(results.rglob("exact_match.json")):
        result = json.loads(file.read_text())
        assert math.isfinite(result["score"])
        found[str(file.parent.relative_to(results))] = {key: result[key] for key in ("score", "num_items", "outcomes")}
    return found
