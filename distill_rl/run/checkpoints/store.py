"""The checkpoints of a run in their folder: how one is committed, found and pruned. What one holds: `files`.

    checkpoints/step-120/
        MANIFEST.json      every file's size and sha256, versions, fingerprints; written last
        state.json         step, cursor, fingerprints, validation loss
        student/           written by the student's ranks (torch.distributed.checkpoint)

A checkpoint is written as `.tmp-step-N-<id>`, flushed, then renamed, so a folder named `step-N` is always complete.
Its owner, mode, location and manifest are checked before anything in it is read.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distill_rl.config.measured import KD, higher_is_better
from distill_rl.errors import CheckpointError
from distill_rl.run.checkpoints.files import (
    MANIFEST,
    Checkpoint,
    SavedState,
    manifest_of,
    read,
    read_json,
    read_score,
    sealed,
)
from distill_rl.system.files import size_of, sync_tree, write_json
from distill_rl.system.folders import close_folder, close_tree, put_in_place

_REPLACED = ".tmp-old-"
_VALID = "needs a valid checkpoint in the run directory"
_AFRESH = "start afresh with --clean"
_BLOCK = 4096
"""Bytes. With less than one block free, a failed write is blamed on lack of space."""

log = logging.getLogger(__name__)


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
        best_by: str = KD,
        scores: Path | None = None,
        about: Mapping[str, Any] = MappingProxyType({}),
    ):
        self._root, self._keep_last, self._keep_best, self.about = root, keep_last, keep_best, about
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
        close_folder(self._root)
        needed = self._size_of_last() or num_bytes()
        free = shutil.disk_usage(self._root).free
        if free < needed:
            raise CheckpointError(str(self._root), *_no_room(needed, free))
        draft = Draft(self._root / f".tmp-step-{state.train.step}-{secrets.token_hex(4)}", state, needed)
        draft.student.mkdir(parents=True)
        return draft

    def commit(self, draft: Draft) -> None:
        """Adds state and manifest to what the ranks have written, flushes and renames it to `step-N`, and prunes.

        A checkpoint of the same step is exchanged for it or set aside, and deleted by the pruning, so that at every moment
        a complete one exists under its own name or under the name that `clean_up` restores it from.

        Raises:
            OSError: it cannot be written; older checkpoints are unchanged.
        """
        draft.marker.unlink(missing_ok=True)
        state = asdict(draft.state)
        write_json(draft.folder / "state.json", {**state.pop("train"), **state})
        close_tree(draft.folder)
        write_json(draft.folder / MANIFEST, sealed({**self.about, **manifest_of(draft.folder)}))
        close_tree(draft.folder)
        sync_tree(draft.folder)
        final = self._root / f"step-{draft.state.train.step}"
        put_in_place(draft.folder, final, self._root / f"{_REPLACED}{final.name}-{secrets.token_hex(4)}")
        self.prune()

    def drop(self, draft: Draft) -> None:
        """Removes a draft's folder; ignores errors. After a commit there is none, or the one that was replaced."""
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

    def best(self) -> Checkpoint:
        """Returns the checkpoint with the best score by `best_by`, verified; of equal ones the oldest.

        Raises:
            CheckpointError: no checkpoint here has a score, or the best one is damaged.
        """
        scored = self._scored()
        if not scored:
            remedy = "give a step, or latest"
            raise CheckpointError(str(self._root), f"a checkpoint needs a value of {self._best_by}", "none has", remedy)
        return read(scored[0], within=self._root)

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
        return sorted((path for path in self._root.glob("step-*") if _step(path) >= 0), key=_step)

    def _size_of_last(self) -> int:
        """Returns the bytes of the newest checkpoint with a readable manifest, according to it; 0 if there is none."""
        for path in reversed(self._folders()):
            try:
                return sum(int(file["size"]) for file in read_json(path / MANIFEST, path)["files"].values())
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
            kept |= set(self._scored()[: self._keep_best])
            kept |= {path for path in folders if _step(path) in awaited}
        for path in folders:
            if (
                path not in kept
            ):  # renamed before it is deleted, so that a folder named step-N is complete at every moment
                path.rename(path.with_name(f".tmp-pruned-{path.name}-{secrets.token_hex(4)}"))
        self.clean_up()

    def _scored(self) -> list[Path]:
        """Returns the folders with a score, unverified, the best first; of equal scores the older one comes first."""
        scored = [(score, path) for path in self._folders() if (score := self._score(path)) is not None]
        sign = -1 if higher_is_better(self._best_by) else 1
        return [path for _, path in sorted(scored, key=lambda entry: sign * entry[0])]

    def _score(self, path: Path) -> float | None:
        """Returns the score of a checkpoint; None if it has none. Older versions kept the validation loss in it only."""
        score = self.scores.get(_step(path), self._best_by)
        return read_score(path) if score is None and self._best_by == KD else score


class ScoreFile:
    """The file `scores.json`: step → metric → value, by which checkpoints are compared.

    A suite's score arrives after the checkpoint of its step is complete, so it cannot be a part of that. One process
    writes the file; other threads may read the object.

    Args:
        path: a damaged file counts as empty.
    """

    def __init__(self, path: Path):
        self._path = path
        self._by_step: dict[str, dict[str, float]] = {}
        try:
            stored = json.loads(path.read_bytes())
            self._by_step = {str(int(step)): dict(scores) for step, scores in stored.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            pass

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds what was measured at a step; values that are not finite are left out."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        key = str(step)
        # Replaced, not changed, because a thread may be reading it.
        self._write({**self._by_step, key: self._by_step.get(key, {}) | finite})

    def get(self, step: int, metric: str) -> float | None:
        """Returns what was measured; None if it was not."""
        return self._by_step.get(str(step), {}).get(metric)

    def drop_after(self, step: int) -> None:
        """Forgets later steps, which a run that resumes from `step` trains again."""
        kept = {key: scores for key, scores in self._by_step.items() if int(key) <= step}
        if kept != self._by_step:
            self._write(kept)

    def _write(self, by_step: dict[str, dict[str, float]]) -> None:
        self._by_step = by_step
        write_json(self._path, by_step)


def steps(root: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, by their names, unverified and in order."""
    return sorted(step for path in root.glob("step-*") if (step := _step(path)) >= 0)


def _step(path: Path) -> int:
    """The number N of a folder called `step-N`; -1 if it has another name."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


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
    return re.sub(r"\b([0-9a-f]{16})[0-9a-f]+\b", r"\1", fingerprint)


def _no_room(needed: int, free: int, cause: str = "") -> tuple[str, str, str]:
    rule = f"a checkpoint needs {needed} bytes of free space" if needed else "a checkpoint needs free space"
    value = f"{free} bytes ({cause})" if cause else f"{free} bytes"
    return rule, value, "free some space, or lower checkpoint.keep_last"
