"""Which split of GPUs between teachers and student gives the most tokens that count, among those that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from distill_rl.config.derive import sizes
from distill_rl.config.facts import Facts, ModelFacts
from distill_rl.config.schema import Config
from distill_rl.scaling import model as costs

TENSOR_PARALLEL = (1, 2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8, 16)
MEMORY_SHARE = 0.92
"""Of a GPU's memory that estimates may fill."""
PER_RANK_S, DRIVER_S = 0.4e-3, 10e-3
"""CPU seconds of the driver per rank and step, and beside them: between a line through all cases of `launch/bench.sh scale` and what the largest adds."""
JITTER = 0.03
"""Of the logarithm of a rank's time; an assumption."""
READ_S, COPY_S = 2e9, 20e9
"""Bytes per second at which a rank reads weights or writes its part of a checkpoint, and at which it copies that part to host memory, so
that it is written beside the training (`checkpoint.async_save`); assumptions."""
RESTART_S = 90.0
"""From a fault to processes that can load weights: noticing it, starting Python and Ray, joining; an assumption."""


@dataclass(frozen=True, slots=True)
class Split:
    """How the GPUs are divided."""

    student_dp: int
    student_tp: int
    teacher_dp: int
    teacher_tp: int
    micro_batch: int
    shared: bool
    """Whether teachers and student are on the same GPUs."""

    @property
    def student_gpus(self) -> int:
        return self.student_dp * self.student_tp

    @property
    def teacher_gpus(self) -> int:
        return self.teacher_dp * self.teacher_tp

    @property
    def gpus(self) -> int:
        """Of both."""
        return self.student_gpus if self.shared else self.student_gpus + self.teacher_gpus

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings of this split, as on the command line."""
        return (
            f"student.parallel.dp={self.student_dp}",
            f"student.parallel.tp={self.student_tp}",
            f"teachers.0.parallel.dp={self.teacher_dp}",
            f"teachers.0.parallel.tp={self.teacher_tp}",
            f"train.micro_batch_size={self.micro_batch}",
            f"ray.placement={'colocated' if self.shared else 'disaggregated'}",
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is expected of a split."""

    split: Split
    teacher: costs.Time
    student: costs.Time
    driver: float
    """Seconds of the driver's own work between two steps."""
    step: float
    """Seconds of a step, with the slowest rank of each stage."""
    tokens_per_second: float
    """Of the student's rows."""
    faults: costs.Faults
    save: float
    """Seconds that a checkpoint holds the run up."""
    save_every: int
    """Steps between checkpoints."""
    memory: float
    """The largest share of a GPU's memory that is estimated to be in use."""

    def goodput_at(self, every: int) -> float:
        """The share of the time that goes into steps which count, with a checkpoint every `every` steps."""
        return costs.goodput(self.faults, step=self.step, save=self.save, every=every)

    @property
    def goodput(self) -> float:
        """That of the best interval, `save_every`."""
        return self.goodput_at(self.save_every)

    @property
    def kept(self) -> float:
        """Tokens per second that count in the end."""
        return self.tokens_per_second * self.goodput


