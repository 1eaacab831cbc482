"""The checkpoint folder of a run: how a checkpoint is committed, verified and pruned.

    checkpoints/step-120/
        MANIFEST.json      every file's size and sha256, versions, fingerprints; written last
        state.json         step, cursor, fingerprints, validation loss
        student/           written by the student's ranks (torch.distributed.checkpoint)

A checkpoint is written as `.tmp-step-N-<id>`, flushed, then renamed, so a folder named `step-N` is always complete.
Its owner, mode, location and manifest are checked before anything in it is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distill_rl import __version__
from distill_rl.config.measured import higher_is_better
from distill_rl.errors import CheckpointError
from distill_rl.run.scores import ScoreFile
from distill_rl.system import ownership
from distill_rl.system.files import sha256, size_of, sync, sync_tree, write_json
from distill_rl.types import Cursor, TrainState

_FORMAT = 1
_MANIFEST = "MANIFEST.json"
_REPLACED = ".tmp-old-"
_DAMAGED = "the checkpoint is damaged; use an older one"
_VALID = "needs a valid checkpoint in the run directory"
_AFRESH = "start afresh with --clean"
_BLOCK = 4096
"""Bytes. With less than one block free, a failed write is blamed on lack of space."""
_FORMER_PAIR, _PAIR = "crossing to teacher ", "tokenizer pair with teacher "
"""Fingerprint of a tokenizer pair: the name in older checkpoints, and the name now."""

_VALIDATION_LOSS = "validation/kl_loss"

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being written."""

    folder: Path
    state: SavedState
    num_bytes: int
    """Expected size; 0 if unknown."""

    @property
    def student(self) -> Path:
        """The folder in the draft that the student's ranks fill."""
        return self.folder / "student"

    @property
    def marker(self) -> Path:
        """The file in the draft that the first rank writes in a background save when all ranks are done."""
        return self.folder / "written.json"


