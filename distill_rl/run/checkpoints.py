"""The checkpoints of a run in their folder: how one is written, committed, verified, found and pruned.

    checkpoints/step-120/
        MANIFEST.json      every file's size and sha256, versions, fingerprints; written last
        state.json         step, cursor, fingerprints, validation loss
        student/           written by the student's ranks (torch.distributed.checkpoint)

A checkpoint is written as `.tmp-step-N-<id>`, flushed, then renamed, so a folder named `step-N` is always complete.
Its owner, mode, location and manifest are checked before anything in it is read.

A save in the background (`Saver`) takes three steps:

    ranks, called:       copy what is trained to host memory, and return
    ranks, in threads:   write the copy; the first rank leaves a marker when all have finished
    driver, in a thread: wait for the marker, hash, flush, rename, prune

At most one save is in flight; the next one waits for it. Its error is raised by the next save or by `settle`, or kept
by `try_settle` for `raise_earlier_error`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distill_rl import __version__
from distill_rl.config.measured import KD, higher_is_better
from distill_rl.errors import CheckpointError, DistillError, WorkerError
from distill_rl.system import files
from distill_rl.types import Cursor, TrainState

_FORMAT = 1
MANIFEST = "MANIFEST.json"
_DAMAGED = "the checkpoint is damaged; use an older one"
_FORMER_PAIR, _PAIR = "crossing to teacher ", "tokenizer pair with teacher "
"""Fingerprint of a tokenizer pair: the name in older checkpoints, and the name now."""
FROZEN = "frozen weights"
"""Fingerprint of the weights beside which adapters are trained, and which a checkpoint of adapters lacks."""
_REPLACED = ".tmp-old-"
_VALID = "needs a valid checkpoint in the run directory"
_AFRESH = "start afresh with --clean"
_RESTORE = f"restore it, or {_AFRESH}"
_BLOCK = 4096
"""Bytes. With less than one block free, a failed write is blamed on lack of space."""
_POLL_S = 0.1
_PATIENCE_S = 10.0
"""A run that ends with an error waits for a save in flight until nothing more of it has been written for this long."""
_VISIBLE_S = 120.0
"""Deadline for files of another node to become visible here; network file systems cache a folder for a minute."""
_LIVENESS_POLL_S = 1.0
"""Interval between two checks that the ranks are alive."""

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
        if problem := files.parent_problem(place):
            rule = "must be this user's or root's, and closed to other writers, who could swap its checkpoints"
            raise CheckpointError(str(place), rule, problem, f"if you trust it, chown it, or chmod go-w {place}")
    problems = list(files.ownership_problems(path))
    if within is not None and path.resolve().parent != within.resolve():
        problems.insert(0, f"it leads to {path.resolve()}")
    if problems:
        more = f", and {len(problems) - 1} more like it" if len(problems) > 1 else ""
        rule = "a checkpoint must be this user's or root's, closed to other writers, and without links"
        remedy = "if you trust it, fix it with chown and chmod -R go-w, or copy it"
        raise CheckpointError(str(path), rule, f"{problems[0]}{more}", remedy)


def _read(path: Path, within: Path | None) -> Checkpoint:
    """Verifies a checkpoint and returns it, as `read` does, but lets errors from unexpected content of its files pass."""
    _require_trust(path, within)
    manifest = read_json(path / MANIFEST, path)
    if manifest.get("format", 0) > _FORMAT:
        rule, value = f"this version reads checkpoint format {_FORMAT}", f"format {manifest['format']}"
        raise CheckpointError(str(path), rule, value, "update distill_rl")
    as_written = f"{json.dumps(manifest, indent=2, sort_keys=True)}\n" == (path / MANIFEST).read_text()
    unsealed = manifest.keys() == {"format", "version", "files"}  # written before manifests had a hash of themselves
    if not as_written or not (unsealed or manifest == sealed(manifest)):
        raise CheckpointError(str(path), f"{MANIFEST} differs from what was written", remedy=_DAMAGED)
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
        if file.stat().st_size != expected["size"] or files.sha256(file) != expected["sha256"]:
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


def manifest_of(root: Path) -> dict:
    """Returns the manifest of a folder: `format`, `version`, and `files`, by relative path, with `size` and `sha256`.

    Sizes are in bytes. It has no hash of itself yet (`sealed`).
    """
    entries = {
        str(file.relative_to(root)): {"size": file.stat().st_size, "sha256": files.sha256(file)}
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }
    return {"format": _FORMAT, "version": __version__, "files": entries}


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
        files.close_folder(self._root)
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
        files.write_json(draft.folder / "state.json", {**state.pop("train"), **state})
        files.close_tree(draft.folder)
        files.write_json(draft.folder / MANIFEST, sealed({**self.about, **manifest_of(draft.folder)}))
        files.close_tree(draft.folder)
        files.sync_tree(draft.folder)
        final = self._root / f"step-{draft.state.train.step}"
        files.put_in_place(draft.folder, final, self._root / f"{_REPLACED}{final.name}-{secrets.token_hex(4)}")
        self.prune()

    def drop(self, draft: Draft) -> None:
        """Removes a draft's folder; ignores errors. After a commit there is none, or the one that was replaced."""
        shutil.rmtree(draft.folder, ignore_errors=True)

    def explain(self, draft: Draft, error: Exception) -> CheckpointError:
        """Returns the error to raise after a write failed with `error`, whose text it contains.

        It blames a lack of space if less is free than the draft still needs, or less than 4096 bytes. Call it before
        the draft is dropped.
        """
        missing = draft.num_bytes - files.size_of(draft.folder)
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
                kept = path.with_name(f"abandoned-{path.name}-{secrets.token_hex(4)}")
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
            if path not in kept:
                # Renamed before it is deleted, so that a folder named step-N is complete at every moment.
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
        if score is None and self._best_by == KD:
            with suppress(CheckpointError, KeyError, TypeError):  # it cannot be read
                return read_json(path / "state.json", path)["score"]
        return score


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
        with suppress(ValueError, TypeError):
            self._by_step = {str(int(step)): dict(scores) for step, scores in files.read_json_object(path).items()}

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
        files.write_json(self._path, by_step)


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


