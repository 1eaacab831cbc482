"""Runs that train on nothing: exit code 1, one line that says why, and neither a checkpoint nor an export."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from distill_rl.config.load import load_config
from distill_rl.data.order import random_order
from distill_rl.errors import NumericsError
from tests.helpers.command import distill_rl, series
from tests.helpers.corpus import corpus_rows
from tests.helpers.models import write_tiny_model
from tests.helpers.one_process import train

pytestmark = pytest.mark.cli

SHORT = ("aligner.workers=0", "data.validation.fraction=0", "run.seed=3")


def kept(run) -> list[str]:
    """What would let a run pass for a success."""
    return [str(path) for path in (run / "export", *(run / "checkpoints").glob("step-*")) if path.exists()]


def test_a_teacher_of_nan_is_named_and_nothing_is_exported(material, cluster, tmp_path):
    folder = write_tiny_model(tmp_path / "poisoned", hidden=32, seed=1, tie=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = (*SHORT, f"teachers.0.model={folder}")
    run, config = tmp_path / "runs" / "tiny", material.config(tmp_path)
    ended = distill_rl("train", "-c", config, *settings, "train.steps=3", cluster=cluster)
    assert ended.code == 1, ended.out
    (error,) = ended.errors
    assert "all of them skipped: the KD with teacher big is not finite" in error
    assert "check the weights and the dtype of teacher big" in error
    assert ended.out.count("loss nan from the KD with teacher big") == 3
    assert kept(run) == []
    with pytest.raises(NumericsError, match="after 3 steps skipped in a row, from the KD with teacher big"):
        train(load_config(config, [*settings, "train.steps=9"]), tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.long_run
def test_steps_without_labels_are_counted_and_alone_are_a_failure(material, cluster, tmp_path):
    """Only the third batch has answers. The check's sample of rows sees some of them, so the run starts."""
    rows = [{"messages": row["messages"][:1]} for row in corpus_rows(200, seed=6, messages=True)]
    whole = corpus_rows(200, seed=7, messages=True)
    for index in random_order(3, (0, 0), 200)[16:24]:
        rows[index] = whole[index]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        *SHORT,
        f"data.path={data}",
        "data.loss_on=assistant",
        "schedule.steps=null",
        "schedule.warmup_steps=50",
    )
    run, config = tmp_path / "runs" / "tiny", material.config(tmp_path)

    ended = distill_rl("train", "-c", config, *settings, "train.steps=2", cluster=cluster)
    assert ended.code == 1, ended.out
    (error,) = ended.errors
    for words in ("the data: at least one row must have a token to train on", "none in any step", "data.loss_on"):
        assert words in error, error
    assert ended.out.count("nothing in its documents is trained on") == 2
    assert [count for _, count in series(run, "faults/unlabelled_steps")] == [1, 2]
    assert [count for _, count in series(run, "align/unlabelled")] == [8, 8]
    assert kept(run) == []

    ended = distill_rl("train", "-c", config, *settings, "train.steps=3", "--clean", cluster=cluster)
    assert ended.code == 0, ended.err
    assert [value for _, value in series(run, "train/unlabelled")] == [1, 1, 0]
    # Sixteen are without an answer, and three are cut before it.
    assert "no labels 19 of 24 documents had no token to train on" in ended.out
    assert "no labels 2 of 3 steps had nothing to train on" in ended.out
    assert (run / "export").exists()
    assert "warm-up   schedule.warmup_steps is 50, but the run ends at step 3: the warm-up takes 1" in ended.out
    assert max(rate for _, rate in series(run, "train/lr")) == 0.01, "the learning rate is reached"
