"""A run that trains adapters: what it says, saves and exports, and what it refuses to go on with."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tests.helpers.command import distill_rl, distill_rl_in_process

pytestmark = pytest.mark.cli


def test_a_run_with_adapters_exports_both_forms_and_is_not_resumed_with_another_rank(material, cluster, tmp_path):
    lora = (
        "student.lora.rank=4",
        "student.lora.modules_to_save=[norm]",
        "aligner.workers=0",
        "schedule.warmup_steps=1",
    )
    config, run = material.config(tmp_path), tmp_path / "runs" / "tiny"
    ended = distill_rl("train", "-c", config, *lora, "train.steps=2", cluster=cluster)
    assert ended.code == 0, ended.err
    assert "adapters of 14 layers" in ended.out
    files = {path.name for path in (run / "export").iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "adapter"} <= files
    assert "LoRA" in (run / "export" / "README.md").read_text()
    adapter = load_file(run / "export" / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 14 + 1
    assert all(tensor.abs().max() > 0 for tensor in adapter.values()), "B begins at zero"

    assert distill_rl_in_process("report", run).code == 0
    assert "adapters of 14 layers" in (run / "report.html").read_text()

    resume = ("student.lora.rank=8", "train.steps=3", "--resume")
    refused = distill_rl_in_process("train", "-c", config, *lora, *resume)
    assert refused.code == 2
    (line,) = refused.errors
    assert "the trained weights of this run: must be the same" in line
    assert "LoRA of rank 8" in line
    assert "saved with LoRA of rank 4" in line

    again = distill_rl("export", run, "--out", tmp_path / "again")
    assert again.code == 0, again.err
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (run / "export" / file).read_bytes()
