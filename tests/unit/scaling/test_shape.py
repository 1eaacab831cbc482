"""The sizes of a decoder: parameters as transformers makes them, FLOPs as torch counts them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill_rl.scaling.shape import Shape, needed_flops, nominal_flops
from distill_rl.types import TokenRows
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


@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_needs_the_flops_of_its_documents_alone(frozen: bool) -> None:
    """Two rows of 9 + 4 and of 6 tokens, padded to 16. Of the scores, torch counts the masked half as well."""
    small = make(TINY_LLAMA, attn_implementation="eager")
    small.requires_grad_(not frozen)
    matrices = scores = 0.0
    for length in (9, 4, 6):
        # What a frozen decoder passes back to its first adapter.
        embedded = torch.zeros(1, length, TINY_LLAMA.hidden, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            small(inputs_embeds=embedded).logits.sum().backward()
        counted = counter.get_flop_counts()["Global"]
        matrices += counted[aten.mm]
        passes = 3  # the backward pass of the scores is twice the forward one, frozen weights or not
        scores += passes * length * 2 * TINY_LLAMA.attention_flops(length)
    positions = np.zeros((2, 16), np.int32)
    positions[0, :13] = [*range(9), *range(4)]
    positions[1, :6] = range(6)
    rows = TokenRows(np.zeros_like(positions), positions, positions, used=np.array([13, 6], np.int32))
    attended = sum(length * (length + 1) / 2 for length in (9, 4, 6))
    square = sum(length**2 for length in (9, 4, 6))
    factor = 2 / 3 if frozen else 1  # as the convention has it: backward of frozen layers costs as much as forward
    expected = matrices + factor * scores * attended / square
    assert needed_flops(TINY_LLAMA, rows, frozen=frozen) == pytest.approx(expected, rel=1e-12)


def test_cards_are_known_by_the_names_that_cuda_gives() -> None:
    names = {
        "NVIDIA H200": 989e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A10G": 70e12,
        "NVIDIA A10": 125e12,
        "NVIDIA L4": 121e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA GeForce RTX 4090": 165e12,
        "Tesla T4": None,
        "NVIDIA RTX A4000": None,
    }
    assert {name: nominal_flops(name) for name in names} == names
