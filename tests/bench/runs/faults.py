"""How long a run takes to recover from the death of a worker, and whether its losses are those of an undisturbed run.

The real command line trains random models with different tokenizers. Workers are found among the driver's children by
their Ray process title, and killed (SIGKILL) or stopped (SIGSTOP) in the middle of the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tests.bench import harness
from tests.bench.material import write_config, write_pair

PROMISE_S = 30.0
"""Most seconds from a death to the next step, or to the end of a run that it ends."""
STRIKE_AFTER = 10
"""Steps before the fault."""
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Fault:
    """A signal for a worker; `ends_the_run`: the run may not restart the student, and has to be resumed."""

    worker: str
    """Class of the actor."""
    number: signal.Signals
    ends_the_run: bool = False


FAULTS = {
    "teacher killed": Fault("TeacherWorker", signal.SIGKILL),
    "teacher stopped": Fault("TeacherWorker", signal.SIGSTOP),
    "aligner killed": Fault("AlignerWorker", signal.SIGKILL),
    "student killed": Fault("StudentWorker", signal.SIGKILL),
    "student stopped": Fault("StudentWorker", signal.SIGSTOP),
    "student killed, no restarts": Fault("StudentWorker", signal.SIGKILL, ends_the_run=True),
}


def train(root: Path, name: str, steps: int, fault: Fault | None = None) -> dict[str, Any]:
    """Runs once and returns the losses and, with a fault, the seconds that it cost.

    A run that the fault ends is resumed to its last step.

    Args:
        name: of the run and its configuration.
        fault: what happens after the first `STRIKE_AFTER` steps; None: nothing.

    Returns:
        `losses` of all steps; with a fault also `seconds_without_a_step`, the longest time between two steps, and
        `seconds_to_the_end`, from the fault to the end of the process, if the fault ends the run.

    Raises:
        SystemExit: the run, or the resumed one, failed, or `strike` did.
        subprocess.TimeoutExpired: the run took too long; it is killed.
    """
    restarts = 0 if fault and fault.ends_the_run else 3
    config = write_config(
        root,
        name,
        steps=steps,
        batch=16,
        micro_batch=16,
        length=128,
        checkpoint={"every": 5},
        faults={"student_restarts": restarts},
    )
    folder = root / "runs" / name
    metrics = folder / "metrics.jsonl"
    figures: dict[str, Any] = {}
    with _running(config) as process:
        struck = strike(process, metrics, fault) if fault else 0.0
        code = process.wait(_DEADLINE_S)
        if fault and fault.ends_the_run:
            figures["seconds_to_the_end"] = time.time() - struck
            with _running(config, "--resume") as again:
                code = again.wait(_DEADLINE_S)
    if code:
        raise SystemExit(f"exit code {code}; {harness.failure(folder)}")
    records = harness.step_records(metrics)
    if fault:
        gaps = [(late["time"] - early["time"]) for early, late in pairwise(records)]
        figures["seconds_without_a_step"] = max(gaps)
    return figures | {"losses": [step["train/loss"] for step in records]}


def strike(process: subprocess.Popen[bytes], metrics: Path, fault: Fault) -> float:
    """Waits for `STRIKE_AFTER` steps and sends the fault's signal to one such worker; returns the time since the epoch.

    Args:
        process: the driver, whose children are searched.
        metrics: the run's metrics.jsonl.

    Raises:
        SystemExit: the run ended or took too long before that step, or has no such worker.
    """
    deadline = time.monotonic() + _DEADLINE_S
    while len(harness.step_records(metrics)) < STRIKE_AFTER:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run did not reach step {STRIKE_AFTER}")
        time.sleep(0.02)
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if child.cmdline()[0].startswith(f"ray::{fault.worker}"):
                os.kill(child.pid, fault.number)
                return time.time()
    raise SystemExit(f"no {fault.worker} process was found")


@contextmanager
def _running(config: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A training run, one thread per process, with its output discarded; killed if it still runs when the block ends.

    Args:
        more: further arguments of the command.
    """
    environment = os.environ | harness.ONE_THREAD
    command = harness.train_command(config, *more)
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()  # does nothing to one that has ended


def measure(root: Path, *, steps: int = 60, repeats: int = 3) -> dict[str, Any]:
    """By fault, median and maximum seconds over the repeats, and whether all losses equal those of an undisturbed run.

    Losses are compared bit for bit.

    Args:
        steps: optimizer steps per run.
        repeats: runs per fault.
    """
    write_pair(root, rows=64, words_per_row=300, length=128)
    expected = train(root, "undisturbed", steps)["losses"]
    faults: dict[str, Any] = {}
    for title, fault in FAULTS.items():
        runs = [train(root, f"{title.replace(', ', ' ').replace(' ', '-')}-{i}", steps, fault) for i in range(repeats)]
        faults[title] = {"same_losses": all(run.pop("losses") == expected for run in runs)}
        for name in runs[0]:
            seconds = [run[name] for run in runs]
            faults[title][name] = {"median": round(median(seconds), 2), "max": round(max(seconds), 2)}
    return {"faults": faults, "repeats": repeats, "steps": steps}


def verdict(figures: dict[str, Any]) -> list[str]:
    """Missed targets, one line each."""
    targets = []
    for title, fault in figures["faults"].items():
        seconds = fault.get("seconds_to_the_end", fault["seconds_without_a_step"])["max"]
        targets += [
            (not fault["same_losses"], f"{title}: the losses differ from those of the undisturbed run"),
            (seconds > PROMISE_S, f"{title}: {seconds:.1f} s; must be at most {PROMISE_S:g} s"),
        ]
    return harness.missed(*targets)


main = harness.program("faults", measure, verdict)

if __name__ == "__main__":
    sys.exit(main())
