"""`distill-rl train` with real shapes, student and teacher on one GPU (`launch/bench.sh train_cuda`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import Figures

pytestmark = pytest.mark.gpu


def test_training_runs_and_is_measured(device: torch.device, budget_s: float, figures: Figures, tmp_path: Path) -> None:
    from tests.bench.gpu import train_cuda

    out = tmp_path / "train_cuda.json"
    assert train_cuda.main(["--steps", "12", "--device", device.type, "--out", str(out)]) == 0
    figures |= json.loads(out.read_text("utf-8"))["results"]
