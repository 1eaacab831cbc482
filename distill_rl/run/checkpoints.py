"""The checkpoint folder of a run: what is committed, what is valid, what is kept.

    checkpoints/step-120/
        MANIFEST.json      every file's size and sha256, versions, fingerprints; written last
        state.json         step, cursor, fingerprints, validation loss
        student/           what the student's ranks wrote (torch.distributed.checkpoint)

A checkpoint is written as `.tmp-step-N-<id>`, flushed, then renamed: a folder named `step-N` is whole.
Owner, mode, place and manifest are checked before anything in it is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distill_rl import __version__
from distill_rl.errors import CheckpointError
from distill_rl.system import ownership
from distill_rl.system.files import sha256, size_of, sync_directory, sync_tree, write_json
from distill_rl.types import Cursor, TrainState

_FORMAT = 1
_MANIFEST = "MANIFEST.json"
_REPLACED = ".tmp-old-"
_DAMAGED = "the checkpoint is damaged; use an older one"
_VALID = "needs a valid checkpoint in the run directory"
_AFRESH = "start afresh with --clean"
_BLOCK = 4096
"""bytes; with less than one block free, a write that failed failed for want of room"""

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


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being written."""

    folder: Path
    state: SavedState
    num_bytes: int
    """that it is expected to need; 0 where nobody knows"""

    @property
    def student(self) -> Path:
        """For the ranks to fill."""
        return self.folder / "student"

    @property
    def marker(self) -> Path:
        """Where the first rank says that all ranks are done."""
        return self.folder / "written.json"


