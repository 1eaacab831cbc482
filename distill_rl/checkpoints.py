"""The checkpoint folder of a run: what is committed, what is valid, what is kept.

    checkpoints/step-120/
        MANIFEST.json      every file's size and sha256; written last
        state.json         step, cursor, fingerprints, validation loss
        student/           what the student's ranks wrote (torch.distributed.checkpoint)

A checkpoint is written as `.tmp-step-N-<id>`, flushed, then renamed: a folder named `step-N` is whole.
The manifest is checked before anything in it is read.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from distill_rl import __version__
from distill_rl.errors import CheckpointError
from distill_rl.files import sha256, sync_directory, sync_tree, write_json
from distill_rl.types import Cursor, TrainState

_FORMAT = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a checkpoint says of itself.

    `fingerprints` name what must not change between saving and resuming (data, tokenizer, models).
    `score` is validation/kl_loss at this step, if it was measured: lower is better.
    """

    train: TrainState
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    state: SavedState

    @property
    def student(self) -> Path:
        return self.path / "student"


class CheckpointStore:
    def __init__(self, root: Path, *, keep_last: int, keep_best: int):
        self._root, self._keep_last, self._keep_best = root, keep_last, keep_best

    @contextmanager
    def write(self, state: SavedState) -> Iterator[Path]:
        """Yields the folder for the student's ranks to fill; commits and prunes when the block ends well.

        An error inside the block leaves the older checkpoints as they are, and nothing of this one.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        name = f"step-{state.train.step}"
        temporary = self._root / f".tmp-{name}-{secrets.token_hex(4)}"
        (temporary / "student").mkdir(parents=True)
        try:
            yield temporary / "student"
            write_json(temporary / "state.json", _to_json(state))
            write_json(temporary / "MANIFEST.json", _manifest(temporary))
            sync_tree(temporary)
            final = self._root / name
            if final.exists():  # the same step again: set aside first, so that no moment has half of one
                final.rename(self._root / f".tmp-old-{name}-{secrets.token_hex(4)}")
            temporary.rename(final)
            sync_directory(self._root)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._prune()

    def newest(self) -> Checkpoint | None:
        """The newest valid checkpoint; damaged ones are named in the log and passed over."""
        for path in reversed(self._folders()):
            try:
                return read(path)
            except CheckpointError as error:
                log.warning("%s", error)
        return None

    def abandon_after(self, step: int) -> None:
        """Renames checkpoints of later steps: a run that went on from `step` has another future, and prunes by age."""
        for path in self._folders():
            if _step(path) > step:
                kept = path.with_name(f"abandoned-{path.name}-{secrets.token_hex(2)}")
                path.rename(kept)
                log.warning("%s is of a later step than the one resumed from; kept as %s", path, kept.name)

    def _folders(self) -> list[Path]:
        return sorted((path for path in self._root.glob("step-*") if _step(path) >= 0), key=_step)

    def _prune(self) -> None:
        folders = self._folders()
        scores = {path: _peek_score(path) for path in folders} if self._keep_best else {}
        best = sorted(
            (path for path, score in scores.items() if score is not None), key=lambda path: scores[path] or 0.0
        )
        kept = set(folders[-self._keep_last :]) | set(best[: self._keep_best])
        for path in folders:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)
        for leftover in self._root.glob(".tmp-*step-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def find(store: CheckpointStore, resume: str | None) -> Checkpoint | None:
    """The checkpoint that `resume` means: None (none), `latest`, `auto`, or a step folder.

    Raises:
        CheckpointError: `latest` where there is no valid one, or a folder that is none.
    """
    if resume is None:
        return None
    if resume not in ("latest", "auto"):
        return read(Path(resume).expanduser())
    newest = store.newest()
    if newest is None and resume == "latest":
        raise CheckpointError(
            "--resume",
            "needs a valid checkpoint in the run directory",
            "none",
            "start afresh with --clean, or use --resume auto",
        )
    return newest


def read(path: Path) -> Checkpoint:
    """Verifies a checkpoint file by file and reads its state.

    Raises:
        CheckpointError: not a checkpoint, made by a newer format, or with a missing, cut or changed file.
    """
    try:
        return _read(path)
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # JSON, but not what was written
        raise CheckpointError(
            str(path), "MANIFEST.json and state.json must be as they were written", f"{type(error).__name__}: {error}",
            "the checkpoint is damaged; use an older one",
        ) from None  # fmt: skip


def _step(path: Path) -> int:
    number = path.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1


def _read(path: Path) -> Checkpoint:
    manifest = _load(path / "MANIFEST.json", path)
    if manifest.get("format", 0) > _FORMAT:
        raise CheckpointError(
            str(path),
            f"this version reads checkpoint format {_FORMAT}",
            f"format {manifest['format']}",
            "update distill_rl",
        )
    present = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {"MANIFEST.json"}
    for name in sorted(present - manifest["files"].keys()):
        raise CheckpointError(
            str(path), f"{name} is not in the manifest", remedy="remove it, or use another checkpoint"
        )
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.resolve().is_relative_to(path.resolve()):
            raise CheckpointError(str(path), "a manifest names files of its own folder only", f"{name}, outside of it")
        if not file.is_file():
            raise CheckpointError(str(path), f"{name} is missing", remedy="the checkpoint is damaged; use an older one")
        if file.stat().st_size != expected["size"] or sha256(file) != expected["sha256"]:
            raise CheckpointError(
                str(path),
                f"{name} differs from the manifest",
                f"{file.stat().st_size} bytes",
                "the checkpoint is damaged; use an older one",
            )
    state = _load(path / "state.json", path)
    cursor = Cursor(**state["cursor"])
    return Checkpoint(path, SavedState(TrainState(state["step"], cursor), state["fingerprints"], state["score"]))


def require_same(saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Refuses to resume with other data, tokenizer or models.

    Raises:
        CheckpointError: with both hashes, one line per difference.
    """
    changed = [
        str(
            CheckpointError(
                f"the {name} of this run",
                "must be the same as when the checkpoint was saved",
                f"{name} {current.get(name, 'nothing')[:16]}, saved with {value[:16]}",
                "restore it, or start afresh with --clean",
            )
        )
        for name, value in saved.items()
        if current.get(name) != value
    ]
    if changed:
        raise CheckpointError.many(changed)


def _manifest(root: Path) -> dict:
    files = {
        str(file.relative_to(root)): {"size": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }
    return {"format": _FORMAT, "version": __version__, "files": files}


def _to_json(state: SavedState) -> dict:
    return {
        "step": state.train.step,
        "cursor": asdict(state.train.cursor),
        "fingerprints": dict(state.fingerprints),
        "score": state.score,
    }


def _peek_score(path: Path) -> float | None:
    try:
        return _load(path / "state.json", path)["score"]
    except (CheckpointError, KeyError, TypeError):
        return None


def _load(file: Path, checkpoint: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            str(checkpoint),
            f"{file.name} must be readable",
            f"{type(error).__name__}",
            "this is no checkpoint of distill_rl, or a damaged one",
        ) from None
