"""One checkpoint's folder: what it holds, and how it is sealed, trusted and verified before anything in it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill_rl import __version__
from distill_rl.errors import CheckpointError
from distill_rl.system.files import sha256
from distill_rl.system.folders import ownership_problems, parent_problem
from distill_rl.types import Cursor, TrainState

_FORMAT = 1
MANIFEST = "MANIFEST.json"
_DAMAGED = "the checkpoint is damaged; use an older one"
_FORMER_PAIR, _PAIR = "crossing to teacher ", "tokenizer pair with teacher "
"""Fingerprint of a tokenizer pair: the name in older checkpoints, and the name now."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The driver's part of a checkpoint, kept in state.json."""

    train: TrainState
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Hashes of what must not change between saving and resuming (data, tokenizer, models), by name."""
    score: float | None = None
    """validation/kl_loss at this step, if it was measured; lower is better."""
    learnt: bool = True
    """Whether any step so far had something to train on and was not skipped; older checkpoints do not say."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    state: SavedState

    @property
    def student(self) -> Path:
        return self.path / "student"


def read(path: Path, *, within: Path | None = None) -> Checkpoint:
    """Verifies a checkpoint (owner and mode first, then file by file) and returns its path and state.

    Args:
        within: the folder that must directly contain it once links are followed; None: any.

    Raises:
        CheckpointError: it is not a checkpoint, belongs to another user, is open to other writers, has a newer format,
            or has a missing, truncated, changed or additional file.
    """
    try:
        return _read(path, within)
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:  # valid JSON with unexpected content
        rule, value = "MANIFEST.json and state.json must be as they were written", f"{type(error).__name__}: {error}"
        raise CheckpointError(str(path), rule, value, _DAMAGED) from None


def _require_trust(path: Path, within: Path | None) -> None:
    # Who may write to the folder above (of one named `checkpoints`, also to the one above that) could swap it.
    if not path.is_dir():
        raise CheckpointError(str(path), "must be a folder with a checkpoint", "nothing like it")
    folder = path.resolve().parent
    for place in (folder, folder.parent) if folder.name == "checkpoints" else (folder,):
        if problem := parent_problem(place):
            rule = "must be this user's or root's, and closed to other writers, who could swap its checkpoints"
            raise CheckpointError(str(place), rule, problem, f"if you trust it, chown it, or chmod go-w {place}")
    problems = list(ownership_problems(path))
    if within is not None and path.resolve().parent != within.resolve():
        problems.insert(0, f"it leads to {path.resolve()}")
    if problems:
        more = f", and {len(problems) - 1} more like it" if len(problems) > 1 else ""
        raise CheckpointError(
            str(path),
            "a checkpoint must be this user's or root's, closed to other writers, and without links",
            f"{problems[0]}{more}",
            "if you trust it, fix it with chown and chmod -R go-w, or copy it",
        )


def _read(path: Path, within: Path | None) -> Checkpoint:
    """Verifies a checkpoint and returns it, as `read` does, but lets errors from unexpected content of its files pass."""
    _require_trust(path, within)
    manifest = read_json(path / MANIFEST, path)
    if manifest.get("format", 0) > _FORMAT:
        rule, value = f"this version reads checkpoint format {_FORMAT}", f"format {manifest['format']}"
        raise CheckpointError(str(path), rule, value, "update distill_rl")
    _require_seal(path, manifest)
    present = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {MANIFEST}
    for name in sorted(present - manifest["files"].keys()):
        remedy = "remove it, or use another checkpoint"
        raise CheckpointError(str(path), f"{name} is not in the manifest", remedy=remedy)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.resolve().is_relative_to(path.resolve()):
            raise CheckpointError(str(path), "a manifest names only files in its folder", f"{name}, outside of it")
        if not file.is_file():
            raise CheckpointError(str(path), f"{name} is missing", remedy=_DAMAGED)
        if file.stat().st_size != expected["size"] or sha256(file) != expected["sha256"]:
            size = f"{file.stat().st_size} bytes"
            raise CheckpointError(str(path), f"{name} differs from the manifest", size, _DAMAGED)
    state = read_json(path / "state.json", path)
    train = TrainState(state["step"], Cursor(**state["cursor"]))
    fingerprints = {name.replace(_FORMER_PAIR, _PAIR): value for name, value in state["fingerprints"].items()}
    return Checkpoint(path, SavedState(train, fingerprints, state["score"], state.get("learnt", True)))


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a manifest with a hash of its other entries as `sha256`, by which a change to it is noticed."""
    text = json.dumps({key: value for key, value in manifest.items() if key != "sha256"}, sort_keys=True)
    return {**manifest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _require_seal(path: Path, manifest: Mapping[str, Any]) -> None:
    """Checks that a manifest's file is as it was written, and that its hash of itself, which older ones lack, is right."""
    as_written = f"{json.dumps(manifest, indent=2, sort_keys=True)}\n" == (path / MANIFEST).read_text()
    unsealed = manifest.keys() == {"format", "version", "files"}  # written before manifests had a hash of themselves
    if not as_written or not (unsealed or manifest == sealed(manifest)):
        raise CheckpointError(str(path), f"{MANIFEST} differs from what was written", remedy=_DAMAGED)


def manifest_of(root: Path) -> dict:
    """Returns the manifest of a folder: `format`, `version`, and `files`, by relative path, with `size` and `sha256`.

    Sizes are in bytes. It has no hash of itself yet (`sealed`).
    """
    files = {
        str(file.relative_to(root)): {"size": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }
    return {"format": _FORMAT, "version": __version__, "files": files}


def read_score(path: Path) -> float | None:
    """Returns a checkpoint's validation loss; None if it has none or cannot be read."""
    try:
        return read_json(path / "state.json", path)["score"]
    except (CheckpointError, KeyError, TypeError):
        return None


def read_json(file: Path, checkpoint: Path) -> dict:
    """Returns the content of a JSON file of a checkpoint.

    Args:
        checkpoint: its folder, for the error.

    Raises:
        CheckpointError: it cannot be read or is not JSON.
    """
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        rule, remedy = f"{file.name} must be readable", "this is no checkpoint of distill_rl, or it is damaged"
        raise CheckpointError(str(checkpoint), rule, type(error).__name__, remedy) from None
