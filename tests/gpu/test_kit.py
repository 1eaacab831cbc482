"""The kit's checks of losses and of the dynamic programme, on a CUDA device."""

import unittest

import pytest
import torch

from distill_rl.gpu_check.checks import dp, losses

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("part", [losses, dp])
def test_a_part_of_the_gpu_check_passes(part) -> None:
    try:
        assert part.check(torch.device("cuda"), tiny=False)
    except unittest.SkipTest as reason:
        pytest.skip(str(reason))
