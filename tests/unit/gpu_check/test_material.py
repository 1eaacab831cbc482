"""What the checks of the GPU check share."""

import math

import pytest

from tests.gpu.check.material import largest


@pytest.mark.parametrize("errors", [[math.nan, 1.0, 2.0], [1.0, math.nan, 2.0], [1.0, 2.0, math.nan]])
def test_largest_error_is_nan_if_any_is(errors: list[float]) -> None:
    assert math.isnan(largest(errors))


def test_largest_error_is_exact() -> None:
    assert largest(iter([1e-3, 0.1, 2e-9])) == 0.1