class CheckpointStore:
    """The checkpoints of a run in one folder. Making a store touches no file.

    Args:
        root: the folder, `checkpoints` of the run directory; `begin` creates it.
        keep_last: number of newest checkpoints to keep.
        keep_best: number of checkpoints with the best scores to keep besides.
        best_by: the metric that is their score.
        scores: file with what was measured at each step; None: `scores.json` in the folder.
        about: extra entries of every manifest, for human readers.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int,
        keep_best: int,
        best_by: str = _VALIDATION_LOSS,
        scores: Path | None = None,
        about: Mapping[str, Any] = MappingProxyType({}),
    ):
        self._root, self._keep_last, self._keep_best, self._about = root, keep_last, keep_best, about
        self._best_by = best_by
        self.scores = ScoreFile(scores or root / "scores.json")
        self.awaited: Callable[[], Collection[int]] = lambda: ()
        """Returns the steps whose score is still to come; their checkpoints are kept until then. Called in any thread."""

    def begin(self, state: SavedState, num_bytes: Callable[[], int] = lambda: 0) -> Draft:
        """Makes a temporary folder for the student's ranks to fill; `commit` or `drop` it afterwards.

        Creates the store's folder if necessary, and removes other users' permission to write to it.

        Args:
            num_bytes: called for the size of a checkpoint if there is no earlier one to measure; 0: unknown, then any
                free space will do.

        Raises:
            CheckpointError: there is less free space than a checkpoint needs.
            OSError: the folder cannot be made.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        ownership.close_folder(self._root)
        needed = self._size_of_last() or num_bytes()
        free = shutil.disk_usage(self._root).free
        if free < needed:
            raise CheckpointError(str(self._root), *_no_room(needed, free))
        draft = Draft(self._root / f".tmp-step-{state.train.step}-{secrets.token_hex(4)}", state, needed)
        draft.student.mkdir(parents=True)
        return draft

    def commit(self, draft: Draft) -> None:
        """Adds state and manifest to what the ranks have written, flushes and renames it to `step-N`, and prunes.

        A checkpoint of the same step is set aside before the rename and deleted by the pruning, so that at every moment
        a complete one exists under its own name or under the name that `clean_up` restores it from.

        Raises:
            OSError: it cannot be written; older checkpoints are unchanged.
        """
        draft.marker.unlink(missing_ok=True)
        state = asdict(draft.state)
        write_json(draft.folder / "state.json", {**state.pop("train"), **state})
        ownership.close_tree(draft.folder)
        write_json(draft.folder / _MANIFEST, sealed({**self._about, **_manifest(draft.folder)}))
        ownership.close_tree(draft.folder)
        sync_tree(draft.folder)
        final = self._root / f"step-{draft.state.train.step}"
        if final.exists():
            final.rename(self._root / f"{_REPLACED}{final.name}-{secrets.token_hex(4)}")
        draft.folder.rename(final)
        sync(self._root)
        self.prune()

    def drop(self, draft: Draft) -> None:
        """Removes a draft's folder; ignores errors, and does nothing after a commit, which has renamed the folder."""
        shutil.rmtree(draft.folder, ignore_errors=True)

    def explain(self, draft: Draft, error: Exception) -> CheckpointError:
        """Returns the error to raise after a write failed with `error`, whose text it contains.

        It blames a lack of space if less is free than the draft still needs, or less than 4096 bytes. Call it before
        the draft is dropped.
        """
        missing = draft.num_bytes - size_of(draft.folder)
        free = shutil.disk_usage(self._root).free
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        if free < max(missing, _BLOCK):
            return CheckpointError(str(self._root), *_no_room(draft.num_bytes, free, text))
        return CheckpointError(str(self._root), "a checkpoint must be writable", text)

    def newest(self, warn: Callable[[str], None] = log.warning) -> Checkpoint | None:
        """Returns the newest valid checkpoint, verified file by file; None if there is none.

        Args:
            warn: called with the problem of every newer one that is not valid.
        """
        for path in reversed(self._folders()):
            try:
                return read(path, within=self._root)
            except CheckpointError as error:
                warn(" ".join(error.problems))
        return None

    def clean_up(self) -> None:
        """Restores a checkpoint whose replacement was interrupted, and deletes all other temporary folders.

        Those are what a killed process left half-written, and what was pruned. Do not call this during a save.
        """
        for replaced in self._root.glob(f"{_REPLACED}step-*"):
            original = self._root / replaced.name.removeprefix(_REPLACED).rpartition("-")[0]
            if not original.exists():  # killed between the two renames of `commit`: this is the only one of its step
                replaced.rename(original)
        for leftover in self._root.glob(".tmp-*step-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def abandon_after(self, step: int) -> None:
        """Renames checkpoints of steps after `step`, from which the run resumes, and logs their new names as warnings.

        The new names are `abandoned-step-N-…`.
        They belong to another course of the run, and by their step numbers they would be kept in preference to new
        ones.
        """
        self.scores.drop_after(step)
        for path in self._folders():
            if _step(path) > step:
                kept = path.with_name(f"abandoned-{path.name}-{secrets.token_hex(2)}")
                path.rename(kept)
                log.warning("%s is of a later step than the one resumed from; kept as %s", path, kept.name)

    def _folders(self) -> list[Path]:
        """Returns the folders called `step-N`, unverified, by ascending step."""
        return sorted((path for path in self._root.glob("step-*") if _step(path) >= 0), key=_step)

    def _size_of_last(self) -> int:
        """Returns the bytes of the newest checkpoint with a readable manifest, according to it; 0 if there is none."""
        for path in reversed(self._folders()):
            try:
                return sum(int(file["size"]) for file in _load(path / _MANIFEST, path)["files"].values())
            except (CheckpointError, KeyError, TypeError, ValueError, AttributeError):
                continue
        return 0

    def prune(self) -> None:
        """Deletes all checkpoints but the newest `keep_last`, the `keep_best` best ones, and those of `awaited` scores.

        Of equal scores the older one is kept. Other temporary folders are deleted as well (`clean_up`), so do not call
        this during a save.
        """
        folders = self._folders()
        kept = set(folders[-self._keep_last :])
        if self._keep_best:
            awaited = self.awaited()  # first: a score that arrives from now on is then at least awaited
            scored = [(score, path) for path in folders if (score := self._score(path)) is not None]
            sign = -1 if higher_is_better(self._best_by) else 1
            scored.sort(key=lambda entry: sign * entry[0])  # stable: of equal scores the older one is kept
            kept |= {path for _, path in scored[: self._keep_best]}
            kept |= {path for path in folders if _step(path) in awaited}
        for path in folders:
            if (
                path not in kept
            ):  # renamed before it is deleted, so that a folder named step-N is complete at every moment
                path.rename(path.with_name(f".tmp-pruned-{path.name}-{secrets.token_hex(4)}"))
        self.clean_up()

    def _score(self, path: Path) -> float | None:
        """Returns the score of a checkpoint; None if it has none. Older versions kept the validation loss in it only."""
        score = self.scores.get(_step(path), self._best_by)
        return _read_score(path) if score is None and self._best_by == _VALIDATION_LOSS else score


def steps(root: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, by their names, unverified and in order."""
    return sorted(step for path in root.glob("step-*") if (step := _step(path)) >= 0)


def newest_step(root: Path) -> int | None:
    """Returns the step of the newest complete checkpoint in a folder, by its name, unverified; None if there is none."""
    return max(steps(root), default=None)


def find(store: CheckpointStore, resume: str | None, warn: Callable[[str], None] = log.warning) -> Checkpoint | None:
    """Returns the checkpoint that `resume` names, verified; None if the run is to start afresh.

    Args:
        resume: None: no checkpoint; `latest`: the newest valid one; `auto`: the same, or None in an empty store;
            otherwise the path of a step folder.
        warn: called with a line for each newer one that is not valid, if an older one is used instead.

    Raises:
        CheckpointError: `latest` and there is no valid one; `auto` and there are some, but none is valid; or a path
            that is not a valid checkpoint.
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
    elif problems:  # starting afresh here would throw away what the user may be able to repair
        problems.append(str(CheckpointError("--resume", _VALID, "none", _AFRESH)))
        raise CheckpointError.many(dict.fromkeys(problems))
    elif resume == "latest":
        raise CheckpointError("--resume", _VALID, "none", f"{_AFRESH}, or use --resume auto")
    return newest


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
    """Checks that no other user could have written a checkpoint, before anything in it is read.

    Args:
        within: the folder that must directly contain it once links are followed; None: any.

    Raises:
        CheckpointError: it is no folder, or is or contains a link or special file; it, a file in it or its parent
            folder (with one named `checkpoints`, also the parent of that) belongs to another user (root excepted) or
            can be changed by one; or it is not in `within`.
    """
    if not path.is_dir():
        raise CheckpointError(str(path), "must be a folder with a checkpoint", "nothing like it")
    folder = path.resolve().parent
    for place in (folder, folder.parent) if folder.name == "checkpoints" else (folder,):
        if problem := ownership.parent_problem(place):
            rule = "must be this user's or root's, and closed to other writers, who could swap its checkpoints"
            raise CheckpointError(str(place), rule, problem, f"if you trust it, chown it, or chmod go-w {place}")
    problems = list(ownership.problems(path))
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


def _step(path: Path) -> int:
    """The number N of a folder called `step-N`; -1 if it has another name."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def _read(path: Path, within: Path | None) -> Checkpoint:
    """Verifies a checkpoint and returns it, as `read` does, but lets errors from unexpected content of its files pass.

    Raises:
        CheckpointError: it may not be trusted, or its files differ from the manifest.
        KeyError, TypeError, AttributeError, ValueError, OSError: the manifest or state has not the expected content, or
            a file cannot be read.
    """
    _require_trust(path, within)
    manifest = _load(path / _MANIFEST, path)
    if manifest.get("format", 0) > _FORMAT:
        rule, value = f"this version reads checkpoint format {_FORMAT}", f"format {manifest['format']}"
        raise CheckpointError(str(path), rule, value, "update distill_rl")
    _require_seal(path, manifest)
    present = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {_MANIFEST}
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
    state = _load(path / "state.json", path)
    train = TrainState(state["step"], Cursor(**state["cursor"]))
    fingerprints = {name.replace(_FORMER_PAIR, _PAIR): value for name, value in state["fingerprints"].items()}
    return Checkpoint(path, SavedState(train, fingerprints, state["score"], state.get("learnt", True)))


def require_same(saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Checks that data, tokenizers and models are those that a checkpoint was saved with.

    What has a fingerprint only now is not compared; what has one only in the checkpoint counts as different.

    Args:
        saved, current: fingerprints by name.

    Raises:
        CheckpointError: something differs; one line per difference, with both hashes.
    """
    rule, remedy = "must be the same as when the checkpoint was saved", "restore it, or start afresh with --clean"
    problems = []
    for name, value in saved.items():
        if current.get(name) != value:
            values = f"{name} {_short(current.get(name, 'nothing'))}, saved with {_short(value)}"
            problems.append(str(CheckpointError(f"the {name} of this run", rule, values, remedy)))
    if problems:
        raise CheckpointError.many(problems)


def _short(fingerprint: str) -> str:
    """A fingerprint whose hashes are cut to 16 digits, enough to tell them apart."""
    return re.sub(r"\b([0-9a-f]{16})[0-9a-f]+\b", r"\1", fingerprint)


def _no_room(needed: int, free: int, cause: str = "") -> tuple[str, str, str]:
    """Returns the rule, value and remedy of a CheckpointError about lack of space.

    Args:
        needed: bytes; 0 if unknown.
        cause: the error that was met, to add; empty: none.
    """
    rule = f"a checkpoint needs {needed} bytes of free space" if needed else "a checkpoint needs free space"
    value = f"{free} bytes ({cause})" if cause else f"{free} bytes"
    return rule, value, "free some space, or lower checkpoint.keep_last"


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a manifest with a hash of its other entries as `sha256`, by which a change to it is noticed."""
    text = json.dumps({key: value for key, value in manifest.items() if key != "sha256"}, sort_keys=True)
    return {**manifest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _require_seal(path: Path, manifest: Mapping[str, Any]) -> None:
    """Checks that a manifest's file is as it was written, and that its hash of itself, which older ones lack, is right.

    Raises:
        CheckpointError: it was changed.
    """
    as_written = f"{json.dumps(manifest, indent=2, sort_keys=True)}\n" == (path / _MANIFEST).read_text()
    unsealed = manifest.keys() == {"format", "version", "files"}  # written before manifests had a hash of themselves
    if not as_written or not (unsealed or manifest == sealed(manifest)):
        raise CheckpointError(str(path), f"{_MANIFEST} differs from what was written", remedy=_DAMAGED)


def _manifest(root: Path) -> dict:
    """Returns the manifest of a folder: `format`, `version`, and `files`, by relative path, with `size` and `sha256`.

    Sizes are in bytes. It has no hash of itself yet (`sealed`).
    """
    files = {
        str(file.relative_to(root)): {"size": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }
    return {"format": _FORMAT, "version": __version__, "files": files}


def _read_score(path: Path) -> float | None:
    """Returns a checkpoint's validation loss; None if it has none or cannot be read."""
    try:
        return _load(path / "state.json", path)["score"]
    except (CheckpointError, KeyError, TypeError):
        return None


def _load(file: Path, checkpoint: Path) -> dict:
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
