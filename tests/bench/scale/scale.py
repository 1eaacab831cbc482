"""What a step costs the driver, by number of ranks and of micro-batches, with ranks that compute nothing.

The loop, pipeline, aligners, transports and recovery are those of a run; only the models are missing (`stubs`). A case is a driver in a
process of its own on a Ray of its own, of one node or of several that share this machine (`nodes`). With many ranks several
of them share a process (`hosts`), which changes neither the driver's calls nor its references. The driver's CPU time is that of its process, all threads included; on a machine whose cores the ranks fill, wall times
say little.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import mkdtemp
from typing import Any

from distill_rl.system.processes import call_in_child
from tests.bench import harness
from tests.bench.material import train_tokenizer, write_config, write_llama, write_texts
from tests.bench.scale.nodes import ray_nodes
from tests.bench.scale.stubs import ENDED, IDLE
from tests.bench.scale.watch import watching

RANKS = (4, 8, 16, 32, 64, 128)
MICRO_BATCHES = (1, 2, 4, 8)
AMONG = 16
"""Ranks with which numbers of micro-batches are compared."""
PROCESSES = 16
"""Most processes that hold ranks."""
WIDTH = 4
"""Ranks of a teacher's replica, tensor parallel."""
STEPS, WARM_UP = 200, 10
AFTER_DEATH = 3
"""Steps after the death of a teacher, which are not among those whose cost is measured."""
VICTIM = "teacher/dp0-tp0"
"""It dies with all ranks of its process. Where these are several replicas no teacher dies, because they would not be found to be dead."""
MOST_CPU_MS, WITHIN = 20.0, 64
"""The target: CPU milliseconds of the driver per step, and the ranks up to which it holds."""
SMALL, MOST_BETWEEN_MS = 8, 2.0
"""The target for ranks that sleep: milliseconds between two steps, and the ranks up to which two cores can run them on time."""
FAR = 2000
"""Ranks of 1,000 GPUs, each with one of the student's and one of the teacher's."""
_DEADLINE_S = 900.0
_LENGTH = 32


