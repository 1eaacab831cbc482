"""Waiting for actors: every wait has a deadline, polls for signals, and fails with one clear error."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from distill_rl.errors import DistillError, GpuMemoryError, WorkerError, first_line
from distill_rl.system.gpu_memory import amounts, is_out_of_memory
from distill_rl.workers.actors.rank import Process
from distill_rl.workers.cluster.hosts import NODE_KNOWN_WITHIN_S, Hosts
from distill_rl.workers.cluster.process_monitor import ProcessMonitor
from distill_rl.workers.cluster.relay import Failed, RankError, each

Called = str | tuple[str, ...]
"""Name of the actor that a call is for, or of all that a relay calls for it."""
Refs = dict[ray.ObjectRef, Called]
"""Submitted calls, each with what was called."""
Awaited = Mapping[ray.ObjectRef, Called]
"""Calls to wait for, each with what was called."""
Further = Callable[[], Sequence[ray.ObjectRef]]
"""Returns calls the end of which brings the next poll of a wait forward."""
Poll = Callable[[], object]
"""Called at every poll of a wait."""
Failures = dict[ray.ObjectRef, tuple[Called, BaseException]]
"""Calls that failed, each with what was called and Ray's error."""

_FETCH_S = 60.0
"""Most time for results to arrive from their node once the calls have ended."""
_POLL_S = 0.25
"""Interval at which waits check for signals. Handlers only set flags: Ray swallows exceptions in `ray.get`."""

_SEE_ESTIMATE = "see `distill-rl check` for the estimate per worker"
_DEATH = 0
"""`_priority` of the death of an actor."""

_KNOWN_WITHIN_S = 6.0
"""Most time for the death of an actor to become known, see `Calls.lost`."""
_FIRST_CAUSE_S = 2.0
"""When one actor dies its peers fail too, in any order: collect errors for this long, then report the death."""


class Overdue(WorkerError):
    """Actors that did not finish by their deadline."""

    def __init__(self, what: str, rule: str = "", value: object = None, remedy: str = "", actors: Sequence[str] = ()):
        super().__init__(what, rule, value, remedy)
        self.actors = tuple(actors)


