"""How fast targets are captured, and how fast a student is trained from a store, live, and with targets held in memory.

1. Write two random models with the same tokenizer to a temporary folder. The teacher has so many layers that its forward
   pass takes five times as long as the student's whole step.
2. In turn: capture the targets with the real command line; time the teacher alone on the same rows, with its head and top k.
3. In turn: train with the real command line, live and from the store; time the student's engine alone, in a process of its
   own, on the same rows with their targets held in memory.

In training every model has one thread, and a capturing teacher two. Live and stored runs must have the same losses, bit for bit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench import harness
from tests.bench.runs.pipeline import CORES, WARM_UP, configuration, figures, make_equal, write_material, write_teacher

TIMES = 5
"""How much longer the teacher takes than the student."""
LEAST_OF_MEMORY, LEAST_OF_LIVE, LEAST_OF_FORWARD = 0.95, 4.0, 0.9
"""Targets: rate from a store over that from memory, and over that of a live run; rate of a capture over the teacher's."""


def measure(
    folder: Path,
    *,
    repeats: int = 3,
    steps: int = 24,
    batch: int = 4,
    length: int = 128,
    top_k: int = 64,
    teacher_layers: int | None = None,
) -> dict[str, Any]:
    """Captures, then trains live and from the store, each in turn with what it is compared with.

    Binds this process to two cores. Raises `Refused` where there are fewer.

    Args:
        repeats: runs of each kind.
        steps: optimizer steps per run.
        batch: rows per step.
        length: tokens per row.
        top_k: entries per token.
        teacher_layers: chosen by measuring, unless given.
    """
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(cores) < CORES:
        raise harness.Refused("needs two cores, one for each model")
    os.sched_setaffinity(0, cores)
    sizes = {"steps": steps, "batch": batch, "length": length, "micro_batch": max(1, batch // 2)}
    write_material(folder, rows=steps * batch, length=length)
    layers = teacher_layers or make_equal(folder, sizes, times=TIMES)
    write_teacher(folder, layers, length)
    config = configuration(folder, "live", 1, **sizes)
    _set(config, loss={"top_k": top_k}, train_epochs=1)
    rates = _capture_rates(config, folder, repeats)
    seconds, losses = _step_seconds(config, folder, repeats)
    step = {name: median(of_kind) for name, of_kind in seconds.items()}
    rate = {name: median(of_kind) for name, of_kind in rates.items()}
    return {
        "tokens_per_second": {name: round(batch * length / value) for name, value in step.items()}
        | {name: round(value) for name, value in rate.items()},
        "stored_over_memory": round(step["in_memory"] / step["stored"], 3),
        "stored_over_live": round(step["live"] / step["stored"], 2),
        "capture_over_forward": round(rate["capture"] / rate["teacher_alone"], 3),
        "same_losses": all(of_run == losses[0] for of_run in losses),
        "seconds_of_runs": seconds,
        "rates_of_runs": {name: [round(value) for value in of_kind] for name, of_kind in rates.items()},
        "workload": sizes | {"top_k": top_k, "teacher_layers": layers, "teacher_over_student": TIMES},
        "repeats": repeats,
    }


def _capture_rates(config: Path, folder: Path, repeats: int) -> dict[str, list[float]]:
    """Tokens per second of captures, and of the teacher alone, in turn. The stores are `store-0` and so on."""
    rates: dict[str, list[float]] = {"capture": [], "teacher_alone": []}
    for i in range(repeats):
        rates["capture"].append(_capture(config, folder / f"store-{i}", f"capture-{i}"))
        rates["teacher_alone"].append(_in_a_process(_teacher_alone, config))
        print(f"run {i + 1} of {repeats}: " + _text(rates, "tokens/s"), flush=True)
    return rates


def _step_seconds(config: Path, folder: Path, repeats: int) -> tuple[dict[str, list[float]], list[list[float]]]:
    """Seconds of a step live, from the first store and with targets in memory, in turn; and the losses of all runs."""
    seconds: dict[str, list[float]] = {"live": [], "stored": [], "in_memory": []}
    losses = []
    for i in range(repeats):
        for name, settings in (("live", ()), ("stored", _stored(folder / "store-0"))):
            run = folder / "runs" / f"{name}-{i}"
            harness.train(
                config, run, f"run.name={run.name}", *settings, environment=harness.ONE_THREAD, quiet=True
            )
            found = figures(run / "metrics.jsonl")
            seconds[name].append(found["step"])
            losses.append(found["losses"])
        seconds["in_memory"].append(round(_in_a_process(_student_in_memory, config, folder / "store-0"), 4))
        print(f"run {i + 1} of {repeats}: " + _text(seconds, "s a step"), flush=True)
    return seconds, losses


def _text(measured: Mapping[str, Sequence[float]], unit: str) -> str:
    """The last of the measurements of each kind."""
    return ", ".join(f"{name} {of_kind[-1]:.4g} {unit}" for name, of_kind in measured.items())


def _set(config: Path, *, loss: Mapping[str, Any], train_epochs: int) -> None:
    """Changes a configuration file."""
    value = json.loads(config.read_text("utf-8"))
    value["loss"] = loss
    value["train"]["epochs"] = train_epochs
    config.write_text(json.dumps(value), "utf-8")


def _stored(store: Path) -> tuple[str, ...]:
    """Settings of a run that reads a store."""
    return "teachers.0.backend=store", f"teachers.0.store={store}"


def _capture(config: Path, store: Path, name: str) -> float:
    """Captures with the real command line; returns tokens per second from the first batch on, as it prints them.

    Raises:
        SystemExit: the command failed; with its output.
    """
    command = [sys.executable, "-m", "distill_rl", "capture", "-c", str(config), "--out", str(store), f"run.name={name}"]
    done = subprocess.run(command, env=os.environ | harness.ONE_THREAD, capture_output=True, text=True)
    rate = re.search(r"^rate +([\d,]+) tokens/s", done.stdout, re.MULTILINE)
    if done.returncode or rate is None:
        raise SystemExit(f"{done.stdout}{done.stderr}")
    return float(rate[1].replace(",", ""))


def _in_a_process(function: Any, *arguments: Any) -> float:
    """The result of a function in a fresh process, so that nothing of it stays in this one.

    OpenMP has the environment of a run: threads that torch starts for a backward pass take the number from there.
    """
    os.environ |= harness.ONE_THREAD
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _batches(config: Any) -> tuple[Any, list[Any], list[Any]]:
    """The job of a configuration, and for every step the student's and the teacher's rows."""
    from distill_rl.workers.pipeline.batches import open_builder
    from distill_rl.run.job import prepare
    from distill_rl.run.opened import open_rows
    from distill_rl.run.run_directory import paths_of

    job = prepare(open_rows(config), paths_of(config))
    builder = open_builder(config, job.opened.train.kind, job.plan, [False])
    student, teacher = [], []
    for batch in job.loader():
        _, ours, (theirs,) = builder.build(batch)
        student.append(ours[0])
        teacher.append(theirs[0])
    return job, student, teacher


def _teacher_alone(path: Path) -> float:
    """Tokens per second of the teacher's engine on the rows of a run, with its output layer and top k."""
    import torch

    from distill_rl.config.load import load_config
    from distill_rl.parallel.mesh import open_world
    from distill_rl.teacher.engine import TeacherEngine

    torch.set_num_threads(CORES)  # as in a capture, which starts no student
    config = load_config(path)
    job, _, batches = _batches(config)
    (known,) = job.facts.teachers
    engine = TeacherEngine(config, config.teachers[0], open_world(rank=0, dp=1, tp=1), vocabulary_size=known.vocabulary_size)
    seconds = []
    for batch in batches:
        start = time.perf_counter()
        for _ in engine.forward(batch):
            pass
        seconds.append(time.perf_counter() - start)
    return batches[0].rows.input_ids.size / median(seconds[WARM_UP:])


def _student_in_memory(path: Path, store: Path) -> float:
    """Seconds of a step of the student's engine whose targets are in memory before the first step."""
    import torch

    from distill_rl.config.load import load_config
    from distill_rl.losses.targets import target_of
    from distill_rl.parallel.mesh import open_world
    from distill_rl.store.store import Store
    from distill_rl.student.engine import StudentEngine
    from distill_rl.teacher.stored import StoredTeacher

    torch.set_num_threads(1)
    config = load_config(path, _stored(store))
    job, batches, theirs = _batches(config)
    world = open_world(rank=0, dp=1, tp=1)
    reader = StoredTeacher(config, config.teachers[0], world, Store(store))
    held = [{layout.first_row: tensors for layout, tensors in reader.forward(batch)} for batch in theirs]
    engine = StudentEngine(
        config, world, vocabulary_size=job.facts.vocabulary_size, total_steps=len(batches)
    )
    seconds = []
    for batch, targets in zip(batches, held):

        @contextmanager
        def source(first_row: int, num_rows: int, targets: Any = targets) -> Iterator[Sequence[Any]]:
            yield [target_of(targets[first_row], config.loss.temperature)]

        start = time.perf_counter()
        engine.train_step(batch, source)
        seconds.append(time.perf_counter() - start)
    return median(seconds[WARM_UP:])


def verdict(measured: Mapping[str, Any]) -> list[str]:
    """Missed targets, one line each."""
    memory, live, forward = (measured[name] for name in ("stored_over_memory", "stored_over_live", "capture_over_forward"))
    return harness.missed(
        (memory < LEAST_OF_MEMORY, f"from the store: {memory:.2f} of the rate from memory; must be {LEAST_OF_MEMORY:g}"),
        (live < LEAST_OF_LIVE, f"from the store: {live:.2f} times the live rate; must be {LEAST_OF_LIVE:g}"),
        (forward < LEAST_OF_FORWARD, f"a capture: {forward:.2f} of the teacher's rate; must be {LEAST_OF_FORWARD:g}"),
        (not measured["same_losses"], "the losses differ between runs"),
    )


main = harness.program("stored", measure, verdict)

if __name__ == "__main__":
    sys.exit(main())
