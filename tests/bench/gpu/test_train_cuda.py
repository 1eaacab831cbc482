"""The benchmark of whole training steps: its material, and figures read right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill_rl.config.load import load_config
from distill_rl.config.rules import problems
from tests.bench.gpu import train_cuda
from tests.bench.material import train_tokenizer

TEXTS = ["some words and 12 more words, written down.", "down the words went"] * 20


def test_a_filled_up_tokenizer_has_the_size_asked_and_encodes_as_before() -> None:
    trained = train_tokenizer(TEXTS, 300, "</s>")
    filled = train_cuda.fill_up(trained, 500)
    assert len(filled) == 500
    assert sorted(filled.get_vocab().values()) == list(range(500))
    assert filled(TEXTS[:2])["input_ids"] == trained(TEXTS[:2])["input_ids"]
    assert filled.eos_token_id == trained.eos_token_id


def test_figures_are_of_the_steps_after_the_warm_up() -> None:
    shapes = train_cuda.SHAPES["cpu"]
    ends = [50.0, *(100.0 + 2 * step for step in range(9))]
    steps = [
        {
            "time": end, "train/tokens": 9e9 if end == 50 else 100.0, "train/loss": end, "timing/step": 2.0,
            "timing/wait_teachers": 0.5, "transport/bytes": 8.0,
        }
        for end in ends
    ]  # fmt: skip
    found = train_cuda.figures(steps, shapes, 64, 1.5)
    assert found["steps"] == 9
    assert found["tokens_per_second"] == pytest.approx(900 / 66, abs=0.1), "from the end of the warm-up on"
    assert found["teacher_wait"] == 0.25
    assert found["medians"] == {"timing/step": 2.0, "timing/wait_teachers": 0.5, "transport/bytes": 8.0}
    assert found["losses"] == [50.0, 116.0]
    per_token = shapes[0].flops_per_token(64, trained=True) + 1.5 * shapes[1].flops_per_token(64, trained=False)
    assert found["flops_per_second"] == pytest.approx(900 * per_token / 66)


@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_the_configuration_is_one_that_could_run(tmp_path: Path, checkpointing: str) -> None:
    sizes = train_cuda.SIZES["cuda"] | {"micro_batch": 2, "depth": 1, "transport": "auto"}
    path = tmp_path / "run.yaml"
    path.write_text(train_cuda.CONFIG.format(root=tmp_path, dtype="bf16", checkpointing=checkpointing, **sizes))
    assert problems(load_config(path)) == []


def test_without_a_cuda_device_it_says_so_in_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train_cuda.main([]) == 2
    assert capsys.readouterr().err == "train_cuda: error: no CUDA device; --device cpu runs its small twin\n"