class CheckpointStore:
    """
    Args:
        about: said in every manifest, for people.
    """

    def __init__(self, root: Path, *, keep_last: int, keep_best: int, about: Mapping[str, Any] = MappingProxyType({})):
        self._root, self._keep_last, self._keep_best, self._about = root, keep_last, keep_best, about

    def begin(self, state: SavedState, num_bytes: Callable[[], int] = lambda: 0) -> Draft:
        """A folder for the student's ranks to fill: `commit` or `drop` it.

        Args:
            num_bytes: asked for the size of a checkpoint where there is none yet to go by.

        Raises:
            CheckpointError: there is less room than the last checkpoint took.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        ownership.close_place(self._root)
        needed = self._size_of_last() or num_bytes()
        free = shutil.disk_usage(self._root).free
        if free < needed:
            raise CheckpointError(str(self._root), *_no_room(needed, free))
        draft = Draft(self._root / f".tmp-step-{state.train.step}-{secrets.token_hex(4)}", state, needed)
        draft.student.mkdir(parents=True)
        return draft

    def commit(self, draft: Draft) -> None:
        """Flushes and renames what the ranks have written, then prunes.

        Raises:
            OSError: it cannot be written; older checkpoints are as they were.
        """
        draft.marker.unlink(missing_ok=True)
        write_json(draft.folder / "state.json", _to_json(draft.state))
        ownership.close_to_others(draft.folder)
        write_json(draft.folder / _MANIFEST, sealed({**self._about, **_manifest(draft.folder)}))
        ownership.close_to_others(draft.folder)
        sync_tree(draft.folder)
        final = self._root / f"step-{draft.state.train.step}"
        if final.exists():  # the same step again: set aside first, so that no moment has half of one
            final.rename(self._root / f"{_REPLACED}{final.name}-{secrets.token_hex(4)}")
        draft.folder.rename(final)
        sync_directory(self._root)
        self._prune()

    def drop(self, draft: Draft) -> None:
        """Removes a draft that was not committed."""
        shutil.rmtree(draft.folder, ignore_errors=True)

    def explain(self, draft: Draft, error: Exception) -> CheckpointError:
        """An error of writing, with the room that was missing if that is the reason."""
        missing = draft.num_bytes - size_of(draft.folder)
        free = shutil.disk_usage(self._root).free
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        if free < max(missing, _BLOCK):
            return CheckpointError(str(self._root), *_no_room(draft.num_bytes, free, text))
        return CheckpointError(str(self._root), "a checkpoint must be writable", text)

    def newest(self, warn: Callable[[str], None] = log.warning) -> Checkpoint | None:
        """The newest valid checkpoint; `warn` is told of those that are passed over."""
        for path in reversed(self._folders()):
            try:
                return read(path, within=self._root)
            except CheckpointError as error:
                warn(str(error))
        return None

    def sweep(self) -> None:
        """Removes what a killed process was writing, replacing or pruning. Nobody may be saving."""
        for left in self._root.glob(f"{_REPLACED}step-*"):  # killed between two renames: it is the only one of its step
            whole = self._root / left.name.removeprefix(_REPLACED).rpartition("-")[0]
            if not whole.exists():
                left.rename(whole)
        for left in self._root.glob(".tmp-*step-*"):
            shutil.rmtree(left, ignore_errors=True)

    def abandon_after(self, step: int) -> None:
        """Renames checkpoints of later steps: a run that went on from `step` has another future, and prunes by age."""
        for path in self._folders():
            if _step(path) > step:
                kept = path.with_name(f"abandoned-{path.name}-{secrets.token_hex(2)}")
                path.rename(kept)
                log.warning("%s is of a later step than the one resumed from; kept as %s", path, kept.name)

    def _folders(self) -> list[Path]:
        return sorted((path for path in self._root.glob("step-*") if _step(path) >= 0), key=_step)

    def _size_of_last(self) -> int:
        """Bytes of the newest checkpoint, by its manifest; 0 where there is none."""
        for path in reversed(self._folders()):
            try:
                return sum(int(file["size"]) for file in _load(path / _MANIFEST, path)["files"].values())
            except (CheckpointError, KeyError, TypeError, ValueError, AttributeError):
                continue
        return 0

    def _prune(self) -> None:
        folders = self._folders()
        scores = {path: _peek_score(path) for path in folders} if self._keep_best else {}
        best = sorted(
            (path for path, score in scores.items() if score is not None), key=lambda path: scores[path] or 0.0
        )
        kept = set(folders[-self._keep_last :]) | set(best[: self._keep_best])
        for path in folders:
            if path not in kept:  # renamed first: a folder of its name is whole at every moment
                path.rename(path.with_name(f".tmp-pruned-{path.name}-{secrets.token_hex(4)}"))
        self.sweep()


def find(store: CheckpointStore, resume: str | None, warn: Callable[[str], None] = log.warning) -> Checkpoint | None:
    """The checkpoint that `resume` means: None (none), `latest`, `auto`, or a step folder.

    `warn` is told of damaged ones for which an older one is taken.

    Raises:
        CheckpointError: `latest` where there is no valid one, `auto` where there are some and none is valid, or a
            folder that is none.
    """
    if resume is None:
        return None
    if resume not in ("latest", "auto"):
        return read(Path(resume).expanduser().resolve())
    problems: list[str] = []
    newest = store.newest(problems.append)
    if newest is not None:
        for problem in problems:
            warn(f"{problem}; {newest.path.name} is taken instead")
    elif problems:  # to begin afresh here would be to throw away what a person may be able to mend
        raise CheckpointError.many(
            [*dict.fromkeys(problems), str(CheckpointError("--resume", _VALID, "none", _AFRESH))]
        )
    elif resume == "latest":
        raise CheckpointError("--resume", _VALID, "none", f"{_AFRESH}, or use --resume auto")
    return newest


def read(path: Path, *, within: Path | None = None) -> Checkpoint:
    """Verifies a checkpoint, its owner and mode first, then file by file, and reads its state.

    Args:
        within: the folder that it must lie in, links followed.

    Raises:
        CheckpointError: not a checkpoint, somebody else's or open to others, made by a newer format, or with a
            missing, cut or changed file.
    """
    try:
        return _read(path, within)
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:  # JSON, but not what was written
        raise CheckpointError(
            str(path), "MANIFEST.json and state.json must be as they were written", f"{type(error).__name__}: {error}",
            _DAMAGED,
        ) from None  # fmt: skip


def _require_trust(path: Path, within: Path | None) -> None:
    if not path.is_dir():
        raise CheckpointError(str(path), "must be a folder with a checkpoint", "nothing like it")
    folder = path.resolve().parent
    for place in (folder, folder.parent) if folder.name == "checkpoints" else (folder,):
        if problem := ownership.place_problem(place):
            rule = "must be this user's or root's, and closed to other writers: they could exchange its checkpoints"
            raise CheckpointError(str(place), rule, problem, f"if you trust it, chown it, or chmod go-w {place}")
    found = list(ownership.problems(path))
    if within is not None and path.resolve().parent != within.resolve():
        found.insert(0, f"it leads to {path.resolve()}")
    if found:
        more = f", and {len(found) - 1} more like it" if len(found) > 1 else ""
        raise CheckpointError(
            str(path),
            "a checkpoint must be this user's or root's, closed to other writers, and without links",
            f"{found[0]}{more}",
            "if you trust it, mend it with chown and chmod -R go-w, or copy it",
        )


def _step(path: Path) -> int:
    number = path.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1


def _read(path: Path, within: Path | None) -> Checkpoint:
    _require_trust(path, within)
    manifest = _load(path / _MANIFEST, path)
    if manifest.get("format", 0) > _FORMAT:
        raise CheckpointError(
            str(path),
            f"this version reads checkpoint format {_FORMAT}",
            f"format {manifest['format']}",
            "update distill_rl",
        )
    _require_seal(path, manifest)
    present = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {_MANIFEST}
    for name in sorted(present - manifest["files"].keys()):
        raise CheckpointError(
            str(path), f"{name} is not in the manifest", remedy="remove it, or use another checkpoint"
        )
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.resolve().is_relative_to(path.resolve()):
            raise CheckpointError(str(path), "a manifest names files of its own folder only", f"{name}, outside of it")
        if not file.is_file():
            raise CheckpointError(str(path), f"{name} is missing", remedy=_DAMAGED)
        if file.stat().st_size != expected["size"] or sha256(file) != expected["sha256"]:
            raise CheckpointError(
                str(path),
                f"{name} differs from the manifest",
                f"{file.stat().st_size} bytes",
                _DAMAGED,
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
                f"{name} {_short(current.get(name, 'nothing'))}, saved with {_short(value)}",
                "restore it, or start afresh with --clean",
            )
        )
        for name, value in saved.items()
        if current.get(name) != value
    ]
    if changed:
        raise CheckpointError.many(changed)


def _short(fingerprint: str) -> str:
    """With hashes cut to what tells them apart."""
    return re.sub(r"\b([0-9a-f]{16})[0-9a-f]+\b", r"\1", fingerprint)


def _no_room(needed: int, free: int, cause: str = "") -> tuple[str, str, str]:
    """Rule, value and remedy."""
    said = f" ({cause})" if cause else ""
    rule = f"a checkpoint needs {needed} bytes of free space" if needed else "a checkpoint needs free space"
    return rule, f"{free} bytes{said}", "free some space, or lower checkpoint.keep_last"


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with its own hash, so that it cannot change unseen either."""
    text = json.dumps({key: value for key, value in manifest.items() if key != "sha256"}, sort_keys=True)
    return {**manifest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _require_seal(path: Path, manifest: Mapping[str, Any]) -> None:
    whole = f"{json.dumps(manifest, indent=2, sort_keys=True)}\n" == (path / _MANIFEST).read_text()
    older = manifest.keys() == {"format", "version", "files"}  # made before there was a seal
    if not whole or not (older or manifest == sealed(manifest)):
        raise CheckpointError(str(path), f"{_MANIFEST} differs from what was written", remedy=_DAMAGED)


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
