"""distill-rl export: a checkpoint as a Hugging Face folder, in this process, without Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distill_rl.errors import CheckpointError, ConfigError
from distill_rl.observe.log import say
from distill_rl.run import checkpoints
from distill_rl.types import RunPaths


def export(run: Path, *, checkpoint: str, out: Path | None) -> int:
    """Writes the model of one checkpoint; weights are resharded to this one process.

    Raises:
        ConfigError: not a run directory, or the output holds something already.
        CheckpointError: no such checkpoint, or a damaged one.
    """
    from distill_rl.config.load import load_config
    from distill_rl.config.schema import ParallelConfig
    from distill_rl.models.hub import tokenizer_of, vocabulary_size
    from distill_rl.observe.report.card import model_card
    from distill_rl.parallel.mesh import close_world, open_world
    from distill_rl.student.engine import StudentEngine

    paths = RunPaths(run)
    if not paths.config.is_file():
        raise ConfigError(
            f"{run}", "must be a run directory with a config.yaml", remedy="give the folder that distill-rl train wrote"
        )
    config = load_config(paths.config, [])
    found = _find(paths, checkpoint)
    target = out or paths.export
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}", "the output must be a new or an empty folder", remedy="choose another --out")
    student = replace(config.student, parallel=ParallelConfig())
    tokenizer = tokenizer_of(student)
    world = open_world(rank=0, dp=1, tp=1)
    try:
        engine = StudentEngine(
            replace(config, student=student),
            world,
            vocabulary_size=vocabulary_size(tokenizer),
            total_steps=max(found.state.train.step, 1),
        )
        engine.load(found.student)
        engine.export(
            target,
            tokenizer,
            model_card(config, step=found.state.train.step, data_fingerprint=found.state.fingerprints["data"]),
        )
    finally:
        close_world(world)
    say(f"exported  {target} (step {found.state.train.step})")
    return 0


def _find(paths: RunPaths, checkpoint: str) -> checkpoints.Checkpoint:
    if checkpoint != "latest":
        return checkpoints.read(paths.checkpoints / f"step-{checkpoint.removeprefix('step-')}")
    newest = checkpoints.CheckpointStore(paths.checkpoints, keep_last=1, keep_best=0).newest()
    if newest is None:
        raise CheckpointError(f"{paths.checkpoints}", "must hold a valid checkpoint", "none")
    return newest
