"""distill-rl follow: what a run does, read from its folder alone, such as from the login node of a cluster."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from distill_rl.config.capture import CAPTURES
from distill_rl.errors import ConfigError, problem
from distill_rl.observe.log import clock_time, printable, setup_console
from distill_rl.observe.metrics import SECONDS, STEPS
from distill_rl.observe.sinks import ProgressSink

_POLL_S = 1.0
_SILENT_S = 30.0
"""Seconds without a sign of life after which a run counts as dead: it touches its lock file every five."""
_STEPS = re.compile(r"distill_rl\.run: (?:training  steps \d+ to|steps     )\s*([\d,]+)")
_CAPTURED = re.compile(r"distill_rl\.run: (stored|stopped)   ")
"""The last of these lines is `stored` if a capture went through all documents."""
_FAULT = re.compile(r" (?:WARNING|ERROR) |distill_rl\.run: (?:skipped |going on |.*\breplaced\b|.*\brestarting\b)")


def follow(runs: Sequence[Path], *, once: bool) -> int:
    """Prints state, step, time left and the last fault of a run, then each new step and line of its log, until it ends.

    A capture has no steps. Of several runs it prints a line each. Reads the run directories only; needs neither Ray nor torch.

    Args:
        once: return after the first lines.

    Raises:
        ConfigError: one is no run directory.
    """
    setup_console()
    wrong = [run for run in runs if not (run / "logs" / "latest").exists()]
    rule, remedy = "must be a run directory, in which a run has begun", "give RUN.DIR/RUN.NAME"
    ConfigError.raise_all(problem(f"{run}", rule, remedy=remedy) for run in wrong)
    if len(runs) > 1:
        width = max(len(run.name) for run in runs)
        for run in runs:
            step = "" if _is_capture(run) else f", step {_KnownState(run).step_text}"
            print(printable(f"{run.name:<{width}}  {_state(run)}{step}"))
        return 0
    (run,) = runs
    known = _KnownState(run)
    print(f"state     {_state(run)}")
    if not _is_capture(run):
        print(f"step      {known.step_text}")
    if faults := [line for line in known.lines if _FAULT.search(line)]:
        print(f"fault     {printable(faults[-1])}")
    if once:
        return 0
    with closing(ProgressSink(known.total, start_step=known.step)) as progress:
        while True:
            alive = _state(run).startswith("running")  # before the last lines are read
            for line in known.log.lines():
                print(printable(line), flush=True)
                if (total := _total([line])) is not None:
                    progress.expect(total)
            for line in known.metrics.lines():
                record = json.loads(line)
                progress.write(record.pop("step"), {name: value for name, value in record.items() if value is not None})
            if not alive:
                print(f"state     {_state(run)}")
                return 0
            time.sleep(_POLL_S)


class _KnownState:
    """What a run's log and records tell so far."""

    def __init__(self, run: Path):
        self.log, self.metrics = _driver_log(run), _Tail(run / "metrics.jsonl")
        self.lines = list(self.log.lines())
        records = [json.loads(line) for line in self.metrics.lines()]
        self.total = _total(self.lines) or _total_before(run)
        self.step = records[-1]["step"] if records else 0
        self.step_text = f"{self.step:,} of {self.total or 'an unknown number'}{_left(records, self.step, self.total)}"


def _is_capture(run: Path) -> bool:
    """Whether a run directory is that of a capture; one in which steps were made is a training's, wherever it lies."""
    return run.resolve().parent.name == CAPTURES and not (run / "metrics.jsonl").exists()


def _state(run: Path) -> str:
    """What the run does, by its lock file, which it touches while it lives and empties when it ends."""
    lock = run / ".lock"
    owner = lock.read_text().strip() if lock.exists() else ""
    if not owner and _is_capture(run):
        said = [match[1] for line in _driver_log(run).lines() if (match := _CAPTURED.search(line))]
        return "finished" if said[-1:] == ["stored"] else "ended before its last document"
    if not owner:
        return "finished" if (run / "export").is_dir() else "ended before its last step"
    silent = time.time() - lock.stat().st_mtime
    if silent > _SILENT_S:
        return f"died without a word: process {owner} has given no sign of life for {clock_time(silent)}"
    return f"running, as process {owner}"


def _total(lines: list[str]) -> int | None:
    """The steps of the whole run, by the last line of the log that tells them."""
    found = [match[1] for line in lines if (match := _STEPS.search(line))]
    return int(found[-1].replace(",", "")) if found else None


def _total_before(run: Path) -> int | None:
    """The steps of the whole run by the logs of earlier attempts: the last one may have ended before it knew them."""
    logs = {log.stat().st_mtime_ns: log for log in (run / "logs").glob("attempt_*/driver.log")}
    totals = (_total(list(_Tail(logs[time_ns]).lines())) for time_ns in sorted(logs, reverse=True))
    return next(filter(None, totals), None)


def _left(records: list[dict[str, float]], step: int, total: int | None) -> str:
    """The time that the remaining steps take at the speed of the last ones, in words; empty if it is not known."""
    timed = [record for record in records[-20:] if SECONDS in record]
    steps = sum(record.get(STEPS, 1) for record in timed)
    if not timed or total is None or step >= total:
        return ""
    seconds = sum(record[SECONDS] * record.get(STEPS, 1) for record in timed) / steps
    return f", {clock_time(seconds * (total - step))} left at {seconds:.3g} s per step"


class _Tail:
    """The lines of a growing file, each once. A file that is replaced, as by the next attempt, is read from its beginning."""

    def __init__(self, path: Path):
        self._path, self._offset, self._identity = path, 0, (0, 0)

    def lines(self) -> Iterator[str]:
        """Yields the whole lines that have come since the last call."""
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._offset:
                    self._offset, self._identity = 0, (status.st_dev, status.st_ino)
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        yield from whole.decode(errors="replace").splitlines()


def _driver_log(run: Path) -> _Tail:
    """The log of the latest attempt."""
    return _Tail(run / "logs" / "latest" / "driver.log")
