"""Outputs are trees of tensors to torch, which maps over their fields and puts them together again."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from distill_rl.losses import ChunkOutput, DenseLogits, KDOutput, kd_loss


@pytest.mark.parametrize("with_labels", [True, False])
def test_an_output_is_mapped_field_by_field(with_labels: bool) -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    output = kd_loss(logits, DenseLogits(logits.flip(0)), labels=torch.arange(4) if with_labels else None)
    doubled = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor * 2, output)
    assert type(doubled) is KDOutput
    assert torch.equal(doubled.loss, 2 * output.loss)
    assert int(doubled.num_tokens) == 8
    assert (doubled.ce_loss is None) == (not with_labels)


def test_an_output_of_chunks_keeps_its_fields_in_order() -> None:
    leaves, spec = pytree.tree_flatten(ChunkOutput(*(torch.tensor(number) for number in range(5))))
    assert [int(leaf) for leaf in leaves] == list(range(5))
    assert int(pytree.tree_unflatten(leaves, spec).student_mass) == 4


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_meta_tensors_give_the_shapes_of_loss_and_gradient(kind: str) -> None:
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        student, teacher = (torch.empty(6, 40, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        labels = torch.zeros(6, dtype=torch.int64)
        output = kd_loss(student * 1, DenseLogits(teacher), labels=labels, kd_ratio=0.5)
        output.loss.backward()
    assert output.loss.shape == ()
    assert output.loss.dtype == torch.float32
    assert student.grad.shape == student.shape
    assert student.grad.dtype == torch.bfloat16
