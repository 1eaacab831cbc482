from __future__ import annotations

from pathlib import Path

import pytest

from distill_rl.observe.metrics import METRICS, PAGE, Metric, described, is_sum, merge

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 10.0), ("mean", 2.8), ("max", 4.0), ("last", 2.0)])
def test_metrics_merge_by_their_reduction(reduction: str, expected: float) -> None:
    parts = [{"m": Metric(value, reduction, weight)} for value, weight in ((4.0, 2.0), (4.0, 0.0), (2.0, 3.0))]  # type: ignore[arg-type]
    assert merge(parts)["m"].value == pytest.approx(expected)


def test_a_mean_without_weight_is_zero_and_finite() -> None:
    assert merge([{"m": Metric(0.0, "mean", 0.0)}, {"m": Metric(0.0, "mean", 0.0)}])["m"].value == 0.0


def test_conflicting_reductions_are_refused() -> None:
    with pytest.raises(ValueError, match="m: reduced as sum and as mean"):
        merge([{"m": Metric(1, "sum")}, {"m": Metric(1, "mean")}])


def test_the_page_of_metrics_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == PAGE, "run `python -m distill_rl.observe.metrics > docs/metrics.md`"


def test_only_means_are_over_something() -> None:
    assert all(bool(what.over) == (what.reduction == "mean") for what in METRICS.values())


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        ("train/kl_loss", "mean"), ("train/kl_loss/big", "mean"), ("timing/big/forward", "per_step"),
        ("align/method/dp/numba", "sum"), ("align/method/dp/numba/big", "sum"), ("align/method/bytes/big", "sum"),
        ("timing/driver/cpu", "per_step"), ("faults/skipped_steps", "last"), ("train/novelty", None),
    ],
)  # fmt: skip
def test_a_metric_is_described_by_its_name(name: str, reduction: str | None) -> None:
    what = described(name)
    assert (what.reduction if what else None) == reduction
    assert is_sum(name) == (reduction == "sum")
