"""`distill-rl train` with pretrained models: its export, a checkpoint that is resumed, a student that dies."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill_rl.demo.real import RealMaterial
from distill_rl.evals.backends.base import Settings
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.evals.suites.base import Item
from tests.helpers.command import actor_pid, distill_rl, running, series, until

CONFIG = """\
student: {{model: {student}, dtype: fp32}}
teachers: [{{name: whole, model: {teacher}, dtype: fp32}}]
data: {{path: {text}, max_length: 128, long_documents: cut, validation: {{path: {held_out}, max_documents: 5}}}}
evaluate: {{at_start: true}}
loss: {{top_k: 64, kd_weight: 1.0, ce_weight: 0.5}}
optimizer: {{lr: 0.0003}}
schedule: {{warmup_steps: 2, steps: 6}}
train: {{steps: {steps}, global_batch_size: 4, micro_batch_size: 2}}
checkpoint: {{every: 2}}
observe: {{tensorboard: false}}
run: {{dir: {runs}, name: r, seed: 3}}
"""
DEADLINE_S = 900


def write_config(material: RealMaterial, folder: Path, *, steps: int = 6, **changed: Path) -> Path:
    folder.mkdir()
    named = {"student": material.student, "teacher": material.smollm2, **changed}
    path = folder / "run.yaml"
    path.write_text(CONFIG.format(text=material.train, held_out=material.held_out, runs=folder, steps=steps, **named))
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "r" / "export" / "model.safetensors")


@pytest.fixture(scope="module")
def straight(material: RealMaterial, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "straight"
    ended = distill_rl("train", "-c", write_config(material, folder))
    assert ended.code == 0, ended.err
    losses = [value for _, value in series(folder / "r", "train/loss")]
    assert losses[-1] < losses[0]
    return folder


@torch.no_grad()
def test_the_loss_of_a_validation_is_recomputed(material: RealMaterial, straight: Path) -> None:
    """Before the first step, over all tokens that a document has in a row; the end of a text is one."""
    model = AutoModelForCausalLM.from_pretrained(material.student, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(material.student)
    nll = count = 0.0
    for line in material.held_out.read_text("utf-8").splitlines()[:5]:
        ids = torch.tensor([[*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id][:128]])
        nll += float(cross_entropy(model(input_ids=ids).logits[0, :-1].double(), ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    ((step, found), *_) = series(straight / "r", "validation/nll_loss")
    assert step == 0
    assert found == pytest.approx(nll / count, rel=1e-4)


@torch.no_grad()
def test_the_export_says_what_transformers_lets_it_say(straight: Path) -> None:
    export = straight / "r" / "export"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32),
        AutoTokenizer.from_pretrained(export),
    )
    prompt = "The with statement is used to wrap the execution of a block with methods defined by a context manager"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    said = model.generate(input_ids=ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    ((_, output),) = HfBackend(export, Settings(dtype="fp32")).generate([Item("0", prompt, "")], max_new_tokens=20)
    assert output.text == tokenizer.decode(said, skip_special_tokens=True)


def test_the_export_is_a_teacher(material: RealMaterial, straight: Path, tmp_path: Path) -> None:
    config = write_config(material, tmp_path / "next", steps=1, teacher=straight / "r" / "export")
    ended = distill_rl("train", "-c", config)
    assert ended.code == 0, ended.err
    # It was trained for six steps out of the very weights that it now teaches.
    ((_, first), *_), ((_, next_first), *_) = (series(f / "r", "train/kl_loss") for f in (straight, tmp_path / "next"))
    assert 0 < next_first < first


def test_a_resumed_run_has_the_same_bits(material: RealMaterial, straight: Path, tmp_path: Path) -> None:
    config = write_config(material, tmp_path / "resumed")
    for more in (["train.steps=3"], ["--resume"]):
        ended = distill_rl("train", "-c", config, *more)
        assert ended.code == 0, ended.err
    found, wanted = weights(tmp_path / "resumed"), weights(straight)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_student_that_dies_is_replaced(material: RealMaterial, straight: Path, tmp_path: Path) -> None:
    config = write_config(material, tmp_path / "killed")
    log, run = tmp_path / "log", tmp_path / "killed" / "r"
    with running("train", "-c", config, log=log) as process:
        until(lambda: len(series(run, "train/loss")) >= 3 or process.poll() is not None, "three steps", DEADLINE_S)
        os.kill(actor_pid(process.pid, "Student"), signal.SIGKILL)
        assert process.wait(timeout=DEADLINE_S) == 0, log.read_text()
    found, wanted = weights(tmp_path / "killed"), weights(straight)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
