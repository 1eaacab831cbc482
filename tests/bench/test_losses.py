"""The benchmark of the losses: it runs, and what it writes can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distill_rl.bench import losses
from distill_rl.losses import DenseLogits, kd_loss


def test_the_benchmark_writes_figures_with_hardware_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "losses.json"
    arguments = ["losses", "--rows", "128", "--vocabulary", "2048", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    losses.main()
    written = json.loads(out.read_text())
    assert {"cpu", "commit", "torch"} <= set(written["environment"])
    ours = [line for line in written["results"] if line["by"] == "distill_rl, chunk N/64"]
    assert {line["loss"] for line in ours} == {"forward_kl", "reverse_kl", "forward_kl, top 64 + rest"}
    assert all(2 <= line["bytes_per_element"] < 3 for line in ours)
    assert all(line["time_fp32"] > 0 for line in written["results"])
    assert len(written["fused"]) == 3
    assert "bytes/element" in capsys.readouterr().out


def test_the_formulas_that_stand_in_for_missing_packages_agree_with_ours() -> None:
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(6, 50, generator=draw, dtype=torch.float64) for _ in range(2))

    def gradient(step: losses.Step) -> torch.Tensor:
        leaf = student.clone().requires_grad_()
        step(leaf).backward()
        return leaf.grad

    def ours(divergence: str) -> torch.Tensor:
        return gradient(lambda leaf: kd_loss(leaf, DenseLogits(teacher), divergence=divergence).loss)

    same = {
        "forward_kl": [
            losses.plain("forward_kl", teacher),
            lambda leaf: losses._generalized_jsd(leaf, teacher, 0.0),
            lambda leaf: losses._cross_entropy_of_teacher(leaf, teacher),
        ],
        "reverse_kl": [losses.plain("reverse_kl", teacher), lambda leaf: losses._generalized_jsd(leaf, teacher, 1.0)],
        "jsd": [lambda leaf: losses._generalized_jsd(leaf, teacher, 0.5)],
    }
    for divergence, steps in same.items():
        for step in steps:
            torch.testing.assert_close(gradient(step), ours(divergence), rtol=1e-4, atol=1e-6)
