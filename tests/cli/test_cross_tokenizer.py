"""Whole runs with a cross-tokenizer teacher, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command import Cluster, distill_rl, distill_rl_in_process, records, series

pytestmark = pytest.mark.cli


def train(material, folder: Path, *overrides: str, teacher: str = "foreign", cluster: Cluster | None = None) -> Path:
    ended = distill_rl("train", "-c", material.config(folder, teacher), *overrides, cluster=cluster)
    assert ended.code == 0, ended.err
    return folder / "runs" / "tiny"


@pytest.fixture(scope="module")
def straight(material, cluster, tmp_path_factory) -> Path:
    """Eight steps without interruption, with KD scaled to the size of CE."""
    settings = ("loss.dynamic_scale=on", "checkpoint.every=4")
    return train(material, tmp_path_factory.mktemp("straight"), *settings, cluster=cluster)


def test_two_models_and_a_text_suffice(straight, material):
    from transformers import AutoModelForCausalLM

    first = records(straight)[0]
    assert first["align/exact"] == 1.0
    assert first["align/method/bytes"] == 8
    assert first["train/kl_loss"] > 0
    (projection,) = (straight.parent / ".projections").iterdir()
    assert projection.suffix == ".safetensors"
    assert "Alignment across tokenizers" in (straight / "report.html").read_text()
    model = AutoModelForCausalLM.from_pretrained(straight / "export")
    assert model.config.vocab_size == 320


def test_kd_is_scaled_by_the_previous_steps_ratio(straight):
    kd, ce, scale = (dict(series(straight, f"train/{name}")) for name in ("kl_loss", "nll_loss", "kd_scale"))
    assert scale[1] == 1.0
    for step in range(2, 9):
        assert scale[step] == pytest.approx(ce[step - 1] / kd[step - 1], rel=1e-6)
    loss = dict(series(straight, "train/loss"))
    assert loss[5] == pytest.approx(scale[5] * kd[5] + ce[5], rel=1e-6)


def test_a_bad_tokenizer_pair_is_reported_before_the_start(material, tmp_path):
    ended = distill_rl_in_process("train", "-c", material.config(tmp_path, "foreign"), "loss.cross_tokenizer=gold")
    assert ended.code == 2
    (line,) = ended.errors
    assert "teachers.0.export: the loss gold needs logits or hidden; got topk; set teachers.0.export=logits" in line
    assert not (tmp_path / "runs").exists()


def test_check_shows_the_loss_and_the_number_of_aligners(material, tmp_path):
    ended = distill_rl_in_process("check", "-c", material.config(tmp_path, "foreign"))
    assert ended.code == 0, ended.err
    assert "aligner: 1 process" in ended.out
    assert "big: another tokenizer, loss hybrid" in ended.out
    assert "# suggested  big: loss.cross_tokenizer=" in ended.out
