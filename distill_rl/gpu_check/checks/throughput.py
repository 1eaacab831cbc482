"""Tokens per second of teacher and student with real shapes: runs `bench.gpu.engine_throughput` as a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import distill_rl.bench.gpu.engine_throughput as engine_throughput

report = engine_throughput.report


def measure(device: torch.device, tiny: bool, budget_s: float) -> dict[str, Any]:
    """Per pair of models: tokens/s, MFU, memory and time by part, beside the cost model's prediction.

    Models of real shape need a GPU; on a CPU the models are always tiny.
    """
    return engine_throughput.measure(device, tiny or device.type != "cuda", budget_s)


def problems(figures: Mapping[str, Any]) -> list[str]:
    """Pairs that could not be measured."""
    pairs = figures["pairs"].items()
    return [f"{name}: {pair['status']}" for name, pair in pairs if pair["status"] != "ok"]
