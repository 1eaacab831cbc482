"""How long teachers and student need for a batch, by how their ranks are divided."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from distill_rl.config.facts import ModelFacts
from distill_rl.scaling.cluster import Cluster
from distill_rl.scaling.parts import Part, Step, student_parts, teacher_parts
from distill_rl.scaling.shape import Shape

BF16, FP32 = 2, 4
TEACHER_REDUCTIONS, STUDENT_REDUCTIONS = 2, 4
"""Sums over tensor-parallel ranks per layer: after attention and MLP, and the student's once more in its backward pass."""


@dataclass(frozen=True, slots=True)
class Work:
    """A batch."""

    rows: int
    length: int
    """Tokens of a row."""
    micro_batch: int
    """Rows of the student's."""
    top_k: int


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a stage on one rank."""

    compute: float
    tensor_parallel: float
    """Collectives that nothing hides."""
    sharding: float = 0.0
    """FSDP's collectives, which run beside the computation."""

    @property
    def total(self) -> float:
        return max(self.compute + self.tensor_parallel, self.sharding)

    @property
    def waits_for_network(self) -> bool:
        """Whether FSDP's collectives take longer than what they run beside."""
        return self.sharding > self.compute + self.tensor_parallel


def teacher_time(model: ModelFacts, work: Work, cluster: Cluster, *, dp: int, tp: int) -> Time:
    """The time of a teacher's replica for its rows of a batch."""
    rows = ceil(work.rows / dp)
    step = Step(rows, rows, work.length, work.top_k)
    return Time(
        _seconds(teacher_parts(Shape.of(model), step, cluster.rates), step, cluster, tp),
        _reductions(model, step.tokens, cluster, tp, TEACHER_REDUCTIONS),
    )


def student_time(model: ModelFacts, work: Work, cluster: Cluster, *, dp: int, tp: int) -> Time:
    """The time of a student rank for its rows of a batch, with the optimizer step.

    FSDP gathers the weights for the forward and for the backward pass of each micro-batch, and reduces the gradient once.
    """
    micro_batches = ceil(work.rows / (dp * work.micro_batch))
    step = Step(micro_batches * work.micro_batch, work.micro_batch, work.length, work.top_k)
    shard = model.parameters / tp
    sharding = 0.0
    if dp > 1:
        gathered = cluster.gather(BF16 * shard, dp * tp)
        sharding = 2 * micro_batches * gathered + cluster.gather(FP32 * shard, dp * tp)
    parts = [
        part if part.kind != "optimizer" else Part(part.phase, part.kind, part.formula, bytes=part.bytes / dp)
        for part in student_parts(Shape.of(model), step, cluster.rates)
    ]
    return Time(
        _seconds(parts, step, cluster, tp),
        _reductions(model, step.tokens, cluster, tp, STUDENT_REDUCTIONS),
        sharding,
    )


def _seconds(parts: list[Part], step: Step, cluster: Cluster, tp: int) -> float:
    """The time of the parts of a step whose work tensor parallelism divides."""
    return sum(part.seconds(cluster.rates) for part in parts) * step.tokens / tp


def _reductions(model: ModelFacts, tokens: int, cluster: Cluster, tp: int, per_layer: int) -> float:
    """The time of the sums over tensor-parallel ranks for some tokens."""
    if tp == 1:
        return 0.0
    return model.num_layers * per_layer * cluster.all_reduce(BF16 * tokens * model.hidden_size, tp)
