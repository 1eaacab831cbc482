"""The benchmark of methods trains without Ray and without look-ahead: its students must be those of `distill-rl train`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distill_rl.config.load import load_config
from distill_rl.system.processes.child import call_in_child
from tests.bench.methods.training import Trained, train
from tests.helpers.command import distill_rl

pytestmark = pytest.mark.cli


def train_here(config: Path, overrides: list[str], export: Path) -> Trained:
    torch.set_num_threads(1)
    return train(load_config(config, overrides), export)


@pytest.mark.parametrize(
    ("teacher", "overrides"),
    [
        ("teacher", ["loss.dynamic_scale=on", "train.micro_batch_size=4"]),
        ("foreign", ["teachers.0.export=logits", "loss.cross_tokenizer=xtoken", "projection.learnable=true"]),
    ],
)
def test_the_student_is_that_of_the_command_line(material, cluster, tmp_path, teacher, overrides):
    config = material.config(tmp_path, teacher)
    run = distill_rl("train", "-c", config, *overrides, cluster=cluster)
    assert run.code == 0, run.err
    trained = call_in_child("training", train_here, config, overrides, tmp_path / "export", deadline_s=120)
    assert (trained.steps, trained.skipped_steps) == (8, 0)
    assert (trained.one_to_one is None) == (teacher == "teacher")
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "export", tmp_path / "runs" / "tiny" / "export")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
