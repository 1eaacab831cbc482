"""A run that trains adapters beside weights in 4 bits: what it says, exports, and refuses to go on with."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.command import distill_rl, distill_rl_in_process, series

pytestmark = pytest.mark.cli
pytest.importorskip("torchao", reason="torchao is not installed here: bash launch/test.sh quantization")


def test_a_run_beside_four_bits_exports_all_weights_and_is_not_resumed_beside_eight(material, cluster, tmp_path):
    config, run = material.config(tmp_path), tmp_path / "runs" / "tiny"
    settings = ("student.lora.rank=4", "student.quantization=int4", "aligner.workers=0", "schedule.warmup_steps=1")
    ended = distill_rl("train", "-c", config, *settings, "train.steps=2", cluster=cluster)
    assert ended.code == 0, ended.err
    assert [step for step, _ in series(run, "train/loss")] == [1, 2]
    assert "beside weights in int4" in (run / "export" / "README.md").read_text()
    adapter = load_file(run / "export" / "adapter" / "adapter_model.safetensors")
    before, after = (load_file(path / "model.safetensors") for path in (material.root / "student", run / "export"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        pair = [adapter.get(f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight") for part in "AB"]
        update = 0 if pair[0] is None else 2 * pair[1] @ pair[0]  # alpha is twice the rank
        assert torch.equal(after[name], tensor + update), name

    refused = distill_rl_in_process(
        "train", "-c", config, *settings, "student.quantization=int8", "train.steps=3", "--resume"
    )
    assert refused.code == 2
    (line,) = refused.errors
    assert "beside weights in int8" in line
    assert "saved with LoRA of rank 4, alpha 8, on all linear layers, beside weights in int4" in line

    again = distill_rl("export", run, "--out", tmp_path / "again")
    assert again.code == 0, again.err
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (run / "export" / file).read_bytes()


def test_weights_that_are_all_trained_are_not_quantised(material, tmp_path):
    (line,) = distill_rl_in_process("check", "-c", material.config(tmp_path), "student.quantization=int8").errors
    assert "student.quantization: is for the weights that adapters leave as they are" in line
    assert line.endswith("add student.lora={}, or leave it out")
