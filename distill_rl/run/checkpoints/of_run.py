"""What a run keeps its checkpoints with: the store, the saver, and the checkpoint that it goes on from."""

from __future__ import annotations

from importlib.metadata import version

from distill_rl.config.save import fingerprint
from distill_rl.observe.log import say
from distill_rl.preflight.job import Job
from distill_rl.run.checkpoints import store as checkpoints
from distill_rl.run.checkpoints.saver import Saver
from distill_rl.run.checkpoints.store import Checkpoint, CheckpointStore
from distill_rl.workers.start import RunActors


def checkpoint_store(job: Job) -> CheckpointStore:
    """Returns the store of a run's checkpoints, whose manifests name library versions and fingerprints.

    Reads and writes nothing in the folder.
    """
    settings = job.config.checkpoint
    return CheckpointStore(
        job.paths.checkpoints,
        keep_last=settings.keep_last,
        keep_best=settings.keep_best,
        best_by=settings.best_by,
        scores=job.paths.scores,
        about=about(job),
    )


def about(job: Job) -> dict[str, dict[str, str]]:
    """Returns what manifests of checkpoints say of a run."""
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"libraries": libraries, "fingerprints": {"config": fingerprint(job.config), **job.fingerprints}}


def saver_of(store: CheckpointStore, job: Job, actors: RunActors) -> Saver:
    """Returns the saver of a run's checkpoints, a context manager; in the background if `checkpoint.async_save`."""
    return Saver(
        store,
        actors.student.collective,
        in_background=job.config.checkpoint.async_save,
        deadline_s=job.config.ray.step_timeout_s,
        dead=lambda: any(name.startswith("student-dp") for name in actors.calls.dead()),
        interrupted=lambda: actors.calls.interrupted(),
    )


def find_checkpoint(job: Job, store: CheckpointStore) -> Checkpoint | None:
    """Returns the checkpoint that `checkpoint.resume` names, verified, or None for a fresh start.

    Prints the path of the one to resume from, and a line for each damaged one that is passed over; nothing for None.

    Raises:
        CheckpointError: the checkpoint asked for is missing or damaged, or was made from other data, tokenizers or
            models.
    """
    checkpoint = checkpoints.find(store, job.config.checkpoint.resume, lambda text: say(f"damaged   {text}"))
    if checkpoint:
        checkpoints.require_same(
            checkpoint.state.fingerprints, job.going_on(checkpoint.state.fingerprints).fingerprints
        )
        say(f"resuming  from {checkpoint.path}")
    return checkpoint
