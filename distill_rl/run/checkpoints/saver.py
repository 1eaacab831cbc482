"""Writes checkpoints, either while the run waits or in the background, by threads of the ranks and of the driver.

A background save takes three steps:

    ranks, called:       copy what is trained to host memory, and return
    ranks, in threads:   write the copy; the first rank leaves a marker when all have finished
    driver, in a thread: wait for the marker, hash, flush, rename, prune

At most one save is in flight; the next one waits for it. Its error is raised by the next save or by `settle`, or kept
by `try_settle` for `raise_earlier_error`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from distill_rl.errors import CheckpointError, WorkerError
from distill_rl.run.checkpoints.store import CheckpointStore, Draft, SavedState
from distill_rl.system.files import size_of

_POLL_S = 0.1
_PATIENCE_S = 10.0
"""A run that ends with an error waits for a save in flight until nothing more of it has been written for this long."""
_VISIBLE_S = 120.0
"""Deadline for files of another node to become visible here; network file systems cache a folder for a minute."""
_LIVENESS_POLL_S = 1.0
"""Interval between two checks that the ranks are alive."""

log = logging.getLogger(__name__)


class Saver:
    """Saves the checkpoints of a run, one at a time. As a context manager it ends a save that is still in flight.

    Args:
        store: where checkpoints are committed.
        collective: calls a method on all ranks of the student and waits for their results (`StudentGroup.collective`).
        in_background: save in the background.
        deadline_s: seconds that the ranks may take to write a checkpoint.
        dead: whether a rank of the student is known to be dead.
        interrupted: called repeatedly while `settle` waits for a commit; may raise to end the wait.
    """

    def __init__(
        self,
        store: CheckpointStore,
        collective: Callable[..., list[Any]],
        *,
        in_background: bool,
        deadline_s: float,
        dead: Callable[[], bool] = lambda: False,
        interrupted: Callable[[], None] = lambda: None,
    ):
        self._store, self._collective, self._in_background = store, collective, in_background
        self._deadline_s, self._dead, self._interrupted = deadline_s, dead, interrupted
        self._in_flight: _BackgroundSave | None = None
        self._earlier_error: WorkerError | None = None

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
                save.complete(self._dead)
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
        what, in_background = f"saving step {state.train.step}", self._in_background and not at_once
        with _as_worker_error(what):
            draft = self._store.begin(state, lambda: self._collective("checkpoint_bytes", what=what)[0])
            marker = os.fspath(draft.marker) if in_background else None
            keep_draft = False
            try:
                self._collective("save", os.fspath(draft.student), marker, what=what)
                if not in_background:
                    self._store.commit(draft)
                keep_draft = in_background
            except (CheckpointError, OSError) as error:
                raise self._store.explain(draft, error) from error
            finally:
                if not keep_draft:
                    self._store.drop(draft)
            if in_background:
                self._in_flight = _BackgroundSave(self._store, draft, what, self._deadline_s)

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
                    self._collective("finish_saving", what=save.what)
                except CheckpointError as error:
                    self._in_flight = None
                    explained = self._store.explain(save.draft, error)
                    save.end()
                    raise explained from error
            # One deadline to write, the time to become visible, and one deadline to hash and flush.
            deadline = time.monotonic() + 2 * self._deadline_s + _VISIBLE_S
            while save.thread.is_alive():
                save.thread.join(_POLL_S)
                self._interrupted()
                if time.monotonic() > deadline:
                    self._in_flight = None  # its thread is stuck in the file system and cannot be waited for
                    rule = f"must be written and committed within twice ray.step_timeout_s={self._deadline_s:g} s"
                    raise CheckpointError("the checkpoint", rule, "not done", "check the storage of checkpoints/")
            self._in_flight = None
            if save.error is not None:
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
            now, new_size = time.monotonic(), size_of(self.draft.folder)
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
                log.warning(
                    "%s failed; unless the student is restarted, the run ends at its next save: %s",
                    self.what,
                    self.error,
                )
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
            raise CheckpointError(result["error"])
        # On a shared file system, files of another node may become visible some time after the first rank's marker.
        files = [self.draft.student / name for name in result["files"]]
        self._await(
            lambda: all(file.is_file() for file in files), "must be on storage that all ranks share", _VISIBLE_S
        )

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
