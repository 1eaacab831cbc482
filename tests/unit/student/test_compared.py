"""The output layers held by a student compute the logits that the teachers would compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from distill_rl.config.schema import TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.losses import DenseLogits, HiddenStates, TeacherHidden, kd_loss
from distill_rl.losses.core.logits import DenseTeacher
from distill_rl.models import forward
from distill_rl.models.load import OutputLayer, read_output_layer
from distill_rl.student.compared import ComparedTeacher, open_head
from distill_rl.types import CrossTokenizerSpec
from tests.helpers.load import load_model
from tests.helpers.tokenizers import tiny_tokenizer
from tests.helpers.zoo import write_model

COLUMNS, TOKENS = 300, 290
"""Of the models. The last columns stand for no token."""


def head_of(world, folder: Path, *, dtype: str = "fp32", columns: int = COLUMNS, tokens: int = TOKENS) -> OutputLayer:
    teacher = TeacherConfig(model=str(folder), export="hidden", dtype=dtype)
    head = open_head(teacher, None, world, columns=columns, tokens=tokens)
    assert head is not None
    return head


def states() -> HiddenStates:
    return HiddenStates(torch.randn(300, 32, generator=torch.Generator().manual_seed(0)))


def attached(head: OutputLayer, given: HiddenStates) -> TeacherHidden:
    joined = ComparedTeacher(TeacherConfig(model="m", export="hidden"), head=head).with_head(given)
    assert isinstance(joined, TeacherHidden)
    return joined


def logits(head: OutputLayer, given: HiddenStates) -> torch.Tensor:
    return DenseTeacher.of_all_columns(attached(head, given)).of(torch.arange(len(given.hidden)), torch.float32)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("qwen2", {"tie": True}),
        ("gpt2", {"tie": True}),
        ("phi3", {}),
        ("granite", {"tie_word_embeddings": True}),
        ("cohere", {}),
        ("gemma2", {}),
    ],
)
def test_logits_match_the_teacher_without_padding(world, tmp_path, name, settings):
    folder = write_model(tmp_path / name, name, vocab_size=COLUMNS, **settings)
    given = states()
    with torch.no_grad():
        wanted = forward.head(load_model(folder, world, role="teacher", dtype="fp32"), given.hidden)
    found = logits(head_of(world, folder), given)
    torch.testing.assert_close(found[:, :TOKENS], wanted[:, :TOKENS], rtol=1e-5, atol=1e-5)
    assert (found[:, TOKENS:] == -torch.inf).all()


@pytest.mark.parametrize("name", ["cohere", "gemma2"])
def test_attached_head_gives_the_gradient_of_logits(world, tmp_path, name):
    """Also with a soft cap, which would turn a masked column into a finite number."""
    head, given = head_of(world, write_model(tmp_path / name, name, vocab_size=COLUMNS)), states()
    student = torch.randn(300, COLUMNS, generator=torch.Generator().manual_seed(1))
    student[:, TOKENS:] = -torch.inf
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        gradients = []
        for target in (attached(head, given), DenseLogits(logits(head, given))):
            leaf = student.clone().requires_grad_()
            kd_loss(leaf, target, divergence=divergence).loss.backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-8)
        assert gradients[0].abs().max() > 1e-4


@pytest.mark.parametrize("columns", [280, 300, 512])
def test_table_is_cut_or_padded_to_student_columns(world, tmp_path, columns):
    folder = write_model(tmp_path / "llama", "llama", vocab_size=COLUMNS)
    given, whole = states(), head_of(world, folder)
    found = logits(head_of(world, folder, columns=columns, tokens=280), given)
    assert found.shape == (300, columns)
    assert torch.equal(found[:, :280], logits(whole, given)[:, :280])
    assert (found[:, 280:] == -torch.inf).all()


def test_bf16_layer_has_rounded_weights(world, tmp_path):
    folder = write_model(tmp_path / "llama", "llama", vocab_size=COLUMNS)
    narrow, whole = (head_of(world, folder, dtype=dtype) for dtype in ("bf16", "fp32"))
    assert narrow.weight.dtype == torch.float32  # what a CPU computes in
    assert torch.equal(narrow.weight, whole.weight.bfloat16().float())
    assert not torch.equal(narrow.weight, whole.weight)


def test_foreign_teacher_keeps_all_columns_masked_by_its_ids(world, tmp_path):
    foreign = tiny_tokenizer(400, seed=7)
    folder = write_model(tmp_path / "foreign", "llama", vocab_size=416, tokenizer=foreign)
    teachers = [TeacherConfig(model=str(folder), export=export, dtype="fp32") for export in ("hidden", "topk")]
    spec = CrossTokenizerSpec("gold", "unused")
    head, nothing = (open_head(teacher, spec, world, columns=COLUMNS, tokens=TOKENS) for teacher in teachers)
    assert nothing is None
    found = logits(head, states())
    assert found.shape == (300, 416)
    assert found[:, :400].isfinite().all()
    assert (found[:, 400:] == -torch.inf).all()


@pytest.mark.parametrize("rows", [slice(0, 7), slice(290, 310), slice(300, 320), slice(5, 5), None])
def test_only_requested_rows_are_read(tmp_path, rows):
    folder = write_model(tmp_path / "tied", "qwen2", vocab_size=COLUMNS, tie=True)
    layer, whole = (read_output_layer(folder, which, dtype="fp32") for which in (rows, None))
    assert whole.weight.shape == (COLUMNS, 32)
    assert torch.equal(layer.weight, whole.weight[rows or slice(None)])
    assert layer.bias is None


def test_tied_tables_that_differ_are_refused(tmp_path):
    folder = write_model(tmp_path / "tied", "qwen2", vocab_size=COLUMNS, tie=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight.* must be equal, because config\.json ties them"):
        read_output_layer(folder, dtype="fp32")


def test_table_of_another_shape_is_refused(tmp_path):
    folder = write_model(tmp_path / "llama", "llama", vocab_size=COLUMNS)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace(f'"vocab_size": {COLUMNS}', '"vocab_size": 299'))
    with pytest.raises(ConfigError, match=r"shape must be \[299, 32\] by config.json; got \[300, 32\]"):
        read_output_layer(folder, dtype="fp32")
