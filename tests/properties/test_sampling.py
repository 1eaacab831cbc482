"""What holds for draws of every distribution."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_rl.losses import context_keys, kd_loss, vocab_parallel_sample
from tests.helpers.losses import assert_close


@st.composite
def logits(draw: st.DrawFn) -> torch.Tensor:
    """Teacher's logits [N, V] of any sharpness and offset, some of them masked."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread, offset = draw(st.sampled_from([0.0, 1.0, 10.0, 100.0])), draw(st.sampled_from([0.0, -300.0, 300.0]))
    found = spread * torch.randn(rows, columns, generator=generator) + offset
    masked = torch.rand(rows, columns, generator=generator) < draw(st.sampled_from([0.0, 0.5]))
    masked[:, draw(st.integers(0, columns - 1))] = False
    return found.masked_fill(masked, -torch.inf)


@settings(max_examples=100, deadline=None)
@given(logits(), st.integers(1, 120), st.integers(-(2**63), 2**63 - 1), st.sampled_from([0.5, 1.0, 3.0]))
def test_draws_are_systematic(teacher, n, key, temperature) -> None:
    rows, columns = teacher.shape
    target = vocab_parallel_sample(teacher, n, keys=torch.full((rows,), key), temperature=temperature)
    p = (teacher.double() / temperature).softmax(1)
    for row in range(rows):
        present = target.ids[row] >= 0
        ids, counts = target.ids[row][present], target.counts[row][present]
        assert (present == (target.counts[row] > 0)).all()
        assert counts.sum() == n
        assert (ids.diff() > 0).all()
        assert teacher[row, ids].isfinite().all()
        whole = torch.zeros(columns, dtype=torch.float64).index_put_((ids,), counts.double())
        # fp32 exponentials of logits around 300 are off by a few 1e-5.
        assert ((whole - n * p[row]).abs() < 1 + 1e-2).all()
    student = torch.zeros(rows, columns, dtype=torch.float64).requires_grad_()
    output = kd_loss(student, target, temperature=temperature, reduction="none")
    output.loss.sum().backward()
    assert output.loss.isfinite().all()
    assert_close(student.grad.sum(1), torch.zeros(rows, dtype=torch.float64), what="sum of a row's gradient")


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6), min_size=1, max_size=5), st.integers(0, 2**32)
)
def test_keys_of_packed_documents_are_their_own(documents, seed) -> None:
    ids = torch.tensor([token for document in documents for token in document])
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    packed = context_keys(ids[None], positions[None], seed)[0]
    alone = [context_keys(torch.tensor([each]), torch.arange(len(each))[None], seed)[0] for each in documents]
    assert torch.equal(packed, torch.cat(alone))