@dataclass
class Calls:
    """Waits for calls of registered actors."""

    interrupted: Callable[[], None]
    """Called at every poll; may raise."""
    names: dict[str, Called] = field(default_factory=dict)
    """Names by Ray actor id (hex); of a relay those of all that it calls, because none of them answers without it."""
    actors: dict[str, Any] = field(default_factory=dict)
    """Actor handles by Ray actor id (hex)."""
    processes: dict[str, Process] = field(default_factory=dict)
    """Processes by actor name, once they have been identified."""
    after_death: str = ""
    """The remedy when an actor died; of a run the driver adds it, which knows what is saved."""
    when_late: str = "raise its deadline (ray.*_timeout_s, aligner.deadline_s, evaluate.timeout_s), or look into logs/"
    """The remedy when an actor overran its deadline."""
    monitor: ProcessMonitor | None = None
    """Checks the processes during every wait."""
    hosts: Hosts = field(default_factory=Hosts)
    """Looked at in every wait."""
    report_after_s: float = 60.0
    """Interval between progress reports of a long wait; needs a monitor."""

    def register(self, name: Called, actor: Any) -> None:
        """Adds an actor, which must have a method `identify`, to those that an error can be traced to; see `names`."""
        key = actor._actor_id.hex()
        self.names[key], self.actors[key] = name, actor

    def forget(self, actor: Any) -> None:
        """Removes an actor that was ended on purpose, so that no error is traced to it."""
        key = actor._actor_id.hex()
        self.names.pop(key, None)
        self.actors.pop(key, None)

    @property
    def everyone(self) -> set[str]:
        """The names of all registered actors."""
        return {name for called in self.names.values() for name in _names(called)}

    def gather(
        self, calls: Awaited, *, what: str, timeout_s: float, meanwhile: Poll | None = None, also: Further = tuple
    ) -> list[Any]:
        """Waits for calls and returns their results in order; fails at the first call that fails.

        Meanwhile polls `interrupted` and the monitor, reports a long wait in the log, and calls `meanwhile`.

        Args:
            calls: references, with what was called for each.
            what: what is waited for, for messages (`step 12`).
            timeout_s: for all calls together, in seconds; time spent in `meanwhile` does not count.
            meanwhile: called at every poll; an exception from it ends the wait.
            also: returns further calls, the end of which brings the next poll forward. `meanwhile` must handle those
                that have ended, so that they are not returned again.

        Raises:
            Overdue: some have not finished within `timeout_s`.
            DistillError: an actor raised or died; a WorkerError, unless the error needs a fix by the user or is a lack
                of GPU memory. Of several errors the likeliest cause is raised: a death, even of an actor that was not
                called.
        """
        results: dict[ray.ObjectRef, Any] = {}
        for done, pending in self._until_done(calls, what, timeout_s, meanwhile, also):
            ended, errors = _outcomes(done) if done else ({}, {})
            if errors:
                raise self._blame(errors | self._errors_within_grace(pending), calls, what)
            results |= ended
        return each(results[ref] for ref in calls)

    def outcomes(self, calls: Awaited, *, what: str, timeout_s: float) -> dict[ray.ObjectRef, Any]:
        """Waits until all calls have ended, in whatever way, and returns each one's result or Ray's error (not raised).

        Raises:
            Overdue: some have not ended within `timeout_s`.
        """
        for _ in self._until_done(calls, what, timeout_s):
            pass
        ended, errors = _outcomes(list(calls))
        return ended | errors

    def _until_done(
        self, names: Awaited, what: str, timeout_s: float, meanwhile: Poll | None = None, also: Further = tuple
    ) -> Iterator[tuple[Sequence[ray.ObjectRef], Sequence[ray.ObjectRef]]]:
        """Yields, at every poll, the calls that have ended since the last poll and those that have not, until all have."""
        # Polls `interrupted` and the monitor, and reports a long wait in the log. The arguments are those of `gather`.
        pending, start = list(names), time.monotonic()
        reported = start
        while pending:
            self.hosts.update()
            others, timeout = also(), _POLL_S
            done: Sequence[ray.ObjectRef] = ()
            if others:
                ended, _ = ray.wait([*pending, *others], num_returns=1, timeout=timeout, fetch_local=False)
                timeout = 0
            if not others or any(ref in names for ref in ended):
                done, pending = ray.wait(pending, num_returns=len(pending), timeout=timeout, fetch_local=False)
            self.interrupted()
            yield done, pending
            if not pending:
                return
            now = time.monotonic()
            waited_for = {name for ref in pending for name in _names(names[ref])}
            if now - start > timeout_s:
                raise self.late(waited_for, what, timeout_s)
            if meanwhile is not None:
                meanwhile()
                start += time.monotonic() - now  # time spent in `meanwhile` does not count against the actors
            if self.monitor is not None:
                self.monitor.update()
                if now - reported > self.report_after_s:
                    reported = now
                    self.monitor.report(waited_for, what, now - start, timeout_s)

    def until(
        self,
        finished: Callable[[], bool],
        meanwhile: Poll,
        also: Further,
        *,
        what: str,
        actors: Collection[str],
        timeout_s: float,
    ) -> None:
        """Calls `meanwhile` at every poll until `finished` returns True; the rest is as for `gather`, without a deadline.

        Args:
            actors: names of those that work on it, for the log.
            timeout_s: the deadline of each of their calls, for the log; `meanwhile` has to enforce it.
        """
        start = reported = time.monotonic()
        while not finished():
            if calls := also():
                ray.wait(list(calls), num_returns=1, timeout=_POLL_S, fetch_local=False)
            else:
                time.sleep(_POLL_S)
            self.poll()
            meanwhile()
            now = time.monotonic()
            if self.monitor is not None and now - reported > self.report_after_s:
                reported = now
                self.monitor.report(actors, what, now - start, timeout_s)

    def poll(self) -> None:
        """Polls signals and worker health, for callers with their own wait loop."""
        self.interrupted()
        self.hosts.update()
        if self.monitor is not None:
            self.monitor.update()

    def dead(self, what: str = "the run") -> dict[str, DistillError]:
        """Returns the registered actors whose process is gone, as far as Ray knows, by name, with the error to report.

        Waits up to 2 s for their answers.

        Args:
            what: what they were doing, for the messages.
        """
        return self._explained(_deaths(self._failures()), what)

    def lost(self, error: DistillError, among: Collection[str], what: str) -> dict[str, DistillError]:
        """Returns the actors that are dead or overdue after a call has failed with `error`, each with the error to report.

        Waits up to 6 s for one of `among` to be found so, or up to 25 s while one of them cannot be reached: Ray reports the
        actors of a lost node as dead only some seconds after other actors have failed because of it.

        Args:
            what: what was being done, for the messages.

        Raises:
            HostLost: what hosts the workers is gone, so that none of them can be replaced.
        """
        self.hosts.require()
        overdue = dict.fromkeys(error.actors, error) if isinstance(error, Overdue) else {}
        start = time.monotonic()
        while True:
            failed = self._failures()
            found = overdue | self._explained(_deaths(failed), what)
            errors = ((called, error) for called, error in failed.values() if isinstance(error, ActorUnavailableError))
            unreachable = {name for called, _ in errors for name in _names(called)}
            patience_s = NODE_KNOWN_WITHIN_S if unreachable & set(among) else _KNOWN_WITHIN_S
            if found.keys() & set(among) or time.monotonic() - start > patience_s:
                return found
            self.poll()
            time.sleep(_POLL_S)

    def _failures(self) -> Failures:
        """Calls all registered actors, and returns which do not answer because of an error within 2 s."""
        # The error of an earlier call may name an actor that could not fetch an object, not the one that died with it.
        calls = {actor.identify.remote(): self.names[key] for key, actor in self.actors.items()}
        return {ref: (calls[ref], error) for ref, error in self._errors_within_grace(list(calls)).items()}

    def _explained(self, failures: Failures, what: str) -> dict[str, DistillError]:
        by_name = {name: error for called, error in failures.values() for name in _names(called)}
        return {name: self._explain(error, name, what) for name, error in by_name.items()}

    def late(self, called: Iterable[Called], what: str, timeout_s: float) -> Overdue:
        """Returns (does not raise) the error for actors that have not finished `what` within `timeout_s` seconds."""
        names = sorted({name for one in called for name in _names(one)})
        rule = f"{what} must end within {timeout_s:g} s"
        return Overdue(", ".join(map(self._where, names)), rule, "no answer", self.when_late, names)

    def _errors_within_grace(self, pending: Sequence[ray.ObjectRef]) -> dict[ray.ObjectRef, BaseException]:
        """Returns the errors of those calls that fail within 2 s; waits that long unless all end earlier."""
        if not pending:
            return {}
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_FIRST_CAUSE_S, fetch_local=False)
        return _outcomes(done)[1]

    def _blame(self, errors: Mapping[ray.ObjectRef, BaseException], names: Awaited, what: str) -> DistillError:
        """Returns the one error to report of those that calls raised: a death if there is one."""
        # Even the death of an actor that was not called comes first, because it is the likeliest cause.
        if all(_priority(error) != _DEATH for error in errors.values()):
            deaths = _deaths(self._failures())
            errors = {**errors, **{ref: error for ref, (_, error) in deaths.items()}}
            names = {**names, **{ref: called for ref, (called, _) in deaths.items()}}
        ref, error = min(errors.items(), key=lambda item: _priority(item[1]))
        called = self.names.get(_actor_id(error)) or names[ref]
        explained = self._explain(error, _names(called)[0], what)
        explained.add_note(re.sub(r"\x1b\[[0-9;]*m", "", str(error)))  # Ray's text and traceback, without colours
        return explained

    def _explain(self, error: BaseException, name: str, what: str) -> DistillError:
        """Converts Ray's error to one of ours: one line with the actor, its node, what it was doing, and the cause."""
        # For a dead actor it adds why it died and its last output. An error that the user has to fix (exit code 2) is returned as the actor
        # raised it.
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, RankError):
            name, cause = cause.name, cause.cause
            error = cause if isinstance(cause, RayError) else error
        actor = self._where(name)
        if isinstance(cause, DistillError) and cause.exit_code == 2:  # the user has to fix it, wherever it was found
            return cause
        if isinstance(cause, GpuMemoryError):
            return GpuMemoryError(f"{actor}, {what}", f"{cause.what} {cause.rule}", cause.value, cause.remedy)
        if isinstance(error, RayTaskError | RankError):
            if is_out_of_memory(cause):
                return GpuMemoryError(f"{actor}, {what}", "needs more GPU memory", amounts(cause), _SEE_ESTIMATE)
        elif isinstance(error, OutOfMemoryError):
            return WorkerError(actor, f"{what} failed", "killed for memory", _SEE_ESTIMATE)
        elif isinstance(error, RayActorError):
            cause_of_death = (self.monitor and self.monitor.fate(name)) or _death(error)
            words = self.monitor.last_words(name) if self.monitor else ""
            value = f"{cause_of_death} (its last words: {words})" if words else cause_of_death
            return WorkerError(actor, f"its process died during {what}", value, self.after_death)
        return WorkerError(actor, f"{what} failed", f"{type(cause).__name__}: {first_line(cause)[:500]}")

    def _where(self, name: str) -> str:
        """An actor's name, with its node if that is known."""
        return self.monitor.where(name) if self.monitor else name


