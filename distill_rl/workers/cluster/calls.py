"""Waiting for actors: every wait has a deadline, hears signals, and ends in one clear error."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from distill_rl.errors import DistillError, GpuMemoryError, WorkerError
from distill_rl.system.gpu_memory import amounts, is_out_of_memory
from distill_rl.workers.actors.rank import Process
from distill_rl.workers.cluster.process_monitor import ProcessMonitor

_POLL_S = 0.25
"""A signal handler only sets a flag (raising inside ray.get is swallowed), so waits look up this often."""

_FIRST_CAUSE_S = 2.0
"""When one actor dies, its peers fail too, in any order: collect errors this long and report the death."""


class Overdue(WorkerError):
    """Actors that were not done by their deadline."""

    def __init__(self, what: str, rule: str = "", value: object = None, remedy: str = "", actors: Sequence[str] = ()):
        super().__init__(what, rule, value, remedy)
        self.actors = tuple(actors)


@dataclass
class Calls:
    """Waits for calls of known actors.

    `names` maps Ray actor ids (hex) to actor names, `actors` to handles. `interrupted` is asked at every poll and may
    raise. `after_death` is what a user does when an actor died, `when_late` when one was too late.
    """

    interrupted: Callable[[], None]
    names: dict[str, str] = field(default_factory=dict)
    actors: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    """by name, of those that have been identified"""
    after_death: str = "resume from the last checkpoint with --resume"
    when_late: str = "raise its deadline (ray.*_timeout_s, aligner.deadline_s, evaluate.timeout_s), or look into logs/"
    watch: ProcessMonitor | None = None
    """looks at the processes while somebody waits for them"""
    report_after_s: float = 60.0
    """between reports of a wait, with a watch"""

    def know(self, name: str, actor: Any) -> None:
        """An actor that errors may be about; it has a method `identify`."""
        key = actor._actor_id.hex()
        self.names[key], self.actors[key] = name, actor

    def forget(self, actor: Any) -> None:
        """An actor that was ended on purpose, and is to blame for nothing."""
        key = actor._actor_id.hex()
        self.names.pop(key, None)
        self.actors.pop(key, None)

    def gather(
        self,
        calls: Mapping[ray.ObjectRef, str] | Sequence[ray.ObjectRef],
        *,
        what: str,
        timeout_s: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Results in order.

        Args:
            calls: references; as a mapping, each with the name of the actor that was called.
            what: what is waited for, for messages (`step 12`).
            meanwhile: called at every poll; what it raises ends the wait.

        Raises:
            WorkerError: an actor raised, died, or was not done after `timeout_s`.
        """
        names = calls if isinstance(calls, Mapping) else dict.fromkeys(calls, "")
        for done, pending in self._until_done(names, what, timeout_s, meanwhile):
            if errors := _errors_of(done):
                raise self._blame(errors | self._late_errors(pending), names, what)
        return ray.get(list(names), timeout=timeout_s)

    def outcomes(self, calls: Mapping[ray.ObjectRef, str], *, what: str, timeout_s: float) -> dict[ray.ObjectRef, Any]:
        """What became of calls once all have ended: a result, or Ray's error.

        Raises:
            Overdue: some have not ended after `timeout_s`.
        """
        for _ in self._until_done(calls, what, timeout_s):
            pass
        errors = _errors_of(list(calls))
        return {ref: errors[ref] if ref in errors else ray.get(ref, timeout=timeout_s) for ref in calls}

    def _until_done(
        self,
        names: Mapping[ray.ObjectRef, str],
        what: str,
        timeout_s: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> Iterator[tuple[Sequence[ray.ObjectRef], Sequence[ray.ObjectRef]]]:
        """At every poll, calls that have ended since the last one, and those that have not."""
        pending, start = list(names), time.monotonic()
        reported = start
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_S, fetch_local=False)
            self.interrupted()
            yield done, pending
            if not pending:
                return
            now, waited_for = time.monotonic(), {names[ref] or "an actor" for ref in pending}
            if now - start > timeout_s:
                raise self.late(waited_for, what, timeout_s)
            if meanwhile is not None:
                meanwhile()
                start += time.monotonic() - now  # what it waited for is not these actors' time
            if self.watch is not None:
                self.watch.look()
                if now - reported > self.report_after_s:
                    reported = now
                    self.watch.report(waited_for, what, now - start, timeout_s)

    def look(self) -> None:
        """For who waits in a way of its own: hears signals, and looks at the processes."""
        self.interrupted()
        if self.watch is not None:
            self.watch.look()

    def dead(self) -> list[str]:
        """Names of actors whose process is gone."""
        return [self.names[_actor_id(error)] for error in self._deaths().values() if _actor_id(error) in self.names]

    def _deaths(self) -> dict[ray.ObjectRef, BaseException]:
        """Errors of actors that are dead: who lost an object reports it, and not whoever owned it."""
        asked = [actor.identify.remote() for actor in self.actors.values()]
        return {ref: error for ref, error in self._late_errors(asked).items() if not _rank(error)}

    def late(self, actors: Collection[str], what: str, timeout_s: float) -> Overdue:
        """What to say of actors that are not done after so many seconds."""
        rule, names = f"{what} must end within {timeout_s:g} s", sorted(actors)
        where = ", ".join(self.watch.where(name) if self.watch else name for name in names)
        return Overdue(where, rule, "no answer", self.when_late, names)

    def _late_errors(self, pending: Sequence[ray.ObjectRef]) -> dict[ray.ObjectRef, BaseException]:
        if not pending:
            return {}
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_FIRST_CAUSE_S, fetch_local=False)
        return _errors_of(done)

    def _blame(
        self, errors: Mapping[ray.ObjectRef, BaseException], names: Mapping[ray.ObjectRef, str], what: str
    ) -> DistillError:
        if all(_rank(error) for error in errors.values()):
            errors = {**errors, **self._deaths()}
        ref, error = min(errors.items(), key=lambda item: _rank(item[1]))
        actor = self.names.get(_actor_id(error), "") or names.get(ref, "") or "a worker"
        return explain(error, actor, what, self.after_death, self.watch)


