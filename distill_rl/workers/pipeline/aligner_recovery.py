"""Restarts aligners that die or hang, within a budget, and finds the rows that they fail on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from distill_rl.config.schema import Config
from distill_rl.errors import DistillError, WorkerError
from distill_rl.types import BadRow, row_of
from distill_rl.workers.cluster.calls import Calls
from distill_rl.workers.cluster.group import WorkerGroup
from distill_rl.workers.pipeline.bad_rows import BadRows

log = logging.getLogger(__name__)


@dataclass
class AlignerRecovery:
    """Replaces aligners after failed calls. Its methods wait until an aligner works again."""

    _group: WorkerGroup
    _calls: Calls
    _config: Config
    _bad_rows: BadRows
    restarts: int = 0
    """Number of aligners that were replaced."""
    failure: DistillError | None = None
    """Why an aligner could not be replaced; set once, and no aligner should be called any more."""

    def recover(self, rank: int, call: ray.ObjectRef, error: DistillError) -> None:
        """Replaces an aligner if it died or does not answer; otherwise does nothing.

        Args:
            call: the only call that it had.
            error: why that call failed.

        Raises:
            DistillError: `error`, if the user has to fix its cause; or the replacement does not start.
            WorkerError: more aligners were replaced than `faults.aligner_restarts`, or (HostLost) none can be.
        """
        if error.exit_code == 2:
            raise error
        self._calls.hosts.require()
        log.warning("%s: %s; got %s", error.what, error.rule, error.value)
        if _answered(call):
            return
        name = self._group.names[rank]
        budget = f"faults.aligner_restarts={self._config.faults.aligner_restarts}"
        try:
            if self.restarts >= self._config.faults.aligner_restarts:
                rule = f"aligners may be replaced {budget} times"
                raise WorkerError(name, rule, str(error), "fix what ends them, or raise it") from error
            self.restarts += 1
            log.warning("%s is replaced (%d of %s)", name, self.restarts, budget)
            self._group.replace(rank, timeout_s=self._config.ray.start_timeout_s)
        except DistillError as failure:
            self.failure = failure
            raise

    def find_bad_rows(self, rank: int, source: str, documents: Sequence[Mapping[str, Any]]) -> None:
        """Tries each document that is not known to be bad on its own, and records those that fail.

        Args:
            rank: of an aligner without a call. It is replaced where it dies or hangs.
            source: `train` or `validation`.

        Raises:
            DistillError: as for `recover`; or more rows are bad than the budget allows.
        """
        for document in self._bad_rows.others(source, documents):
            row = row_of(document)
            calls = self._group.submit("try_row", document, ranks=[rank])
            try:
                self._calls.gather(calls, what=f"aligning row {row}", timeout_s=self._config.aligner.deadline_s)
            except DistillError as error:
                self.recover(rank, next(iter(calls)), error)
                self._bad_rows.add(source, BadRow(row, str(error)))


def _answered(call: ray.ObjectRef) -> bool:
    """Returns whether a call has returned or raised, so that its actor is alive and free; does not wait."""
    try:
        ray.get(call, timeout=0)
    except RayTaskError:
        return True
    except (RayError, TimeoutError):
        return False
    return True
