"""The benchmark of the losses: it runs, and what it writes can be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distill_rl.losses import DenseLogits, kd_loss, vocab_parallel_logprobs, vocab_parallel_topk
from tests.bench.losses import losses, peers


def test_the_benchmark_writes_figures_with_hardware_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "losses.json"
    sizes = ["--elements", str(128 * 2048), "--vocabularies", "2048", "--rows", "16", "--rounds", "1"]
    arguments = [*sizes, "--out", str(out)]
    monkeypatch.setattr(losses, "FUSED_ROWS", (64, 128))
    assert losses.main(arguments) == 0
    written = json.loads(out.read_text())
    assert {"cpu", "commit", "torch"} <= set(written["environment"])
    ours = [line for line in written["results"] if line["by"] == "distill_rl, chunk N/64"]
    assert {line["loss"] for line in ours} == {"forward_kl", "reverse_kl", "forward_kl, top 64 + rest"}
    assert all(2 <= line["bytes_per_element"] < 3 for line in ours)
    assert all(line["time_fp32"] > 0 for line in written["results"])
    assert [line["rows"] for line in written["fused"]] == [64, 128]
    over_plain = written["time_over_plain"]
    assert [line["allocator"] for line in over_plain] == ["default", "default", "kept", "kept"]
    assert all(line[name] > 0 for line in over_plain for name in ("forward_kl", "top_64", "logprobs"))
    assert "bytes_per_element" in capsys.readouterr().out


def test_the_formulas_that_stand_in_for_missing_packages_agree_with_ours() -> None:
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(6, 50, generator=draw, dtype=torch.float64) for _ in range(2))
    labels = torch.tensor([3, -100, 0, 49, -100, 7])

    def gradient(step: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = student.clone().requires_grad_()
        step(leaf).backward()
        assert leaf.grad is not None
        return leaf.grad

    def kd(divergence: str) -> Tensor:
        return gradient(lambda leaf: kd_loss(leaf, DenseLogits(teacher), labels=labels, divergence=divergence).loss)

    def jsd(beta: float) -> peers.Loss:
        return lambda *inputs: peers._generalized_jsd(*inputs, beta)

    def torchtune(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        return peers._cross_entropy_of_teacher(student, teacher, labels, student)

    same = {
        "forward_kl": [peers.plain_torch(), jsd(0.0), torchtune, peers.automodel()[1]],
        "reverse_kl": [peers.plain_torch("reverse_kl"), jsd(1.0)],
        "jsd": [peers.plain_torch("jsd"), jsd(0.5)],
    }
    for divergence, formulas in same.items():
        for loss in formulas:
            found = gradient(lambda leaf, loss=loss: loss(leaf, teacher, labels))
            torch.testing.assert_close(found, kd(divergence), rtol=1e-4, atol=1e-6)


def test_the_formulas_of_verl_and_skyrl_and_a_plain_top_k_agree_with_ours() -> None:
    draw = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(6, 50, generator=draw) for _ in range(2))
    top, ids = vocab_parallel_topk(teacher, 5), torch.arange(6)
    pairs = (
        (lambda leaf: peers.top_k_kl(leaf, top), lambda leaf: kd_loss(leaf, top, tail="truncate").loss),
        (lambda leaf: peers.top_k_and_rest_kl(leaf, top), lambda leaf: kd_loss(leaf, top).loss),
        (
            lambda leaf: peers.StreamedLogprobs.apply(leaf, ids, 4).sum(),
            lambda leaf: vocab_parallel_logprobs(leaf, ids).sum(),
        ),
    )
    for theirs, ours in pairs:
        leaves = [student.clone().requires_grad_() for _ in range(2)]
        values = [step(leaf) for step, leaf in zip((theirs, ours), leaves)]
        torch.testing.assert_close(*values)
        for value in values:
            value.backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