def predict(config: Config, facts: Facts, cluster: costs.Cluster, split: Split) -> Prediction:
    """What is expected of a split; see the modules of this folder for what is modelled.

    Args:
        config: with one teacher.
        facts: with the sizes of both models.
    """
    student, teacher = _models(facts)
    work, tokens = work_of(config, facts, split.micro_batch)
    of_teacher = costs.teacher_time(teacher, work, cluster, dp=split.teacher_dp, tp=split.teacher_tp)
    of_student = costs.student_time(student, work, cluster, dp=split.student_dp, tp=split.student_tp)
    driver = DRIVER_S + PER_RANK_S * (split.student_gpus + split.teacher_gpus)
    step = costs.step_seconds(
        costs.Stages(
            teacher=of_teacher.total,
            student=of_student.total,
            between=driver,
            depth=config.prefetch.depth,
            shared=split.shared,
            jitter=JITTER,
            teacher_ranks=split.teacher_gpus,
            student_ranks=split.student_gpus,
        )
    )
    part = 12 * student.trained / split.student_gpus
    written = part / READ_S
    save = part / COPY_S if config.checkpoint.async_save else written
    faults = costs.Faults(
        student_gpus=split.student_gpus,
        teacher_gpus=0 if split.shared else split.teacher_gpus,
        student_recovery=RESTART_S + written,
        teacher_recovery=RESTART_S + teacher.bytes_on_disk / split.teacher_tp / READ_S,
    )
    every = max(costs.best_interval(faults, step=step, save=save), ceil(written / step))
    memory = _memory(config, facts, split, cluster)
    return Prediction(split, of_teacher, of_student, driver, step, tokens / step, faults, save, every, memory)


def work_of(config: Config, facts: Facts, micro_batch: int) -> tuple[costs.Step, float]:
    """The work of a step and the tokens in it, by a sample of the data; where there is none, all rows are full.

    Packed documents fill rows of `data.max_length`. Otherwise a row is as long as the positions of a step divided by its rows.
    """
    rows, length = config.train.global_batch_size, config.data.max_length
    if facts.step is None:
        return costs.Step(rows, micro_batch, length, config.loss.top_k), float(rows * length)
    positions = facts.step.positions
    if config.data.packing:
        rows = max(1, round(positions / length))
    else:
        length = max(1, round(positions / rows))
    return costs.Step(rows, micro_batch, length, config.loss.top_k), positions * facts.step.used


def candidates(config: Config, facts: Facts, cluster: costs.Cluster) -> Iterator[Split]:
    """Yields the splits that use all GPUs: both models on all of them, or each on GPUs of its own."""
    student, teacher = _models(facts)
    rows = config.train.global_batch_size
    for student_tp in _tensor_parallel(student, cluster):
        for teacher_tp in _tensor_parallel(teacher, cluster):
            for student_gpus, teacher_gpus, shared in _divisions(cluster, student_tp, teacher_tp):
                student_dp, teacher_dp = student_gpus // student_tp, teacher_gpus // teacher_tp
                for micro_batch in MICRO_BATCHES:
                    if rows % (student_dp * micro_batch) == 0 and rows % teacher_dp == 0:
                        yield Split(student_dp, student_tp, teacher_dp, teacher_tp, micro_batch, shared)


def rank(config: Config, facts: Facts, cluster: costs.Cluster) -> list[Prediction]:
    """All splits that fit into memory, those with the most tokens that count first."""
    predicted = (predict(config, facts, cluster, split) for split in candidates(config, facts, cluster))
    return sorted((one for one in predicted if one.memory <= MEMORY_SHARE), key=lambda found: -found.kept)


def _models(facts: Facts) -> tuple[ModelFacts, ModelFacts]:
    """The sizes of student and teacher."""
    teacher = facts.teachers[0].model
    assert facts.student is not None
    assert teacher is not None
    return facts.student, teacher


def _tensor_parallel(model: ModelFacts, cluster: costs.Cluster) -> list[int]:
    """Numbers of ranks, within a node, that a model's heads can be divided over."""
    heads = model.num_key_value_heads
    return [tp for tp in TENSOR_PARALLEL if tp <= min(cluster.per_node, cluster.gpus) and heads % tp == 0]


def _divisions(cluster: costs.Cluster, student_tp: int, teacher_tp: int) -> Iterator[tuple[int, int, bool]]:
    """Yields GPUs of the student, of the teacher, and whether they are the same ones."""
    gpus = cluster.gpus
    if gpus % student_tp == 0 and gpus % teacher_tp == 0:
        yield gpus, gpus, True
    unit = cluster.per_node if gpus > cluster.per_node else 1
    for of_teacher in range(unit, gpus, unit):
        if of_teacher % teacher_tp == 0 and (gpus - of_teacher) % student_tp == 0:
            yield gpus - of_teacher, of_teacher, False


