"""The parts of a process's memory, and what the estimates of all workers need."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

from distill_rl.config.facts import ModelFacts

ITEM_SIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes per element."""
FUSED = ("gpt2", "phi3")
"""Families that compute several projections with one matrix, whose whole output every tensor-parallel rank holds."""

PROCESS_BASE = 435 * 2**20
"""Resident size of a Ray actor on a CPU that has imported torch, transformers and an engine and taken a step (measured with
models of a few thousand weights: 443 MiB a teacher, 464 MiB a student)."""
OVERESTIMATE = 1.13
"""The most by which an estimate was above the measured peak (docs/benchmarks/memory.md)."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Estimated peak memory of one process, by part, in bytes."""

    worker: str
    """`student`, `evaluator` or the teacher's name."""
    count: int
    """Number of such processes."""
    weights: int
    gradients: int = 0
    accumulated: int = 0
    """The unsharded fp32 gradient that a rank sums over its micro-batches if gradients are reduced once per step."""
    optimizer: int = 0
    gathered: int = 0
    """FSDP's unsharded copy of its largest unit, the gradient of that unit, and the communication buffers of both."""
    scratch: int = 0
    """Temporaries of one optimizer step; of a teacher with quantised weights, the one that a layer computes with."""
    activations: int = 0
    logits: int = 0
    targets: int = 0
    """Targets of the micro-batches in flight."""
    heads: int = 0
    """Output layers of the teachers that export hidden states."""
    cache: int = 0
    """Keys and values of the prompts that are run together."""
    saving: int = 0
    """Host copy of weights and optimizer state from which a checkpoint is written while training continues."""
    loading: int = 0
    """Pages of the weight files, which are freed before anything but the weights is allocated."""
    base: int = PROCESS_BASE

    @property
    def parts(self) -> dict[str, int]:
        """Name → bytes of every part that is not 0, without `loading`, which does not coincide with the others."""
        sizes = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: size for name, size in sizes.items() if size and name not in ("worker", "count", "loading")}

    @property
    def peak(self) -> dict[str, int]:
        """Name → bytes of what the process holds at the higher of its two peaks: training, or loading the weights."""
        loading = {"weights": self.weights, "loading": self.loading, "base": self.base}
        return max(self.parts, loading, key=lambda parts: sum(parts.values()))

    @property
    def total(self) -> int:
        """The sum of the peak."""
        return sum(self.peak.values())

    @property
    def least(self) -> int:
        """Bytes of all such processes together that cannot be shared, reclaimed or overestimated."""
        return int(self.count * (sum(self.parts.values()) - self.base) / OVERESTIMATE)


def held(model: ModelFacts, tp: int) -> tuple[int, int]:
    """Parameters that a student trains, and that it does not, of a tensor-parallel rank, which FSDP2 then shards.

    Tensor parallelism does not split routed experts. With adapters they are not trained.
    """
    experts = (model.expert_parameters, 0) if model.lora is None else (0, model.expert_parameters)
    return tuple(ceil((part - own) / tp) + own for part, own in zip((model.trained, model.frozen), experts))  # type: ignore[return-value]
