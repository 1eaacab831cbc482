"""When checkpoints are written: at once, or beside the training by threads of the ranks and one of the driver.

Beside the training, a save is

    ranks, called:       copy what is trained into host memory, and return
    ranks, in threads:   write it; the first rank leaves a marker when all are done
    driver, in a thread: wait for the marker, hash, flush, rename, prune

and only one is in flight: the next waits for it. Its error is raised by the next save, or by `settle` at the end.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from distill_rl.errors import CheckpointError, WorkerError
from distill_rl.run.checkpoints import CheckpointStore, Draft, SavedState
from distill_rl.system.files import size_of

_POLL_S = 0.1
_PATIENCE_S = 10.0
"""A run that ends with an error waits for a save in flight as long as more of it is written within this."""
_SEEN_S = 120.0
"""in which files of another node must be seen here; network file systems keep what they know of a folder for a minute"""
_ASK_S = 1.0
"""between two questions whether the ranks live"""

log = logging.getLogger(__name__)


class Collective(Protocol):
    """Calls a method of all ranks and waits for what they return."""

    def __call__(self, method: str, *arguments: Any, what: str) -> list[Any]: ...


class Saver:
    """
    Args:
        collective: calls the student.
        dead: whether a rank of the student is known to be gone.
        beside: save beside the training.
        deadline_s: for the ranks to write a checkpoint.
        interrupted: asked while there is only waiting to do; may raise.
    """

    def __init__(
        self,
        store: CheckpointStore,
        collective: Collective,
        *,
        beside: bool,
        deadline_s: float,
        dead: Callable[[], bool] = lambda: False,
        interrupted: Callable[[], None] = lambda: None,
    ):
        self._store, self._collective, self._beside = store, collective, beside
        self._deadline_s, self._dead, self._interrupted = deadline_s, dead, interrupted
        self._flight: _Flight | None = None
        self._earlier: WorkerError | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        """Of a run that failed: a save in flight is completed if the ranks live, and dropped if they do not."""
        flight, self._flight = self._flight, None
        if flight is not None:
            try:
                flight.complete(self._dead)
            finally:
                flight.end()
            log.warning("%s, when the run ended: %s", flight.what, flight.error or "completed")

    def save(self, state: SavedState, *, at_once: bool = False) -> None:
        """A checkpoint of the student as it is.

        Args:
            at_once: the run has nothing else to do: without a copy, and committed on return; tried also where the save
                before it failed (`settled`).

        Raises:
            WorkerError: it failed, or the save before it did. Older checkpoints are intact.
        """
        if at_once:
            self.settled()
        else:
            self.settle()
        what, beside = f"saving step {state.train.step}", self._beside and not at_once
        with _failing(what):
            draft = self._store.begin(state, lambda: self._collective("checkpoint_bytes", what=what)[0])
            marker = os.fspath(draft.marker) if beside else None
            kept = False
            try:
                self._collective("save", os.fspath(draft.student), marker, what=what)
                if not beside:
                    self._store.commit(draft)
                kept = beside
            except (CheckpointError, OSError) as error:
                raise self._store.explain(draft, error) from error
            finally:
                if not kept:
                    self._store.drop(draft)
            if beside:
                self._flight = _Flight(self._store, draft, what, self._deadline_s)

    def settled(self) -> bool:
        """Waits until what was saved last is committed; whether it is. An error is kept for `raise_earlier`."""
        try:
            self.settle()
        except WorkerError as error:
            log.warning("%s; the last checkpoint is tried all the same", error)
            self._earlier = error
            return False
        return True

    def raise_earlier(self) -> None:
        """
        Raises:
            WorkerError: a save failed before the last one, which was made all the same.
        """
        if self._earlier is not None:
            raise self._earlier

    def settle(self) -> None:
        """Waits until what was saved last is committed.

        Raises:
            WorkerError: it failed. Older checkpoints are intact.
        """
        flight = self._flight
        if flight is None:
            return
        with _failing(flight.what):
            if not flight.written:  # hears of errors that could not be written, and of ranks that die
                try:
                    self._collective("finish_saving", what=flight.what)
                except CheckpointError as error:
                    self._flight = None
                    explained = self._store.explain(flight.draft, error)
                    flight.end()
                    raise explained from error
            deadline = time.monotonic() + 2 * self._deadline_s + _SEEN_S  # to write, to be seen, to hash and flush
            while flight.busy:
                flight.join(_POLL_S)
                self._interrupted()
                if time.monotonic() > deadline:
                    self._flight = None  # its thread is stuck in the file system, and nobody can wait for it
                    rule = f"must be written and committed within twice ray.step_timeout_s={self._deadline_s:g} s"
                    raise CheckpointError("the checkpoint", rule, "not done", "look at the storage of checkpoints/")
            self._flight = None
            if flight.error is not None:
                raise flight.error


class _Flight:
    """A save that the ranks write, and the thread that commits it."""

    def __init__(self, store: CheckpointStore, draft: Draft, what: str, deadline_s: float):
        self._store, self.draft, self.what = store, draft, what
        self._deadline_s = deadline_s
        self.error: CheckpointError | None = None
        self._written, self._cancelled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="commit", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    @property
    def written(self) -> bool:
        """Whether the ranks are done, well or not."""
        return self._written.is_set() or not self.busy

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def complete(self, dead: Callable[[], bool]) -> None:
        """Waits as long as the ranks live and write; a commit that has begun needs them no more."""
        size, since, asked = -1, time.monotonic(), time.monotonic()
        while not self.written:
            self.join(_POLL_S)
            now, found = time.monotonic(), size_of(self.draft.folder)
            if found != size:
                size, since = found, now
            if now - since > _PATIENCE_S:
                return
            if now - asked > _ASK_S:
                asked = now
                if _holds(dead):
                    return
        self._thread.join(self._deadline_s)

    def end(self) -> None:
        """Drops what is not written, and ends the thread."""
        self._cancelled.set()
        self._thread.join(_PATIENCE_S)

    def _work(self) -> None:
        try:
            self._await_ranks()
            self._store.commit(self.draft)
        except Exception as error:  # a thread has nobody to raise to: the next save does
            self.error = CheckpointError(f"{type(error).__name__}: {error}")
            self.error = self._store.explain(self.draft, error)
            if not self._cancelled.is_set():
                log.warning("%s failed, which ends the run at its next save: %s", self.what, self.error)
        finally:
            self._store.drop(self.draft)

    def _await_ranks(self) -> None:
        """
        Raises:
            CheckpointError: they failed, or were not done in time.
        """
        marker = self.draft.marker
        rule = f"must be written within ray.step_timeout_s={self._deadline_s:g} s"
        self._await(marker.exists, rule, self._deadline_s)
        self._written.set()
        said = json.loads(marker.read_text())
        if said["error"] is not None:
            raise CheckpointError(said["error"])
        # On a shared file system, what another node wrote may be seen some time after the first rank's word.
        files = [self.draft.student / name for name in said["files"]]
        self._await(lambda: all(file.is_file() for file in files), "must lie on storage that all ranks share", _SEEN_S)

    def _await(self, condition: Callable[[], bool], rule: str, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            if self._cancelled.wait(_POLL_S):
                raise CheckpointError("the checkpoint", "must be written before its writers end", "not done")
            if time.monotonic() > deadline:
                raise CheckpointError("the checkpoint", rule, "not seen")


def _holds(condition: Callable[[], bool]) -> bool:
    """Also where it cannot be asked any more."""
    try:
        return condition()
    except Exception:
        return True


@contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, OSError) as error:
        raise WorkerError(what, "must succeed; older checkpoints are intact", str(error)) from error
