"""A run in one process, without Ray and without look-ahead, trains the student of `distill-rl train`.

The benchmark of methods trains so, and tests do that compare runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distill_rl.config.load import load_config
from tests.bench.methods.training import train
from tests.helpers.command import distill_rl, series
from tests.helpers.one_process import one_thread
from tests.helpers.one_process import train as train_in_process

pytestmark = pytest.mark.cli

ACROSS = (
    "teachers.0.export=logits", "loss.cross_tokenizer=xtoken", "projection.learnable=true", "loss.dynamic_scale=on",
    "train.micro_batch_size=4", "train.steps=4",
)  # fmt: skip


def assert_same_student(export: Path, run: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (export, run / "export"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_the_student_is_that_of_the_command_line(straight, material, tmp_path):
    """Validation and checkpoints of that run change nothing."""
    with one_thread():
        trained = train(load_config(material.config(tmp_path)), tmp_path / "export")
    assert (trained.steps, trained.skipped_steps, trained.one_to_one) == (8, 0, None)
    assert_same_student(tmp_path / "export", straight)


def test_across_tokenizers_too_and_its_metrics_are_those_of_the_run(material, cluster, tmp_path):
    config = material.config(tmp_path, "foreign")
    ended = distill_rl("train", "-c", config, *ACROSS, cluster=cluster)
    assert ended.code == 0, ended.err
    run = tmp_path / "runs" / "tiny"
    with one_thread():
        trained = train(load_config(config, ACROSS), tmp_path / "export")
    assert (trained.steps, trained.skipped_steps) == (4, 0)
    assert 0 < trained.one_to_one < 1
    assert_same_student(tmp_path / "export", run)
    again = train_in_process(load_config(config, ACROSS), tmp_path / "again")
    assert_same_student(tmp_path / "again", run)
    for metric in ("train/loss", "train/kl_loss", "train/nll_loss", "train/grad_norm"):
        assert again.series(metric) == series(run, metric)
        assert len(series(run, metric)) == 4
