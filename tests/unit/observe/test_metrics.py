from __future__ import annotations

import pytest

from distill_rl.observe.metrics import Metric, merge


@pytest.mark.parametrize(
    ("reduction", "expected"), [("sum", 10.0), ("mean", 2.8), ("max", 4.0), ("min", 2.0), ("last", 2.0)]
)
def test_metrics_merge_by_their_reduction(reduction: str, expected: float) -> None:
    parts = [{"m": Metric(value, reduction, weight)} for value, weight in ((4.0, 2.0), (4.0, 0.0), (2.0, 3.0))]  # type: ignore[arg-type]
    assert merge(parts)["m"].value == pytest.approx(expected)


def test_a_mean_without_weight_is_zero_and_finite() -> None:
    assert merge([{"m": Metric(0.0, "mean", 0.0)}, {"m": Metric(0.0, "mean", 0.0)}])["m"].value == 0.0


def test_conflicting_reductions_are_refused() -> None:
    with pytest.raises(ValueError, match="m: reduced as sum and as mean"):
        merge([{"m": Metric(1, "sum")}, {"m": Metric(1, "mean")}])
