"""Tokens per second of teacher and student engines with real shapes, beside the cost model (`launch/bench.sh engine_throughput`)."""

from __future__ import annotations

import pytest
import torch

from tests.bench.gpu import engine_throughput
from tests.gpu.conftest import Figures

pytestmark = pytest.mark.gpu


def test_every_pair_is_measured(device: torch.device, tiny: bool, budget_s: float, figures: Figures) -> None:
    figures |= engine_throughput.measure(device, tiny, budget_s)
    figures.text = engine_throughput.report(figures)
    assert engine_throughput.problems(figures) == []
