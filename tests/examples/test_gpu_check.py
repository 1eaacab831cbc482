"""All parts of launch/gpu_check.sh without a GPU."""

import pytest

from distill_rl.gpu_check.parts import PARTS
from tests.cli.test_gpu_check import bare, run_parts

__all__ = ["bare"]
pytestmark = pytest.mark.cli


def test_all_parts_run_with_four_packages_and_no_gpu(bare, tmp_path):
    parts = run_parts(bare, tmp_path)
    assert list(parts) == [part.name for part in PARTS]
    assert parts["resume"]["figures"]["tensors"] > 0
