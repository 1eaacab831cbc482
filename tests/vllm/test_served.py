"""The benchmark of teachers in vLLM: what it measures at small sizes, and what misses its target."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: bash launch/test.sh vllm")

from tests.bench.targets import served


def test_both_backends_are_measured_and_the_parts_are_parts_of_the_whole(tmp_path: Path) -> None:
    small = served.Sizes(hidden=64, layers=2, heads=2, vocabulary=512, length=32, rows=4)
    figures = served.compare(tmp_path, small, top_k=(4, 8), rounds=1)
    assert list(figures["throughput"]) == ["hf, k 4", "hf, k 8", "vllm, k 4", "vllm, k 8"]
    assert all(value > 0 for row in figures["throughput"].values() for value in row.values())
    for parts in figures["vllm"].values():
        assert all(value > 0 for value in parts.values())
        assert sum(value for name, value in parts.items() if name != "all_us") <= 1.01 * parts["all_us"]


@pytest.mark.parametrize(("ours", "missed"), [(30.0, []), (60.0, ["our part takes 60.0 µs per token at k 64"])])
def test_our_own_part_has_a_bound(ours: float, missed: list[str]) -> None:
    assert served.verdict({"vllm": {"k 64": {"all_us": 900.0, "vllm_lists_us": 99.0, "our_arrays_us": ours}}}) == missed
