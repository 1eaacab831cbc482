"""A training step on a GPU: the same check as the part `step` of the GPU check."""

import pytest
import torch

from distill_rl.gpu_check.checks import step

pytestmark = pytest.mark.gpu


def test_a_gpu_step_matches_the_cpu_and_its_host_waits():
    figures = step.check(torch.device("cuda", 0), tiny=True)
    assert figures["copies that differ"] == 0
    assert figures["host waits per micro-batch"] <= step.WAITS_PER_MICRO_BATCH
