"""Models that also read images are teacher and student as their text towers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.helpers.command import Cluster, distill_rl, distill_rl_in_process, series
from tests.helpers.corpus import write_corpus
from tests.helpers.towers import write_tower_model

pytestmark = pytest.mark.cli

IDS = torch.arange(3, 43)[None]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("towers")
    write_tower_model(root / "student", "qwen3_vl", tie=True)
    write_tower_model(root / "teacher", "gemma3", seed=1)
    write_corpus(root / "corpus.jsonl", rows=64)
    path = root / "towers.yaml"
    path.write_text(json.dumps({
        "run": {"dir": f"{root}/runs"},
        "student": {"model": f"{root}/student", "dtype": "fp32"},
        "teachers": [{"name": "big", "model": f"{root}/teacher", "dtype": "fp32"}],
        "data": {"path": f"{root}/corpus.jsonl", "max_length": 64},
        "loss": {"top_k": 16},
        "train": {"steps": 4, "global_batch_size": 8, "micro_batch_size": 4},
        "optimizer": {"lr": 0.01},
    }))  # fmt: skip
    return path


SAID = (
    "student.model: of qwen3_vl the text tower is taken, as Qwen3ForCausalLM; tensors for images or sound are not read",
    "teachers.0.model: of gemma3 the text tower is taken, as Gemma3ForCausalLM; tensors for images or sound are not read",
)


def test_check_says_that_the_text_towers_are_taken(config: Path) -> None:
    ended = distill_rl_in_process("check", "-c", config)
    assert ended.code == 0, ended.err
    assert all(f"# note       {line}" in ended.out for line in SAID), ended.out


@torch.no_grad()
def test_run_trains_and_exports_the_tower(config: Path, cluster: Cluster) -> None:
    ended = distill_rl("train", "-c", config, cluster=cluster)
    assert ended.code == 0, ended.err
    assert all(line in ended.out for line in SAID), ended.out
    assert "Traceback" not in ended.out + ended.err
    run = config.parent / "runs" / "towers"
    losses = [loss for _, loss in series(run, "train/kl_loss")]
    assert losses[-1] < losses[0]

    written = json.loads((run / "export/config.json").read_text())
    assert (written["architectures"], written["model_type"]) == (["Qwen3ForCausalLM"], "qwen3")
    student, loading = AutoModelForCausalLM.from_pretrained(run / "export", output_loading_info=True)
    assert not any(loading.values())
    before = AutoModelForImageTextToText.from_pretrained(config.parent / "student")
    after = student.eval()(input_ids=IDS).logits
    assert after.isfinite().all()
    assert not torch.equal(after, before.eval()(input_ids=IDS).logits)
    # The whole model with the trained tower computes the same.
    before.model.language_model.load_state_dict(student.model.state_dict())
    assert torch.equal(before(input_ids=IDS).logits, after)
