"""distill-rl plan: which split of a cluster's GPUs suits a configuration, what to expect of it, and what breaks first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.table import Table

from distill_rl.config.facts import Facts
from distill_rl.config.schema import Config
from distill_rl.errors import ConfigError
from distill_rl.observe.log import open_console, status
from distill_rl.preflight import gather
from distill_rl.scaling.model import MEMORY, Cluster
from distill_rl.scaling.splits import Prediction, rank

SHOWN = 8
"""Splits that are printed."""
DAY = 86_400.0
TIGHT = 0.85
"""Share of a GPU's memory from which on it is named as what breaks first."""


def plan(path: str, overrides: Sequence[str], *, gpus: int, card: str, gpus_per_node: int) -> int:
    """Prints the best splits of a cluster for a configuration, the settings of the best, and what to expect; starts nothing.

    Args:
        gpus: of the cluster.
        card: `h100` or `h200`.

    Raises:
        ConfigError: the configuration has problems or several teachers, the models' sizes are not known, or no split fits.
    """
    if gpus < 1 or gpus_per_node < 1 or (gpus > gpus_per_node and gpus % gpus_per_node):
        rule = "must be at least 1, and whole nodes if there are several"
        raise ConfigError("--gpus", rule, f"{gpus} with {gpus_per_node} per node", "give a multiple of --gpus-per-node")
    with status(f"checking  {path}"):
        checked = gather(path, overrides, clean=None, download=False)
    config, facts = checked.require_valid(), checked.facts
    _require_sizes(config, facts)
    cluster = Cluster(gpus, card, gpus_per_node)
    found = rank(config, facts, cluster)
    if not found:
        rule = f"must fit into {MEMORY[card] / 1e9:.0f} GB of a GPU in some split, with whole micro-batches"
        remedy = "use more GPUs, activation_checkpointing, a quantised teacher, or another train.global_batch_size"
        raise ConfigError(f"the models of {path}", rule, f"{gpus} GPUs", remedy)
    _print(config, facts, cluster, found)
    return 0


def _require_sizes(config: Config, facts: Facts) -> None:
    teachers = config.running_teachers
    if len(teachers) != 1 or teachers[0].backend != "hf":
        rule, found = "must be one teacher with backend hf, for a plan", ", ".join(each.backend for each in teachers)
        raise ConfigError("teachers", rule, found or "none", "plan with one of them, as teachers.0")
    known = {"student.model": facts.student, "teachers.0.model": facts.teachers[0].model if facts.teachers else None}
    for key, model in known.items():
        if model is None:
            rule = "must be a folder, or a model on the hub that can be reached, so that its sizes are known"
            raise ConfigError(key, rule)


def _print(config: Config, facts: Facts, cluster: Cluster, found: Sequence[Prediction]) -> None:
    console = open_console(140)
    rows, length = config.train.global_batch_size, config.data.max_length
    batch = f"assumed to be {rows:,} full rows of {length:,} tokens, as no sample was read"
    if facts.step is not None:
        batch = f"{rows:,} documents: {facts.step}, by a sample"
    console.print(f"cluster    {cluster.gpus} × {cluster.rates.name}, {cluster.per_node} per node; a batch is {batch}")
    split = ("GPUs", "student dp × tp", "teacher dp × tp", "micro-batch")
    figures = ("step", "teacher", "student", "memory", "goodput", "tokens/s that count")
    table = Table(*split, *figures, box=box.SIMPLE)
    for one in _varied(found):
        of = one.split
        table.add_row(
            "shared" if of.shared else f"{of.student_gpus} + {of.teacher_gpus}",
            f"{of.student_dp} × {of.student_tp}",
            f"{of.teacher_dp} × {of.teacher_tp}",
            str(of.micro_batch),
            *(f"{seconds:.2f} s" for seconds in (one.step, one.teacher.total, one.student.total)),
            f"{one.memory:.0%}",
            f"{one.goodput:.2%}",
            f"{one.kept:,.0f}",
        )
    console.print(table)
    for line in advice(found[0]):
        console.print(line, soft_wrap=True)


def _varied(found: Sequence[Prediction]) -> list[Prediction]:
    """The best splits, each with its best micro-batch only, the best first."""
    by_division = {replace(one.split, micro_batch=0): one for one in reversed(found)}
    return sorted(by_division.values(), key=lambda one: -one.kept)[:SHOWN]


def advice(best: Prediction) -> list[str]:
    """The settings of a split, what holds it up, what faults cost, and what breaks first, as lines."""
    split, faults = best.split, best.faults
    days = 1 / (faults.student_rate + faults.teacher_rate) / DAY
    again = best.save_every * best.step / 2
    return [
        f"take       {' '.join(split.overrides)} checkpoint.every={best.save_every}",
        f"limit      {_limit(best)}",
        f"faults     one in {days:,.1f} days at the rate of Llama 3's cluster; one of the student's takes {faults.student_recovery:,.0f} s and repeats "
        f"{again:,.0f} s of steps",
        f"first      {_weakest(best)}",
    ]


def _limit(best: Prediction) -> str:
    teacher, student = best.teacher.total, best.student.total
    if best.driver > 0.2 * best.step:
        return f"the driver: {best.driver:.2f} s of a step are its calls; larger batches make it matter less"
    network = "; the student waits for the network" if best.student.waits_for_network else ""
    if best.split.shared:
        return f"both models share the GPUs, so a step takes the sum of both, of the slowest ranks{network}"
    name, idle = ("teacher", "student") if teacher > student else ("student", "teacher")
    return f"the {name}; the {idle}'s GPUs are idle for {1 - min(teacher, student) / best.step:.0%} of a step{network}"


def _weakest(best: Prediction) -> str:
    if best.memory > TIGHT:
        return f"memory: {best.memory:.0%} of a GPU's, as estimated"
    if best.driver > 0.1 * best.step:
        return f"the driver: its calls take {best.driver / best.step:.0%} of a step"
    return f"nothing here: memory is at {best.memory:.0%}, and the driver's calls take {best.driver / best.step:.1%} of a step"
