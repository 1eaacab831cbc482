"""The sizes of a decoder: parameters as transformers makes them, FLOPs as torch counts them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill_rl.scaling.shape import Shape
from tests.bench.gpu.shapes import LLAMA_1B, LLAMA_8B, QWEN3_4B, TINY_LLAMA, TINY_QWEN3, TINY_STUDENT

aten = torch.ops.aten


def make(shape: Shape, **settings: object) -> PreTrainedModel:
    config = shape.config(use_cache=False)
    return AutoModelForCausalLM.from_config(config, **settings)


@pytest.mark.parametrize(
    ("shape", "published"), [(LLAMA_1B, 1_235_814_400), (QWEN3_4B, 4_022_468_096), (LLAMA_8B, 8_030_261_248)]
)
def test_shapes_have_the_published_number_of_parameters(shape: Shape, published: int) -> None:
    with torch.device("meta"):
        made = make(shape)
    assert sum(weight.numel() for weight in made.parameters()) == published
    assert shape.parameters == sum(weight.numel() for weight in made.parameters() if weight.dim() == 2)


@pytest.mark.parametrize("shape", [TINY_STUDENT, TINY_LLAMA, TINY_QWEN3], ids=lambda shape: shape.name)
def test_flops_are_those_that_torch_counts(shape: Shape) -> None:
    length, small = 24, make(shape, attn_implementation="eager")
    with FlopCounterMode(display=False) as forward:
        loss = small(torch.zeros(1, length, dtype=torch.int64)).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    counted = {name: each.get_flop_counts()["Global"] for name, each in (("f", forward), ("b", backward))}
    matrices = 2 * (shape.body_parameters + shape.head_parameters) * length
    # torch computes, and counts, the half of the scores that the mask removes as well
    scores = 2 * length * shape.attention_flops(length)
    assert counted["f"][aten.mm] == matrices
    # transformers 5.17 makes the rotary angles by a matrix product, later versions by a plain one
    angles = counted["f"][aten.bmm] - scores
    assert angles in (0, length * shape.head_size)
    assert counted["b"][aten.mm] == 2 * matrices
    assert counted["b"][aten.bmm] == 2 * scores
    assert length * shape.flops_per_token(length, trained=False) == matrices + scores / 2
    assert length * shape.flops_per_token(length, trained=True) == 3 * (matrices + scores / 2)
