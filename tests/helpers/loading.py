"""Configurations for tests of the loader."""

from __future__ import annotations

from typing import Any

from distill_rl.config.schema import Config, DataConfig, RunConfig, TrainConfig


def loading(
    batch_size: int, *, seed: int = 0, steps: int | None = None, epochs: float | None = None, **data: Any
) -> Config:
    """The settings that a `Loader` reads; `data` are keys of the section of that name."""
    train = TrainConfig(steps=steps, epochs=epochs, global_batch_size=batch_size)
    return Config(run=RunConfig(seed=seed), train=train, data=DataConfig(**data))