def _outcomes(refs: Sequence[ray.ObjectRef]) -> tuple[dict[ray.ObjectRef, Any], dict[ray.ObjectRef, BaseException]]:
    """Returns the results of those calls that succeeded, and the errors of those that failed. All must have ended."""
    results: dict[ray.ObjectRef, Any] = {}
    errors: dict[ray.ObjectRef, BaseException] = {}
    try:
        results = dict(zip(refs, ray.get(list(refs), timeout=_FETCH_S), strict=True))
    except RayError:  # of one of them
        for ref in refs:
            try:
                results[ref] = ray.get(ref, timeout=_FETCH_S)
            except RayError as error:
                # A rank passes on the death of the one that an argument is from.
                cause = error.cause if isinstance(error, RayTaskError) else error
                errors[ref] = cause if isinstance(cause, RayError) else error
    errors |= {ref: result.error for ref, result in results.items() if isinstance(result, Failed)}
    return {ref: result for ref, result in results.items() if ref not in errors}, errors


def _names(called: Called) -> tuple[str, ...]:
    """The names of all actors that a call is for."""
    return (called,) if isinstance(called, str) else called


def _deaths(failures: Failures) -> Failures:
    return {ref: (name, error) for ref, (name, error) in failures.items() if _priority(error) == _DEATH}


def _priority(error: BaseException) -> int:
    """Returns the rank of an error among those that could be reported; the lowest is the likeliest cause."""
    # Deaths are 0, because other errors are mostly their consequences; then come errors that an actor raised, our own (1) before foreign
    # ones (2), then all others (3).
    cause = error.cause if isinstance(error, RayTaskError) else error
    cause = cause.cause if isinstance(cause, RankError) else cause
    if isinstance(cause, ActorDiedError | OutOfMemoryError):
        return _DEATH
    if isinstance(error, RayTaskError | RankError):
        return 1 if isinstance(cause, DistillError) else 2
    return 3


def _actor_id(error: BaseException) -> str:
    """Id (hex) of the actor whose death an error reports; empty if it reports none."""
    actor_id = getattr(error, "actor_id", None) or ""
    return actor_id if isinstance(actor_id, str) else actor_id.hex()


def _death(error: BaseException) -> str:
    """Returns how an actor's process ended, from the text of Ray's error; the text's first line if it does not say."""
    text = str(error)
    match = re.search(r"Worker exit detail: (.*?)(?:\. |\n|$)", text) or re.search(r"exit type: (\S+)", text)
    return match.group(1).strip() if match else first_line(error)[:500]
