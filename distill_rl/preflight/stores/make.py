"""Makes the stores that a run fills, or finds out that those which exist fit."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distill_rl.config.facts import wire_dtype
from distill_rl.config.paths import described_by
from distill_rl.config.schema import Config, TeacherConfig
from distill_rl.errors import StoreError, first_line
from distill_rl.models.files.hub import resolve, tokenizer_hash, tokenizer_of
from distill_rl.store.manifest import FILE, SERVED, Manifest, describe_teacher, require_same, write_manifest

if TYPE_CHECKING:
    from distill_rl.preflight.job import Job


def manifest_of(
    config: Config,
    teacher: TeacherConfig,
    *,
    weights: str,
    tokenizer: str,
    vocabulary_size: int,
    on_gpu: bool,
    captures: bool,
) -> Manifest:
    """What the store of a teacher's targets says of itself, without the files that describe the teacher.

    Args:
        weights, tokenizer, vocabulary_size: see `Manifest`.
        on_gpu: whether the run uses GPUs, which decides `wire_dtype: auto`.
        captures: whether `capture.format` counts; a cache is exact.
    """
    served = teacher.backend == "endpoint"
    return Manifest(
        format=config.capture.format if captures else "exact",
        kind=teacher.export,
        entries=config.loss.draws if teacher.export == "sampled" else min(config.loss.top_k, vocabulary_size),
        temperature=config.loss.temperature,
        wire_dtype=wire_dtype(teacher, on_gpu=on_gpu),
        dtype=SERVED if served else teacher.dtype,
        model=teacher.model,
        revision=teacher.revision,
        weights=weights,
        tokenizer=tokenizer,
        vocabulary_size=vocabulary_size,
        mass=config.capture.mass if captures and config.capture.format == "compact" else None,
    )


def make_stores(job: Job, *, on_gpu: bool, captures: bool) -> None:
    """Makes the store of every teacher whose targets the run stores, or checks that one which exists fits.

    Args:
        on_gpu, captures: as for `manifest_of`.

    Raises:
        StoreError: it holds other targets, or cannot be written.
    """
    for teacher, known in job.facts.by_teacher(job.config):
        if teacher.cache is None:
            continue
        folder = Path(teacher.cache)
        assert known.vocabulary_size is not None
        manifest = manifest_of(
            job.config,
            teacher,
            weights=job.fingerprints[f"teacher {teacher.name}"],
            tokenizer=tokenizer_hash(tokenizer_of(teacher)),
            vocabulary_size=known.vocabulary_size,
            on_gpu=on_gpu,
            captures=captures,
        )
        sources = [resolve(*described_by(teacher))]
        if teacher.tokenizer is not None and teacher.backend != "endpoint":
            sources.append(resolve(teacher.tokenizer))
        make_store(folder, manifest, sources)


def make_store(folder: Path, manifest: Manifest, sources: list[Path]) -> None:
    """Makes a store, or checks that one which exists fits. Of several runs that do so at the same time, one makes it.

    Args:
        manifest: without the files that describe the teacher.
        sources: as of `describe_teacher`.

    Raises:
        StoreError: the store holds other targets, or cannot be written.
    """
    if not (folder / FILE).exists():
        try:
            with _locked(folder):
                if not (folder / FILE).exists():
                    write_manifest(folder, replace(manifest, files=describe_teacher(folder, sources)))
        except OSError as error:
            raise StoreError(f"{folder}", "must be writable", first_line(error), "choose another folder") from error
    require_same(folder, manifest)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes other processes wait that enter it with the same folder, except on a file system without locks.

    The folder is made if it does not exist. The lock is deleted when the block has made a store: who comes later finds
    that, and does not need the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with path.open("a") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)
