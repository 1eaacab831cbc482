"""The settings of the losses, checked once and passed as one object. Defaults are those of the public signatures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from distill_rl.losses.core import checks
from distill_rl.losses.core.reduce import REDUCTIONS, ReductionName
from distill_rl.losses.divergence import Divergence, resolve

Tail = Literal["bucket", "truncate", "renormalize"]
TAILS: tuple[Tail, ...] = ("bucket", "truncate", "renormalize")
Backend = Literal["eager", "triton"]
"""Who computes: torch, or the Triton kernels."""
ChunkAverage = Literal["mean", "chain"]
CHUNK_AVERAGES: tuple[ChunkAverage, ...] = ("mean", "chain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What both kinds of options share. The values are checked on creation.

    Raises:
        ValueError: a value outside its range, naming the setting, the rule and the value.
    """

    divergence: str
    beta: float
    temperature: float
    tail: Tail
    ignore_index: int
    chunk_size: int | None
    validate: bool | None
    backend: Backend | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Creates the options from a function's arguments (`locals()`), of which those that are no setting are ignored.

        Raises:
            KeyError: a setting is missing.
            ValueError: see the class.
        """
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def __post_init__(self) -> None:
        checks.positive("temperature", self.temperature)
        checks.one_of("tail", self.tail, TAILS)
        checks.backend(self.backend)
        checks.chunk_size(self.chunk_size)
        self.resolved()

    def resolved(self) -> Divergence:
        """The divergence with its β, see `divergence.resolve`."""
        return resolve(self.divergence, self.beta)


@dataclass(frozen=True, slots=True, kw_only=True)
class KDOptions(Options):
    """Settings of `kd_loss` and `fused_linear_kd_loss`, which document them.

    Raises:
        ValueError: a value outside its range, naming the setting, the rule and the value.
    """

    kd_ratio: float
    reduction: ReductionName
    inplace_backward: bool

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        checks.one_of("reduction", self.reduction, REDUCTIONS)
        checks.in_unit_interval("kd_ratio", self.kd_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossTokenizerOptions(Options):
    """Settings of `chunk_kd_loss`, which documents them.

    Raises:
        ValueError: a value outside its range, naming the setting, the rule and the value.
    """

    method: str
    top_k: int
    chunk_average: str
    uncommon_top_k: int
    relaxed: bool
    tau: float

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        checks.one_of("chunk_average", self.chunk_average, CHUNK_AVERAGES)
        checks.positive("tau", self.tau)
        checks.at_least_one("top_k", self.top_k)
        checks.at_least_one("uncommon_top_k", self.uncommon_top_k)

    @property
    def chain(self) -> bool:
        """Whether `chunk_average` is "chain", explained in `chunk_kd_loss`."""
        return self.chunk_average == "chain"
