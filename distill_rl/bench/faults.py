"""How long a run takes to recover from the death of a worker, and whether its losses are those of an undisturbed run.

The real command line trains random models with different tokenizers. Workers are found among the driver's children by
their Ray process title, and killed (SIGKILL) or stopped (SIGSTOP) in the middle of the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from distill_rl.bench import harness
from distill_rl.bench.prefetch import write_material

PROMISE_S = 30.0
"""Most seconds from a teacher's death to the next step, or from a student's death to the end of the run."""
STRIKE_AFTER = 10
"""Steps before the fault."""
_DEADLINE_S = 600.0
CONFIG = """\
run: {{name: {name}, dir: {root}/runs}}
student: {{model: {root}/student, dtype: fp32}}
teachers: [{{name: teacher, model: {root}/teacher, dtype: fp32}}]
data: {{path: {root}/text.jsonl, max_length: 128}}
loss: {{top_k: 16}}
optimizer: {{lr: 1.0e-3}}
train: {{steps: {steps}, global_batch_size: 16, micro_batch_size: 16}}
aligner: {{workers: 1}}
checkpoint: {{every: 5}}
observe: {{tensorboard: false}}
"""


@dataclass(frozen=True)
class Fault:
    worker: str
    """Class of the actor."""
    number: signal.Signals
    ends_the_run: bool = False


FAULTS = {
    "teacher killed": Fault("TeacherWorker", signal.SIGKILL),
    "teacher stopped": Fault("TeacherWorker", signal.SIGSTOP),
    "aligner killed": Fault("AlignerWorker", signal.SIGKILL),
    "student killed": Fault("StudentWorker", signal.SIGKILL, ends_the_run=True),
    "student stopped": Fault("StudentWorker", signal.SIGSTOP, ends_the_run=True),
}


def train(root: Path, name: str, steps: int, fault: Fault | None = None) -> dict[str, Any]:
    """Run once, with a fault after the first steps; return the seconds that the fault cost and the losses."""
    config = root / f"{name}.yaml"
    config.write_text(CONFIG.format(root=root, name=name, steps=steps), "utf-8")
    metrics = root / "runs" / name / "metrics.jsonl"
    found: dict[str, Any] = {}
    with _started(config) as process:
        struck = strike(process, metrics, fault) if fault else 0.0
        code = process.wait(_DEADLINE_S)
        if fault and fault.ends_the_run:
            found["seconds_to_the_end"] = time.time() - struck
            with _started(config, "--resume") as again:
                code = again.wait(_DEADLINE_S)
    if code:
        raise SystemExit(f"{name}: exit code {code}")
    records = harness.step_records(metrics)
    if fault:
        gaps = [(late["time"] - early["time"]) for early, late in pairwise(records)]
        found["seconds_without_a_step"] = max(gaps)
    return found | {"losses": [step["train/loss"] for step in records]}


def strike(process: subprocess.Popen[bytes], metrics: Path, fault: Fault) -> float:
    """Send the signal after STRIKE_AFTER steps; return the time."""
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


def _started(config: Path, *more: str) -> subprocess.Popen[bytes]:
    environment = os.environ | harness.ONE_THREAD
    command = [sys.executable, "-m", "distill_rl", "train", "-c", str(config), *more]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def compare(root: Path, repeats: int, steps: int) -> dict[str, Any]:
    """Medians over the repeats, and whether the losses equal those of an undisturbed run bit for bit."""
    expected = train(root, "undisturbed", steps)["losses"]
    figures: dict[str, Any] = {}
    for title, fault in FAULTS.items():
        runs = [train(root, f"{title.replace(' ', '-')}-{n}", steps, fault) for n in range(repeats)]
        same = all(run.pop("losses") == expected for run in runs)
        figures[title] = {
            name: {
                "median": round(median(run[name] for run in runs), 2),
                "max": round(max(run[name] for run in runs), 2),
            }
            for name in runs[0]
        } | {"same_losses": same}
    return {"faults": figures, "repeats": repeats, "steps": steps}


def verdict(figures: dict[str, Any]) -> list[str]:
    """Missed targets, one line each."""
    problems = []
    for title, found in figures["faults"].items():
        if not found["same_losses"]:
            problems.append(f"{title}: the losses differ from those of the undisturbed run")
        seconds = found.get("seconds_to_the_end", found["seconds_without_a_step"])["max"]
        if seconds > PROMISE_S:
            problems.append(f"{title}: {seconds:.1f} s; must be at most {PROMISE_S:g} s")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps per run; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="runs per fault; default: %(default)s")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_material(Path(folder), rows=64, words_per_row=300, length=128)
        figures = compare(Path(folder), options.repeats, options.steps)
    for title, found in figures["faults"].items():
        times = [
            f"{name.replace('_', ' ')} {value['median']:.1f} (max {value['max']:.1f})"
            for name, value in found.items()
            if isinstance(value, dict)
        ]
        print(f"{title:<16} {', '.join(times)}; losses {'the same' if found['same_losses'] else 'DIFFERENT'}")
    return harness.finish("faults", figures, options.out, verdict(figures))


if __name__ == "__main__":
    sys.exit(main())
