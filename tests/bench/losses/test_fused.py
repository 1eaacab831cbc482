"""The benchmark of the fused loss: what it measures at small sizes, and which results miss its targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.losses import fused


def test_a_fused_step_needs_less_memory_and_its_loss_less_than_the_logits(tmp_path: Path) -> None:
    small = fused.Sizes(hidden=64, length=64)
    figures = fused.compare(tmp_path, vocabularies=(16_384,), rows=(512,), rounds=1, sizes=small)
    (largest,) = figures["memory"]
    assert (largest["vocabulary"], largest["rows"]) == (16_384, 512)
    logits = 16_384 * 512 * 4 / fused.MIB
    assert largest["step_unfused_mib"] - largest["step_mib"] > logits
    assert 0 <= largest["loss_topk_mib"] < logits
    assert [record["rows"] for record in figures["time"]] == [512]
    assert all(record["ratio"] > 0 for record in figures["time"])


def figures(*, loss: float = 100.0, larger: float = 100.0, ratio: float = 1.0) -> dict[str, Any]:
    """Figures of two vocabularies; in the larger one the top-k loss takes `larger`."""
    memory = [
        {"vocabulary": columns, "rows": rows, **dict.fromkeys(fused.LOSSES, loss)}
        for columns in (10, 20)
        for rows in (1, 2)
    ]
    memory[-1]["loss_topk_mib"] = larger
    return {"memory": memory, "time": [{"ratio": ratio}]}


@pytest.mark.parametrize(
    ("measured", "missed"),
    [
        ({}, []),
        ({"loss": 300.0, "larger": 300.0}, ["the loss takes 300.0 MiB"]),
        ({"larger": 101.0}, ["loss_topk_mib is 101.0 at 20 columns; must be at most 100.0, as at 10"]),
        ({"ratio": 1.2}, ["a fused step takes 1.2 of an unfused one"]),
    ],
)
def test_missed_targets_are_named(measured: dict[str, float], missed: list[str]) -> None:
    lines = fused.verdict(figures(**measured))
    assert len(lines) == len(missed)
    assert all(found.startswith(wanted) for found, wanted in zip(lines, missed))