@dataclass(frozen=True, slots=True)
class Case:
    """Half of the ranks are the student's, all data parallel, the other half the teacher's."""

    ranks: int
    micro_batches: int = 1
    """Of a student rank and step."""
    steps: int = STEPS
    nodes: int = 1
    """Of the Ray cluster."""
    sleep_ms: int = 0
    """Of a student rank in a step."""

    @property
    def student(self) -> int:
        return self.ranks // 2

    @property
    def tp(self) -> int:
        """Of the teacher."""
        return min(WIDTH, self.ranks // 2)

    @property
    def per_process(self) -> int:
        """Ranks that share a process: whole replicas, if any share one."""
        return 1 if self.ranks <= PROCESSES else max(self.tp, self.ranks // PROCESSES)


def write_material(root: Path, rows: int) -> None:
    """Writes student/ and teacher/ (tokenizer and a model that is never loaded) and text.jsonl below `root`."""
    texts = write_texts(root / "text.jsonl", rows=rows, words_per_row=16)
    tokenizer = train_tokenizer(texts[:64], 600, "</s>")
    for name in ("student", "teacher"):
        tokenizer.save_pretrained(root / name)
        write_llama(root / name, tokenizer, hidden_size=16, intermediate_size=32, num_hidden_layers=1)


def configuration(root: Path, case: Case, address: str | None = None) -> Path:
    """Writes the configuration of a case and returns its path.

    Args:
        address: of the Ray cluster that it joins; None: it starts Ray.
    """
    return write_config(
        root,
        f"ranks-{case.ranks}-micro-batches-{case.micro_batches}",
        steps=case.steps,
        batch=case.student * case.micro_batches,
        micro_batch=1,
        length=_LENGTH,
        student={"model": f"{root}/student", "dtype": "fp32", "parallel": {"dp": case.student}},
        teachers=[
            {
                "name": "teacher",
                "model": f"{root}/teacher",
                "dtype": "fp32",
                "parallel": {"dp": case.student // case.tp, "tp": case.tp},
            }
        ],
        ray={"dashboard": False, "start_timeout_s": 600} | ({"address": address} if address else {}),
        checkpoint={"every": 0},
        transport="object_store" if address else "shared_memory",
    )


def drive(config_path: Path, per_process: int, with_death: bool = True, seconds: float = 0.0) -> dict[str, Any]:
    """Runs a configuration with ranks that compute nothing to its last step; in a process of its own.

    Args:
        per_process: ranks that share a process.
        with_death: kill a teacher near the end.
        seconds: that a step takes a rank of the student.

    Returns:
        `objects`: references that the driver holds after it; `called`: the Unix times at which it began to call the student on a step.
    """
    from distill_rl.config.load import load_config
    from distill_rl.observe.log import log_file
    from distill_rl.run import run_directory
    from distill_rl.run.driver import Driver
    from distill_rl.run.job import prepare
    from distill_rl.run.opened import open_rows
    from distill_rl.run.start import Roles
    from distill_rl.system.signals import Signals
    from distill_rl.workers.cluster.group import WorkerGroup
    from tests.bench.scale.hosts import HostedGroup
    from tests.bench.scale.stubs import StubTeacher, sleeping_student

    class LoopAlone(Driver):
        """A driver whose run ends with its last step, because there is nothing to export; near the end it may lose a teacher."""

        def record(self, *arguments: Any) -> None:
            super().record(*arguments)
            if with_death and self.state.step == self.loader.total_steps - AFTER_DEATH:
                self.actors.calls.processes[VICTIM].kill()

        def finish(self) -> int:
            return 0

    group = WorkerGroup if per_process == 1 else partial(HostedGroup, per_process)
    roles = Roles(sleeping_student(seconds), StubTeacher, group)
    config, signals = load_config(config_path), Signals()
    with (
        run_directory.occupy(config, clean=True) as paths,
        log_file(paths.logs / "driver.log"),
        signals,
        LoopAlone.open(prepare(open_rows(config), paths), signals, roles) as driver,
    ):
        called = _note_calls(driver.student)
        driver.run()
        return {"objects": _references(), "called": called}


def _note_calls(student: Any) -> list[float]:
    """Unix times at which the ranks of a student are called from now on, one per step."""
    called: list[float] = []
    submit = student._group.submit_each

    def noted(*arguments: Any, **keywords: Any) -> Any:
        called.append(time.time())
        return submit(*arguments, **keywords)

    student._group.submit_each = noted
    return called


def _references() -> int:
    """References to objects that this process holds."""
    from ray._private.worker import global_worker

    gc.collect()  # the errors of a death refer to each other
    return len(global_worker.core_worker.get_all_reference_counts())  # type: ignore[attr-defined]


def run(root: Path, case: Case) -> dict[str, Any]:
    """Runs a case, and returns what a step costs: means after the warm-up."""
    with ExitStack() as stack:
        address = None
        if case.nodes > 1:
            cpus = -(-2 * case.ranks // case.nodes)
            address = stack.enter_context(ray_nodes(Path(mkdtemp(dir=root)), case.nodes, cpus))
        config, began = configuration(root, case, address), time.time()
        watch = stack.enter_context(watching())
        with_death = case.per_process <= case.tp
        found = call_in_child(
            config.stem, drive, config, case.per_process, with_death, case.sleep_ms / 1000, deadline_s=_DEADLINE_S
        )
    first, *records = harness.step_records(root / "runs" / config.stem / "metrics.jsonl")
    replaced = sum(record.get("timing/recovery", 0.0) for record in records[-AFTER_DEATH:])
    # Before it the driver called the student on a step: milliseconds after the end of the step before.
    after_ms = [1000 * (found["called"][record["step"] - 1] - before[ENDED]) for before, record in pairwise(records)]
    del found["called"]
    records, after_ms = records[WARM_UP:-AFTER_DEATH], after_ms[WARM_UP:-AFTER_DEATH]
    cpu = [record["timing/driver/cpu"] for record in records]
    return {
        "ranks": case.ranks,
        "micro_batches": case.micro_batches,
        "ranks_per_process": case.per_process,
        "nodes": case.nodes,
        "start_s": round(first["time"] - began, 1),
        "driver_cpu_ms": round(1000 * fmean(cpu), 2),
        "replace_teacher_s": round(replaced, 1) if with_death else None,
        "step_ms": round(1000 * fmean(after["time"] - before["time"] for before, after in pairwise(records)), 1),
        "sleep_ms": case.sleep_ms,
        "called_ahead": round(fmean(ms <= 0 for ms in after_ms), 3),
        "gap_ms": round(fmean(max(ms, 0.0) for ms in after_ms), 2),
        "idle_ms": round(1000 * fmean(record[IDLE] for record in records), 2),
        **watch.per_step(steps_by_time(records)),
        **found,
    }


def steps_by_time(records: Sequence[Mapping[str, Any]]) -> dict[float, int]:
    """Finished steps by Unix time, from the records of a run."""
    return {record["time"]: record["step"] for record in records}


def measure(
    folder: Path,
    *,
    ranks: tuple[int, ...] = RANKS,
    micro_batches: tuple[int, ...] = MICRO_BATCHES,
    steps: int = STEPS,
    nodes: int = 1,
    sleep_ms: int = 0,
) -> dict[str, Any]:
    """Runs all cases.

    Args:
        ranks: numbers of ranks, with a micro-batch each.
        micro_batches: numbers of micro-batches, with 16 ranks.
        steps: of each case.
        nodes: of the Ray cluster; several of them share this machine, and targets take the transport between nodes.
        sleep_ms: that a step takes a rank of the student, which sleeps.
    """
    write_material(folder, rows=4096)
    sizes = [(count, 1) for count in ranks] + [(AMONG, count) for count in micro_batches]
    cases = [Case(*size, steps, nodes, sleep_ms) for size in dict.fromkeys(sizes)]
    found = [run(folder, case) for case in cases]
    return {"cases": found, "fit": fit(found)}


def fit(cases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The driver's CPU time as a + b · ranks + c · ranks · micro-batches, by least squares of the relative differences.

    Otherwise the largest case would decide alone: its noise exceeds the whole cost of a small one.

    Args:
        cases: as of `run`.

    Returns:
        The three numbers in ms, and what follows for `FAR` ranks of one micro-batch, with the standard error of a single step time
        predicted there; 0 if there are only as many cases as numbers.
    """
    import numpy as np

    ranks, micro_batches, cost = (
        np.array([case[name] for case in cases]) for name in ("ranks", "micro_batches", "driver_cpu_ms")
    )
    terms = np.stack([np.ones(len(ranks)), ranks, ranks * micro_batches], axis=1) / cost[:, None]
    found, _, _, _ = np.linalg.lstsq(terms, np.ones(len(cost)), rcond=None)
    there = np.array([1, FAR, FAR])
    free = len(cases) - terms.shape[1]
    variance = float(((terms @ found - 1) ** 2).sum() / free) if free > 0 else 0.0
    error = np.sqrt(variance * ((there @ found) ** 2 + there @ np.linalg.pinv(terms.T @ terms) @ there))
    fixed, per_rank, per_micro_batch = map(float, found)
    return {
        "fixed_ms": fixed,
        "per_rank_ms": per_rank,
        "per_rank_and_micro_batch_ms": per_micro_batch,
        "far_ranks": FAR,
        "far_ms": float(there @ found),
        "far_error_ms": float(error),
    }


def verdict(figures: Mapping[str, Any]) -> list[str]:
    """Missed targets, one line each."""
    sleeping = [case for case in figures["cases"] if case["sleep_ms"]]
    return harness.missed(
        *(
            (
                case["called_ahead"] < 1,
                f"{case['ranks']} ranks: the student is called on {case['called_ahead']:.1%} of the steps before the end of the last one; "
                "must be on all",
            )
            for case in sleeping
        ),
        *(
            (
                case["ranks"] <= SMALL and case["step_ms"] > case["sleep_ms"] + MOST_BETWEEN_MS,
                f"{case['ranks']} ranks: a step takes {case['step_ms']:.1f} ms, of which a rank sleeps {case['sleep_ms']} ms; "
                f"must be at most {MOST_BETWEEN_MS:g} ms more",
            )
            for case in sleeping
        ),
        *(
            (
                case["ranks"] <= WITHIN and case["driver_cpu_ms"] > MOST_CPU_MS,
                f"{case['ranks']} ranks, {case['micro_batches']} micro-batches: a step takes {case['driver_cpu_ms']:.1f} ms of the "
                f"driver's CPU; must be at most {MOST_CPU_MS:g} ms",
            )
            for case in figures["cases"]
        ),
    )


main = harness.program("scale", measure, verdict)

if __name__ == "__main__":
    sys.exit(main())
