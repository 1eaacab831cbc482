"""distill-rl export: writes a checkpoint as a Hugging Face folder, in this process, without Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distill_rl.errors import CheckpointError, ConfigError
from distill_rl.observe.log import say
from distill_rl.run import checkpoints
from distill_rl.types import RunPaths


def export(run: Path, *, checkpoint: str, out: Path | None) -> int:
    """Writes the model of one checkpoint, resharded to a single process, with its tokenizer and model card; returns 0.

    Args:
        run: the run directory.
        checkpoint: `latest`, or a step (`120`, `step-120`).
        out: new or empty folder; None: `export` of the run directory, which is replaced.

    Raises:
        ConfigError: not a run directory, or an output folder that is not empty.
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    from distill_rl.config.load import load_config
    from distill_rl.config.schema import ParallelConfig
    from distill_rl.models.hub import tokenizer_of, vocabulary_size
    from distill_rl.observe.report.card import model_card
    from distill_rl.parallel.mesh import close_world, open_world
    from distill_rl.student.engine import StudentEngine

    paths = RunPaths(run)
    if not paths.config.is_file():
        remedy = "give the folder that distill-rl train wrote"
        raise ConfigError(f"{run}", "must be a run directory with a config.yaml", remedy=remedy)
    config = load_config(paths.config, [])
    source = _find(paths, checkpoint)
    step = source.state.train.step
    target = out or paths.export
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}", "the output must be a new or empty folder", remedy="choose another --out")
    student = replace(config.student, parallel=ParallelConfig())
    tokenizer = tokenizer_of(student)
    world = open_world(rank=0, dp=1, tp=1)
    try:
        engine = StudentEngine(
            replace(config, student=student),
            world,
            vocabulary_size=vocabulary_size(tokenizer),
            total_steps=max(step, 1),
        )
        engine.load(source.student)
        card = model_card(config, step=step, data_fingerprint=source.state.fingerprints["data"])
        engine.export(target, tokenizer, card)
    finally:
        close_world(world)
    say(f"exported  {target} (step {step})")
    return 0


def _find(paths: RunPaths, checkpoint: str) -> checkpoints.Checkpoint:
    """The checkpoint of a step (`120`, `step-120`), or the newest valid one for `latest`.

    Raises:
        CheckpointError: it does not exist or is damaged.
    """
    if checkpoint != "latest":
        folder = paths.checkpoints / f"step-{checkpoint.removeprefix('step-')}"
        if not folder.exists() and (steps := checkpoints.steps(paths.checkpoints)):
            rule = f"must be latest or one of the run's checkpoints ({', '.join(map(str, steps))})"
            raise CheckpointError("--checkpoint", rule, checkpoint)
        return checkpoints.read(folder)
    newest = checkpoints.CheckpointStore(paths.checkpoints, keep_last=1, keep_best=0).newest()
    if newest is None:
        raise CheckpointError(f"{paths.checkpoints}", "must hold a valid checkpoint", "none")
    return newest
