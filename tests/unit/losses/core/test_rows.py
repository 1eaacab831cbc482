"""The buffers of the sweeps: where their rows begin, and what their dummy columns may not do."""

from __future__ import annotations

import pytest
import torch

from distill_rl.losses import DenseLogits, TopKLogprobs, kd_loss
from distill_rl.losses.core import rows
from distill_rl.losses.core.rows import Buffers, Centre, floor_of, padded_width
from distill_rl.losses.core.shards import VocabularyShard
from tests.helpers.losses import assert_close, batch

CPU = torch.device("cpu")


@pytest.mark.parametrize(("columns", "width"), [(0, 32), (1, 32), (31, 32), (32, 64), (128_256, 128_288)])
def test_rows_are_as_wide_as_the_next_multiple_with_room_for_a_dummy(columns: int, width: int) -> None:
    buffer = Buffers(3, columns, torch.float32, CPU).buffer("x", 2)
    assert padded_width(columns) == width
    assert buffer.shape == (2, width)
    assert buffer.is_contiguous()
    assert buffer.stride(0) * buffer.itemsize % 128 == 0


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_what_was_left_in_a_buffer_never_shows_in_its_dummy_columns(scale: float) -> None:
    scratch, logits = Buffers(4, 5, torch.float32, CPU), torch.randn(3, 5)
    centre = Centre(3, logits, VocabularyShard(0, 5, 5), scale)
    for left in (torch.nan, torch.inf, -torch.inf):
        scratch.buffer("x", 4).fill_(left)
        loaded = scratch.load("x", logits, centre, slice(0, 3), first=True)
        assert torch.equal(loaded[:, :5], (logits - logits.amax(1, keepdim=True)) * scale)
        assert bool((loaded[:, 5:] == floor_of(torch.float32)).all())


@pytest.mark.parametrize(
    "divergence", ["forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "tvd"]
)
@pytest.mark.parametrize("kind", ["dense", "topk"])
def test_the_number_of_dummy_columns_changes_nothing(monkeypatch, divergence: str, kind: str) -> None:
    data = batch(6, 97, padding=4)
    target: DenseLogits | TopKLogprobs = DenseLogits(data.teacher)
    if kind == "topk":
        top, ids = (data.teacher / 2).log_softmax(1).topk(9, 1)
        target = TopKLogprobs(ids, top, temperature=2.0)
    found = []
    for multiple in (1, 32, 256):
        monkeypatch.setattr(rows, "_ROW_MULTIPLE", multiple)
        student = data.student.clone().requires_grad_()
        output = kd_loss(student, target, labels=data.labels, divergence=divergence, temperature=2.0, kd_ratio=0.4)
        output.loss.backward()
        found.append((output.loss.detach(), student.grad))
    for loss, gradient in found[1:]:  # rows of another length are added up in another order
        assert_close(loss, found[0][0], 1e-14, "loss")
        assert_close(gradient, found[0][1], 1e-14)
