"""One training in this process (`OneProcess`), and what a table says of it besides the student."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from distill_rl.config.rules import problems
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError
from distill_rl.models.files import tokenizer_of
from distill_rl.observe.metrics import Metrics, merge
from distill_rl.parallel.mesh import close_world, open_world
from tests.bench.record import peak_bytes
from tests.helpers.one_process import OneProcess

MASS = "train/teacher_mass"


@dataclass(frozen=True, slots=True)
class Trained:
    """What is known of a training besides its student."""

    steps: int
    skipped_steps: int
    """Steps without an update, because loss or gradient were not finite, or were a spike."""
    labels: int
    """Tokens that were trained on, repetitions included."""
    seconds: float
    """Of all steps, with alignment and teachers."""
    cpu_seconds: float
    """The same of the processor, which other work on the machine does not lengthen."""
    one_to_one: float | None
    """Share of the chunks that are one token on either side; None with one tokenizer."""
    peak_mib: float
    """Of the resident memory of the process that trained, since its start."""
    teacher_mass: float | None = None
    """Mean probability of the columns that the first teacher sent; None without a teacher of the student's tokenizer."""


def train(config: Config, export: Path) -> Trained:
    """Trains on one rank as `distill-rl train` does, and writes the student to the folder `export`.

    Raises:
        ConfigError: the settings break a rule, all of them at once.
    """
    if broken := problems(config):
        raise ConfigError.many(broken)
    world = open_world(rank=0, dp=1, tp=1)
    try:
        return _train(OneProcess(config, world), export)
    finally:
        close_world(world)


def _train(run: OneProcess, export: Path) -> Trained:
    skipped, labels, chunks, one_to_one = 0, 0, 0, 0
    masses: list[Metrics] = []
    began, began_cpu = time.perf_counter(), time.process_time()
    for batch in run.batches():
        metrics = run.step(batch)
        masses.append({name: metric for name, metric in metrics.items() if name == MASS})
        skipped += int(metrics["train/skipped"].value)
        labels += batch.info.num_labels
        chunks += sum(alignment.num_chunks for alignment in batch.info.alignments)
        one_to_one += sum(alignment.num_one_to_one for alignment in batch.info.alignments)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    run.student.export(export, tokenizer_of(run.config.student))
    share = one_to_one / chunks if chunks else None
    mass = merge(masses).get(MASS)
    return Trained(
        run.student.step,
        skipped,
        labels,
        seconds,
        cpu_seconds,
        share,
        peak_bytes() / 2**20,
        None if mass is None else mass.value,
    )
