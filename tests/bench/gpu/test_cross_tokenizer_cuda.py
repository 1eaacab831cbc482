"""The benchmark of the cross-tokenizer losses: its CPU twin runs, and what it writes can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.bench.gpu import cross_tokenizer_cuda
from tests.bench.gpu.engines import random_projection


def test_the_cpu_twin_writes_figures_of_every_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    sizes = ["--rows", "40", "--columns", "300", "--teacher-columns", "350", "--repeats", "1"]
    assert cross_tokenizer_cuda.main(["--device", "cpu", *sizes, "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert {"cpu", "commit", "torch"} <= set(written["environment"])
    assert {line["divergence"] for line in written["results"]} >= {"hybrid", "xtoken", "gold", "uld", "alm", "strict"}
    assert all(line["status"] == "ok" and line["milliseconds"] > 0 for line in written["results"])
    assert all(line["value"] > 0 for line in written["results"])
    assert "kd_loss, one tokenizer" in capsys.readouterr().out


def test_without_a_cuda_device_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cross_tokenizer_cuda.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_the_random_projection_is_row_stochastic_with_distinct_entries() -> None:
    projection = random_projection(301, 350)
    sums = torch.zeros(301).index_add_(0, projection.entry_rows, projection.values)
    torch.testing.assert_close(sums, torch.ones(301))
    assert len(torch.unique(projection.entry_rows * 350 + projection.indices)) == len(projection.indices)
    assert int(projection.indices.max()) < 350
