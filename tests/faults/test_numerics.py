"""A teacher whose outputs are NaN (R13), for one token and for all."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.command import distill_rl, running, series, until
from tests.helpers.models import write_tiny_model


@pytest.fixture
def poisoned_teacher(tmp_path):
    """Writes a teacher whose embedding of the given tokens is NaN, and returns the setting that selects it."""

    def write(tokens) -> str:
        folder = write_tiny_model(tmp_path / "poisoned", hidden=32, seed=1, tie=False)
        weights = load_file(folder / "model.safetensors")
        weights["model.embed_tokens.weight"][tokens] = torch.nan
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return f"teachers.0.model={folder}"

    return write


def test_a_nan_row_skips_only_the_steps_that_contain_it(material, poisoned_teacher, tmp_path):
    from tests.helpers.tokenizers import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    rows = [json.loads(line) for line in (material.root / "corpus.jsonl").read_text().splitlines()]
    used = {token for row in rows for token in tokenizer(row["text"])["input_ids"]}
    sign = next(chr(code) for code in range(33, 127) if not used & set(tokenizer(chr(code) * 4)["input_ids"]))
    rare = sorted(set(tokenizer(sign * 4)["input_ids"]))
    rows[40]["text"] = sign * 4 + rows[40]["text"][:20]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        f"data.path={data}",
        poisoned_teacher(rare),
        "data.validation.fraction=0",
        "train.epochs=2",
        "train.steps=20",
    )
    ended = distill_rl("train", "-c", material.config(tmp_path), *settings)
    assert ended.code == 0, ended.err
    run = tmp_path / "runs" / "tiny"
    skipped = [step for step, value in series(run, "train/skipped") if value]
    assert len(skipped) == 2, "the row comes once in each of two epochs"
    assert [step for step, loss in series(run, "train/loss") if loss is None] == skipped
    assert ended.out.count("skipped   step ") == 2
    counted = [count for _, count in series(run, "faults/skipped_steps")]
    assert counted[0] == 1
    assert counted[-1] == 2
    assert all(tensor.isfinite().all() for tensor in load_file(run / "export" / "model.safetensors").values())


def test_an_all_nan_teacher_ends_the_run_without_a_bad_checkpoint(material, poisoned_teacher, tmp_path):
    config, run = material.config(tmp_path), tmp_path / "runs" / "tiny"
    assert distill_rl("train", "-c", config, "train.steps=2", "checkpoint.every=1").code == 0
    bad = poisoned_teacher(slice(None))
    ended = distill_rl("train", "-c", config, bad, "checkpoint.every=1", "--clean", "faults.skipped_steps=2")
    assert ended.code == 1
    (error,) = ended.errors
    for word in (
        "student-dp0-tp0",
        "step 3: its loss must be finite; got nan after 2 steps skipped in a row",
        "check the weights and the dtype of teacher big",
    ):
        assert word in error, error
    assert not list((run / "checkpoints").glob("step-*")), "no step was taken, so there is nothing to save"
    assert [value for _, value in series(run, "train/loss")] == [None, None], "both skipped steps are in the metrics"


def test_a_stop_between_skipped_steps_saves_none_of_them(material, poisoned_teacher, tmp_path):
    config, run, log = material.config(tmp_path), tmp_path / "runs" / "tiny", tmp_path / "log"
    endless = ("train.steps=100000", "checkpoint.every=1", "faults.skipped_steps=400", poisoned_teacher(slice(None)))
    with running("train", "-c", config, *endless, log=log) as process:
        until(lambda: "skipped   step " in log.read_text() or process.poll() is not None, "a skipped step")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == 1, log.read_text()
    assert "after 400 steps skipped in a row" in log.read_text()
    assert not list((run / "checkpoints").glob("step-*"))
