"""The settings of the losses, checked once and passed as one object. Defaults are those of the public signatures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distill_rl.losses.core import checks
from distill_rl.losses.core.reduce import REDUCTIONS, ReductionName
from distill_rl.losses.divergence import Divergence, resolve

Tail = Literal["bucket", "truncate", "renormalize"]
TAILS: tuple[Tail, ...] = ("bucket", "truncate", "renormalize")
ChunkAverage = Literal["mean", "chain"]
CHUNK_AVERAGES: tuple[ChunkAverage, ...] = ("mean", "chain")


@dataclass(frozen=True, slots=True, kw_only=True)
class KDOptions:
    """Settings of `kd_loss` and `fused_linear_kd_loss`, which document them.

    Raises:
        ValueError: a value outside its range, naming the setting, the rule and the value.
    """

    divergence: str
    beta: float
    temperature: float
    tail: Tail
    kd_ratio: float
    ignore_index: int
    reduction: ReductionName
    chunk_size: int | None
    inplace_backward: bool
    validate: bool | None

    def __post_init__(self) -> None:
        checks.positive("temperature", self.temperature)
        checks.one_of("tail", self.tail, TAILS)
        checks.one_of("reduction", self.reduction, REDUCTIONS)
        checks.in_unit_interval("kd_ratio", self.kd_ratio)
        checks.chunk_size(self.chunk_size)
        self.resolved()

    def resolved(self) -> Divergence:
        """The divergence with its β."""
        return resolve(self.divergence, self.beta)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossTokenizerOptions:
    """Settings of `chunk_kd_loss`, which documents them.

    Raises:
        ValueError: a value outside its range, naming the setting, the rule and the value.
    """

    method: str
    divergence: str
    beta: float
    temperature: float
    tail: Tail
    top_k: int
    chunk_average: str
    uncommon_top_k: int
    relaxed: bool
    tau: float
    ignore_index: int
    chunk_size: int | None
    validate: bool | None

    def __post_init__(self) -> None:
        checks.one_of("tail", self.tail, TAILS)
        checks.one_of("chunk_average", self.chunk_average, CHUNK_AVERAGES)
        checks.positive("temperature", self.temperature)
        checks.positive("tau", self.tau)
        checks.at_least_one("top_k", self.top_k)
        checks.at_least_one("uncommon_top_k", self.uncommon_top_k)
        checks.chunk_size(self.chunk_size)
        self.resolved()

    def resolved(self) -> Divergence:
        """The divergence with its β."""
        return resolve(self.divergence, self.beta)

    @property
    def chain(self) -> bool:
        """Whether a chunk's distribution is its first token's times the probability of the other tokens."""
        return self.chunk_average == "chain"