def require_same(saved: Mapping[str, str], current: Mapping[str, str], *, remedy: str = _RESTORE) -> None:
    """Checks that data, tokenizers and models are those that a checkpoint was saved with.

    What has a fingerprint only now is not compared; what has one only in the checkpoint counts as different.

    Args:
        saved, current: fingerprints by name.
        remedy: what to do about one that differs.

    Raises:
        CheckpointError: something differs; one line per difference, with both hashes.
    """
    rule = "must be the same as when the checkpoint was saved"
    problems = []
    for name, value in saved.items():
        if current.get(name) != value:
            values = f"{name} {_short(current.get(name, 'nothing'))}, saved with {_short(value)}"
            problems.append(str(CheckpointError(f"the {name} of this run", rule, values, remedy)))
    CheckpointError.raise_all(problems)


def _short(fingerprint: str) -> str:
    return re.sub(r"\b([0-9a-f]{16})[0-9a-f]+\b", r"\1", fingerprint)


def _no_room(needed: int, free: int, cause: str = "") -> tuple[str, str, str]:
    rule = f"a checkpoint needs {needed} bytes of free space" if needed else "a checkpoint needs free space"
    value = f"{free} bytes ({cause})" if cause else f"{free} bytes"
    return rule, value, "free some space, or lower checkpoint.keep_last"