def _memory(config: Config, facts: Facts, split: Split, cluster: costs.Cluster) -> float:
    """The largest share of a GPU's memory that the workers on it are estimated to use."""
    of_student, of_teacher = config.student, config.teachers[0]
    student_ranks = replace(of_student.parallel, dp=split.student_dp, tp=split.student_tp)
    teacher_ranks = replace(of_teacher.parallel, dp=split.teacher_dp, tp=split.teacher_tp)
    divided = replace(
        config,
        student=replace(of_student, parallel=student_ranks),
        teachers=[replace(of_teacher, parallel=teacher_ranks)],
        train=replace(config.train, micro_batch_size=split.micro_batch),
    )
    estimated = {worker.worker: worker.total for worker in sizes(divided, replace(facts, gpus=cluster.per_node)).memory}
    student, teacher = estimated["student"], estimated[of_teacher.name]
    return (student + teacher if split.shared else max(student, teacher)) / costs.MEMORY[cluster.card]


# Settings of a run on many GPUs that are predicted to cost speed, for `distill-rl check`.

LEAST_GPUS = 8
"""With fewer, faults are too rare for the interval between checkpoints to matter."""
WORTH = 0.01
"""Smallest gain in speed, as a share, for which a setting is suggested."""
_LONG_RUN = 10_000
"""Steps of a run whose length is not known."""


def suggestions(config: Config, facts: Facts) -> list[str]:
    """Returns lines with a setting and what it is predicted to gain; empty if nothing is worth it, or nothing is predicted.

    That needs one teacher in torch, no sequence parallelism, and models whose sizes are known. H100s are assumed; without a GPU,
    of this machine or of a cluster that the run joins, `check` does not ask.
    """
    split = _split(config)
    if split is None or facts.student is None or not facts.teachers or facts.teachers[0].model is None:
        return []
    cluster = costs.Cluster(split.gpus)
    found = predict(config, facts, cluster, split)
    return [line for line in (_interval(config, found), _look_ahead(config, facts, cluster, found)) if line]


def _split(config: Config) -> Split | None:
    """How the configuration divides the GPUs; None for what is not modelled."""
    teachers, student = config.running_teachers, config.student.parallel
    if len(teachers) != 1 or teachers[0].backend != "hf":
        return None
    teacher = teachers[0].parallel
    if student.sp > 1 or teacher.sp > 1:
        return None
    shared = config.ray.placement == "colocated"
    return Split(student.dp, student.tp, teacher.dp, teacher.tp, config.train.micro_batch_size, shared)


def _interval(config: Config, found: Prediction) -> str:
    """A line with a better interval between checkpoints; empty if the present one is as good."""
    if found.split.gpus < LEAST_GPUS:
        return ""
    steps = config.train.steps or _LONG_RUN
    every, best = (min(each or steps, steps) for each in (config.checkpoint.every, found.save_every))
    now, kept = found.goodput_at(every), found.goodput_at(best)
    if kept < now + WORTH:
        return ""
    present = f"checkpoint.every={config.checkpoint.every}" if config.checkpoint.every else "none before the end"
    return (
        f"checkpoint.every={best}: {kept:.1%} of the time is predicted to be kept, {now:.1%} with {present} "
        "(H100s that fail as often as Llama 3's)"
    )


def _look_ahead(config: Config, facts: Facts, cluster: costs.Cluster, found: Prediction) -> str:
    """A line that asks for look-ahead, if there is none and it makes steps shorter."""
    if config.prefetch.depth:
        return ""
    ahead = predict(replace(config, prefetch=replace(config.prefetch, depth=1)), facts, cluster, found.split)
    if ahead.step > (1 - WORTH) * found.step:
        return ""
    return f"prefetch.depth=1: a step is predicted to take {ahead.step:.2f} s, and {found.step:.2f} s without look-ahead (H100s)"