def explain(
    error: BaseException, actor: str, what: str, after_death: str, watch: ProcessMonitor | None = None
) -> DistillError:
    """One line that names the actor, its node, what it was doing, and the cause; with its last words if it died."""
    name, actor = actor, watch.where(actor) if watch else actor
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, DistillError) and cause.exit_code == 2:  # the user's to mend, wherever it was found
        cause.add_note(_plain(error))
        return cause
    if isinstance(cause, GpuMemoryError):
        blamed: DistillError = GpuMemoryError(
            f"{actor}, {what}", f"{cause.what} {cause.rule}", cause.value, cause.remedy
        )
    elif isinstance(error, RayTaskError) and is_out_of_memory(cause):
        remedy = "see `distill-rl check` for the estimate per worker"
        blamed = GpuMemoryError(f"{actor}, {what}", "needs more GPU memory", amounts(cause), remedy)
    elif isinstance(error, RayTaskError):
        blamed = WorkerError(actor, f"{what} failed", f"{type(cause).__name__}: {_first_line(cause)}")
    elif isinstance(error, OutOfMemoryError):
        blamed = WorkerError(
            actor, f"{what} failed", "killed for memory", "see `distill-rl check` for the estimate per worker"
        )
    elif isinstance(error, ActorDiedError | RayActorError):
        cause_of_death = (watch and watch.fate(name)) or _death(error)
        words = watch.last_words(name) if watch else ""
        value = f"{cause_of_death} (its last words: {words})" if words else cause_of_death
        blamed = WorkerError(actor, f"its process died during {what}", value, after_death)
    else:
        blamed = WorkerError(actor, f"{what} failed", f"{type(error).__name__}: {_first_line(error)}")
    blamed.add_note(_plain(error))
    return blamed


def _errors_of(refs: Sequence[ray.ObjectRef]) -> dict[ray.ObjectRef, BaseException]:
    errors: dict[ray.ObjectRef, BaseException] = {}
    for ref in refs:
        try:
            ray.get(ref, timeout=60)
        except RayError as error:
            errors[ref] = error
    return errors


def _rank(error: BaseException) -> int:
    """Deaths first: the rest are mostly their consequences."""
    if isinstance(error, RayTaskError):
        return 1 if isinstance(error.cause, DistillError) else 2
    return 0 if isinstance(error, ActorDiedError | OutOfMemoryError) else 3


def _actor_id(error: BaseException) -> str:
    """Whose death an error tells of, in hex; empty if of nobody's."""
    found = getattr(error, "actor_id", None)
    return found if isinstance(found, str) else found.hex() if found is not None else ""


def _plain(error: BaseException) -> str:
    """Ray's text with the worker's traceback, without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [""])[0][:500]


def _death(error: BaseException) -> str:
    """Ray's word on how the process ended, one sentence of it."""
    found = re.search(r"Worker exit detail: (.*?)(?:\. |\n|$)", str(error)) or re.search(
        r"exit type: (\S+)", str(error)
    )
    return found.group(1).strip() if found else _first_line(error)