@dataclass
class Saver:
    """Saves the checkpoints of a run, one at a time. As a context manager it ends a save that is still in flight."""

    store: CheckpointStore
    """Where checkpoints are committed."""
    collective: Callable[..., list[Any]]
    """Calls a method on all ranks of the student and waits for their results (`StudentGroup.collective`)."""
    in_background: bool
    deadline_s: float
    """Seconds that the ranks may take to write a checkpoint."""
    dead: Callable[[], bool] = lambda: False
    """Whether a rank of the student is known to be dead."""
    interrupted: Callable[[], None] = lambda: None
    """Called repeatedly while `settle` waits for a commit; may raise to end the wait."""
    _in_flight: _BackgroundSave | None = None
    _earlier_error: WorkerError | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends a save that is still in flight, as after an error of the run.

        Completes it as long as the ranks live and write, otherwise cancels it and drops its draft. Logs the outcome as
        a warning. An error of the save is not raised.
        """
        save, self._in_flight = self._in_flight, None
        if save is not None:
            was_told = save.error is not None  # by its thread
            try:
                save.complete(self.dead)
            finally:
                save.end()
            if not was_told:
                log.warning("%s, when training stopped: %s", save.what, save.error or "completed")

    def save(self, state: SavedState, *, at_once: bool = False) -> None:
        """Saves a checkpoint of the student in its present state, in the background unless configured otherwise.

        Waits for the save before it. In the background, the state has been copied on return, and is written and
        committed later; the next save or `settle` then raises the error, if any.

        Args:
            at_once: save without a copy and commit before returning, because the run has nothing else to do. It is
                tried even if the save before it failed, whose error is kept (`try_settle`).

        Raises:
            WorkerError: this save failed, or (unless `at_once`) the one before it. Older checkpoints are intact.
        """
        if at_once:
            self.try_settle()
        else:
            self.settle()
        what, in_background = f"saving step {state.train.step}", self.in_background and not at_once
        with _as_worker_error(what):
            draft = self.store.begin(state, lambda: self.collective("checkpoint_bytes", what=what)[0])
            marker = os.fspath(draft.marker) if in_background else None
            keep_draft = False
            try:
                self.collective("save", os.fspath(draft.student), marker, what=what)
                if not in_background:
                    self.store.commit(draft)
                keep_draft = in_background
            except (CheckpointError, OSError) as error:
                raise self.store.explain(draft, error) from error
            finally:
                if not keep_draft:
                    self.store.drop(draft)
            if in_background:
                self._in_flight = _BackgroundSave(self.store, draft, what, self.deadline_s)

    def try_settle(self) -> bool:
        """Waits until the last save is committed, and returns whether it succeeded; True if none is in flight.

        A WorkerError is logged as a warning and kept for `raise_earlier_error`. What `interrupted` raises passes.
        """
        try:
            self.settle()
        except WorkerError as error:
            log.warning("%s; the last checkpoint is tried all the same", error)
            self._earlier_error = error
            return False
        return True

    def raise_earlier_error(self) -> None:
        """Raises the error that `try_settle` has kept; does nothing if there is none.

        Raises:
            WorkerError: a save that `try_settle` waited for failed.
        """
        if self._earlier_error is not None:
            raise self._earlier_error

    def settle(self) -> None:
        """Waits until the last save is committed; returns at once if none is in flight.

        Raises:
            WorkerError: it failed, or is not committed within 2 * `deadline_s` + 120 seconds from when the ranks were
                found to have finished. Older checkpoints are intact. What `interrupted` raises passes, too.
        """
        save = self._in_flight
        if save is None:
            return
        with _as_worker_error(save.what):
            if not save.written:  # the call also reports errors that did not reach the marker, and ranks that die
                try:
                    self.collective("finish_saving", what=save.what)
                except CheckpointError as error:
                    self._in_flight = None
                    explained = self.store.explain(save.draft, error)
                    save.end()
                    raise explained from error
            # One deadline to write, the time to become visible, and one deadline to hash and flush.
            deadline = time.monotonic() + 2 * self.deadline_s + _VISIBLE_S
            while save.thread.is_alive():
                save.thread.join(_POLL_S)
                self.interrupted()
                if time.monotonic() > deadline:
                    self._in_flight = None  # its thread is stuck in the file system and cannot be waited for
                    rule = f"must be written and committed within twice ray.step_timeout_s={self.deadline_s:g} s"
                    raise CheckpointError("the checkpoint", rule, "not done", "check the storage of checkpoints/")
            self._in_flight = None
            if save.error is not None:
                if save.failed_on_ranks:  # they raise it in whatever comes next, such as the last save of all
                    with suppress(DistillError):
                        self.collective("finish_saving", what=save.what)
                raise save.error


class _BackgroundSave:
    """A save that the ranks write, with the thread that commits it."""

    def __init__(self, store: CheckpointStore, draft: Draft, what: str, deadline_s: float):
        """Starts the thread that waits for the ranks and commits the draft.

        Args:
            what: what is saved, for messages.
            deadline_s: seconds that the ranks may take to write.
        """
        self._store, self.draft, self.what = store, draft, what
        self._deadline_s = deadline_s
        self.error: CheckpointError | None = None
        self.failed_on_ranks = False
        """Whether the marker tells an error, which the ranks then keep, too."""
        self._written, self._cancelled = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._work, name="commit", daemon=True)
        self.thread.start()

    @property
    def written(self) -> bool:
        """Whether the ranks have finished, successfully or not, or the thread that waits for them has ended."""
        return self._written.is_set() or not self.thread.is_alive()

    def complete(self, dead: Callable[[], bool]) -> None:
        """Waits until the save is committed or has failed; gives up if a rank dies, or nothing is written for 10 s.

        Once the ranks have finished, the commit no longer needs them, and is waited for up to `deadline_s` seconds. A
        failure of the save is not raised; it is in `error`.

        Args:
            dead: whether a rank is known to be dead; asked about once a second. An exception counts as yes.
        """
        size = -1
        grown_at = checked_at = time.monotonic()
        while not self.written:
            self.thread.join(_POLL_S)
            now, new_size = time.monotonic(), files.size_of(self.draft.folder)
            if new_size != size:
                size, grown_at = new_size, now
            if now - grown_at > _PATIENCE_S:
                return
            if now - checked_at > _LIVENESS_POLL_S:
                checked_at = now
                try:
                    if dead():
                        return
                except Exception:  # it can no longer be determined
                    return
        self.thread.join(self._deadline_s)

    def end(self) -> None:
        """Cancels the save if it is not fully written, and waits up to 10 s for its thread, which drops the draft.

        A commit that has begun is not cancelled.
        """
        self._cancelled.set()
        self.thread.join(_PATIENCE_S)

    def _work(self) -> None:
        """Thread: waits for the ranks and commits the draft; if that fails, drops the draft and keeps the error."""
        # The error is a CheckpointError, and logged as a warning unless the save was cancelled.
        try:
            self._await_ranks()
            self._store.commit(self.draft)
        except Exception as error:  # kept here for the next save to raise
            self.error = CheckpointError(f"{type(error).__name__}: {error}")
            self.error = self._store.explain(self.draft, error)
            if not self._cancelled.is_set():
                text = "%s failed; unless the student is restarted, the run ends at its next save: %s"
                log.warning(text, self.what, self.error)
        finally:
            self._store.drop(self.draft)

    def _await_ranks(self) -> None:
        """Waits until the ranks have written the draft and all of its files are visible on this node."""
        marker = self.draft.marker
        rule = f"must be written within ray.step_timeout_s={self._deadline_s:g} s"
        self._await(marker.exists, rule, self._deadline_s)
        self._written.set()
        result = json.loads(marker.read_text())
        if result["error"] is not None:
            self.failed_on_ranks = True
            raise CheckpointError(result["error"])
        # On a shared file system, files of another node may become visible some time after the first rank's marker.
        written, rule = result["files"], "must be on storage that all ranks share"
        self._await(lambda: all((self.draft.student / name).is_file() for name in written), rule, _VISIBLE_S)

    def _await(self, condition: Callable[[], bool], rule: str, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            if self._cancelled.wait(_POLL_S):
                raise CheckpointError("the checkpoint", "must be written before its writers end", "not done")
            if time.monotonic() > deadline:
                raise CheckpointError("the checkpoint", rule, "not seen")


@contextmanager
def _as_worker_error(what: str) -> Iterator[None]:
    """Turns a CheckpointError or OSError of the block into the WorkerError that ends a run; other errors pass."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        raise WorkerError(what, "must succeed; older checkpoints are intact", str(error)) from error
