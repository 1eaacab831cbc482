"""The benchmark of whole training steps on a GPU: its small twin on the CPU."""

import json
from pathlib import Path

import pytest

from tests.bench.gpu import train_cuda


@pytest.mark.cli
def test_the_cpu_twin_trains_across_tokenizers_and_writes_its_figures(tmp_path: Path, capfd) -> None:
    out = tmp_path / "figures.json"
    assert train_cuda.main(["--device", "cpu", "--micro-batch", "1", "--steps", "3", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    results = written["results"]
    assert {"cpu", "commit"} <= written["environment"].keys()
    assert results["steps"] == 2
    assert results["peak_gib"] is None
    assert results["utilization"] > 0
    assert results["tokens_per_step"] > train_cuda.SIZES["cpu"]["length"], "rows are full but for a shared boundary"
    assert "teacher has another tokenizer" in capfd.readouterr().out
