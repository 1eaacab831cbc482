"""Every way in which a pretrained model is loaded computes what Transformers computes of one document alone, in fp32."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distill_rl.config.schema import LoraConfig
from distill_rl.demo.real import documents
from distill_rl.evals.backends.base import Settings
from distill_rl.evals.backends.hf import HfBackend
from distill_rl.models import forward
from distill_rl.models.quantization import QuantizedWeight
from distill_rl.parallel.mesh import World
from distill_rl.types import TokenRows
from tests.helpers.engines import plain_logits, plain_model, token_rows
from tests.helpers.load import load_model
from tests.helpers.lora import peft_model, set_adapters
from tests.helpers.quantized import meant

LENGTHS = (60, 33, 71, 18, 90)
WIDTH = 100


@dataclass(frozen=True)
class Case:
    folder: Path
    packed: TokenRows
    """Five documents in three rows."""
    wanted: Tensor
    """[R, S, V] of each document alone; padding is 0."""
    told: Tensor
    """bool [R, S]: what is a document's."""


@pytest.fixture(scope="module")
def case(folder: Path) -> Case:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = documents()[1]
    ids = [np.array(tokenizer(text)["input_ids"][:size], np.int32) for text, size in zip(texts, LENGTHS)]
    packed = token_rows([ids[:2], ids[2:4], ids[4:]], WIDTH)
    plain = plain_model(folder, torch.float32).eval()
    with torch.no_grad():
        wanted = plain_logits(plain, packed, plain.config.vocab_size)
    told = torch.zeros(packed.shape, dtype=torch.bool)
    for row, lengths in enumerate((LENGTHS[:2], LENGTHS[2:4], LENGTHS[4:])):
        told[row, : sum(lengths)] = True
    return Case(folder, packed, wanted, told)


def tensors(rows: TokenRows) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows.input_ids).long(), torch.from_numpy(rows.position_ids).long()


def assert_close(found: Tensor, case: Case, rows: slice = slice(None)) -> None:
    told = case.told[rows]
    torch.testing.assert_close(found[told], case.wanted[rows][told], rtol=0, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("role", ["student", "teacher"])
def test_packed_rows_of_a_training(case: Case, world: World, role: Any) -> None:
    """Together, and one row at a time."""
    model = load_model(case.folder, world, role=role, dtype="fp32")
    ids, positions = tensors(case.packed)
    assert_close(forward.logits(model, ids, positions), case)
    for row in range(len(ids)):
        part = slice(row, row + 1)
        assert_close(forward.logits(model, ids[part], positions[part]), case, part)
    if role == "teacher":
        assert_close(forward.head(model, forward.body(model, ids, positions)), case)


@torch.no_grad()
def test_an_evaluation(case: Case) -> None:
    """Its model reads the first document alone."""
    with closing(HfBackend(case.folder, Settings(dtype="fp32"))) as backend:
        ids, positions = tensors(case.packed[:1])
        first = LENGTHS[0]
        found = forward.logits(backend.model, ids[:, :first], positions[:, :first])
        torch.testing.assert_close(found[0], case.wanted[0, :first], rtol=0, atol=2e-4)


@torch.no_grad()
def test_adapters(case: Case, world: World) -> None:
    """New ones change nothing; of known values they compute what PEFT's do."""
    model = load_model(case.folder, world, role="student", dtype="fp32", lora=LoraConfig(rank=4, alpha=6.0)).eval()
    ids, positions = tensors(case.packed)
    assert_close(forward.logits(model, ids, positions), case)
    set_adapters(model)
    ids, positions = ids[2:], positions[2:]
    size = LENGTHS[4]
    other = peft_model(case.folder).float().eval()
    set_adapters(other)
    wanted = other(input_ids=ids[:, :size], use_cache=False).logits
    assert (wanted[0] - case.wanted[2, :size]).abs().max() > 0.1
    found = forward.logits(model, ids, positions)[:, :size]
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=5e-3)


@torch.no_grad()
@pytest.mark.parametrize(("format", "most"), [("int8", 0.005), ("int4", 0.45), ("fp8", 0.025)])
def test_weights_in_few_bits(case: Case, world: World, format: str, most: float) -> None:
    """The logits are those of the numbers that the weights stand for, and the whole model's up to their own error."""
    pytest.importorskip("torchao")
    model = load_model(case.folder, world, role="teacher", dtype="fp32", quantization=format)
    plain = plain_model(case.folder, torch.float32).eval()
    for key, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            plain.get_parameter(key).copy_(meant(module))
    ids, positions = tensors(case.packed)
    found = forward.logits(model, ids, positions)[case.told]
    wanted = plain_logits(plain, case.packed, plain.config.vocab_size)[case.told]
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-3)
    whole = case.wanted[case.told].log_softmax(-1)
    divergence = (whole.exp() * (whole - found.log_softmax(-1))).sum(-1).mean()
    print(f"{case.folder.name} {format}: KL {divergence:.4f} nats")
    assert 0 < divergence < most
