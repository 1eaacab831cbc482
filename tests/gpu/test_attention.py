"""All attention paths on a CUDA device: values, gradients, and no wait for the device."""

import pytest
import torch

from tests.gpu.check.checks.attention import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tiny", [True, False], ids=["tiny", "real sizes"])
def test_all_paths_agree(tiny):
    errors = check(torch.device("cuda"), tiny)
    assert any("packed" in name for name in errors)
    assert any("whole rows" in name for name in errors)
