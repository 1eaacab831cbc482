"""The settings of low-rank adapters (`student.lora`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from distill_rl.config.schema.fields import FRACTION, POSITIVE

# OmegaConf reads these annotations at run time and knows Optional[...], not `X | None`.
# ruff: noqa: UP045


@dataclass
class LoraConfig:
    rank: int = field(default=16, metadata=POSITIVE)
    """Rank of the update of each layer: W + alpha / rank · B A, with A [rank, in] and B [out, rank]."""
    alpha: Optional[float] = field(default=None, metadata=POSITIVE)
    """Scale of the update; it is divided by the rank. null: twice the rank."""
    dropout: float = field(default=0.0, metadata=FRACTION)
    """Share of a layer's input that is dropped, for its update only, at random in training."""
    targets: Optional[list[str]] = None
    """Linear layers that get an update, by the end of their names: [q_proj, v_proj], or [mlp.down_proj]. null: all but the output layer."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole, by the end of their names: [embed_tokens, lm_head]. Naming one of two tied embeddings trains both, which are one table."""

    @property
    def scale(self) -> float:
        """By which B A is multiplied."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank
