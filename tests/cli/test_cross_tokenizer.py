"""Whole runs with a cross-tokenizer teacher, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_train import assert_equal_runs, shards
from tests.helpers.command import Cluster, distill_rl, records, series

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
    assert 0.2 < first["align/one_to_one"] < 0.9, "the two tokenizers must differ, and not everywhere"
    assert first["align/coverage"] > 0.95
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


def test_neither_resume_aligners_nor_depth_change_a_bit(straight, material, cluster, tmp_path):
    """Three steps and five more, with other aligners, depth and transport in either part, equal eight steps.

    Resuming also restores the ratio that scales KD. Repeated resumes are in test_train.py.
    """
    for part in (
        ("train.steps=3", "prefetch.depth=0", "aligner.workers=0", "transport=shared_memory"),
        ("train.steps=8", "prefetch.depth=3", "aligner.workers=3", "--resume"),
    ):
        run = train(material, tmp_path, "loss.dynamic_scale=on", *part, cluster=cluster)
    assert_equal_runs(straight, run)
    assert series(run, "validation/kl_loss")[-1] == series(straight, "validation/kl_loss")[-1]
    assert shards(run, 8) == shards(straight, 8)


def test_same_and_cross_tokenizer_teachers_are_weighted_by_score(material, cluster, tmp_path):
    run = train(
        material, tmp_path, f"data.path={material.root}/chats.jsonl", "data.loss_on=assistant", "data.max_length=256",
        f"teachers.1.model={material.root}/teacher", "teachers.1.name=same", "teachers.1.dtype=fp32",
        "teachers.0.score=ce", "teachers.1.score=ce", "train.steps=2", "schedule.steps=2", "aligner.workers=0",
        cluster=cluster,
    )  # fmt: skip
    first = records(run)[0]
    both = first["train/kl_loss/big"], first["train/kl_loss/same"]
    assert min(both) < first["train/kl_loss"] < max(both)
    assert first["align/coverage"] > 0.9


def test_a_bad_tokenizer_pair_is_reported_before_the_start(material, tmp_path):
    ended = distill_rl("train", "-c", material.config(tmp_path, "foreign"), "loss.cross_tokenizer=gold")
    assert ended.code == 2
    (line,) = ended.errors
    assert "teachers.0.export: the loss gold needs logits or hidden; got topk; set teachers.0.export=logits" in line
    assert not (tmp_path / "runs").exists()


def test_check_shows_the_loss_and_the_number_of_aligners(material, tmp_path):
    ended = distill_rl("check", "-c", material.config(tmp_path, "foreign"))
    assert ended.code == 0, ended.err
    assert "aligner: 1 process" in ended.out
    assert "big: another tokenizer, loss hybrid" in ended.out
