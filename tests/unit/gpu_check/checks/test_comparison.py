"""The comparison of the losses: its rows, and what is not measured."""

from __future__ import annotations

import unittest

import pytest
import torch

from tests.bench.gpu.losses_cuda import EAGER, LIGER, NO_TIME, NOT_INSTALLED, OURS, PLAIN, Figures
from tests.gpu.check.checks import comparison
from tests.gpu.check.page import _figures

CPU = torch.device("cpu")
SHAPE = {"inputs": "logits", "divergence": "jsd", "target": "dense"}


def returns(monkeypatch: pytest.MonkeyPatch, *lines: Figures) -> None:
    versions = {"triton": "3.6.0, used", "liger": "0.8.5"}
    monkeypatch.setattr(comparison, "compare_on", lambda *_, **__: (list(lines), versions))


def test_every_case_has_a_row_with_its_time_and_bound() -> None:
    figures = comparison.measure(CPU, tiny=True, budget_s=60)
    assert figures["shape"] == "16 rows, 16 hidden, 256 columns, float32"
    cases = {(row["from"], row["divergence"], row["target"], row["by"]) for row in figures["losses"]}
    for divergence in ("forward_kl", "jsd"):
        for inputs in ("hidden", "logits"):
            wanted = {("dense", PLAIN), ("dense", OURS), ("top 64", OURS)}
            assert {(inputs, divergence, *case) for case in wanted} <= cases
    ours = [row for row in figures["losses"] if not row["by"].startswith(LIGER)]
    assert all(row["ms"] > 0 and row["of bound"] == row["bound ms"] / row["ms"] for row in ours)


def test_what_is_not_measured_has_its_reason_in_place_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Figures(by=f"{LIGER} A", status="failed: TypeError: too many arguments", **SHAPE)
    returns(
        monkeypatch,
        Figures(by=PLAIN, status="out of memory", **SHAPE),
        Figures(by=OURS, value=0.25, milliseconds=2.0, peak_mib=512.0, bound_milliseconds=1.0, **SHAPE),
        Figures(by=EAGER, status=NO_TIME, bound_milliseconds=1.0, **SHAPE),
        failed,
        Figures(by=f"{LIGER} B", status=NOT_INSTALLED, **SHAPE),
    )
    figures = comparison.measure(CPU, tiny=True, budget_s=60)
    assert [row["ms"] for row in figures["losses"]] == ["out of memory", 2.0, NO_TIME, "failed"]
    assert figures["failed"] == ["liger A, jsd: failed: TypeError: too many arguments"]
    page = "\n".join(_figures(figures, ""))
    assert "logits  jsd         dense   distill_rl         2" in page
    assert max(map(len, page.splitlines())) <= 118


def test_a_gpu_too_small_for_the_inputs_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(comparison, "compare_on", runs_out)
    with pytest.raises(unittest.SkipTest, match="not enough memory for inputs of 16 rows"):
        comparison.measure(CPU, tiny=True, budget_s=60)
