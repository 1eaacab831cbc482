"""The teacher's kernel, interpreted, against the fp64 oracle."""

from __future__ import annotations

import pytest
import torch

from distill_rl.losses import kernels, vocab_parallel_topk
from tests.helpers.losses import top_k
from tests.triton.test_rows import DTYPES, TEMPERATURES, logits

SIZES = (((1, 1), 1), ((3, 17), 4), ((2, 97), 7), ((1, 5003), 1))
LARGE = (
    ((1, 60), 60, torch.float32, 1.0),
    ((1, 4096), 64, torch.bfloat16, 1.0),
    ((2, 9001), 50, torch.float32, 2.5),
)
"""Cases that the interpreter works on for seconds: it sorts thousands of keys."""


@pytest.mark.parametrize(
    ("shape", "k", "dtype", "temperature"),
    [*((*size, dtype, temperature) for size in SIZES for dtype in DTYPES for temperature in TEMPERATURES), *LARGE],
    ids=str,
)
def test_top_k_and_rest_equal_the_oracle(shape: tuple[int, int], k: int, dtype: torch.dtype, temperature: float):
    z = logits(0, shape, dtype, masked=shape[1] > 97)
    labels = torch.zeros(shape[0], dtype=torch.int64)
    found = vocab_parallel_topk(z, k, labels=labels, temperature=temperature, backend="triton")
    right = top_k(z.double(), k, temperature)
    logprobs = (z.double() / temperature).log_softmax(1)
    torch.testing.assert_close(found.logprobs.double(), right.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logprobs.gather(1, found.ids), right.logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.rest_logprob.double(), right.rest_logprob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.label_logprob.double(), logprobs[:, 0], rtol=1e-5, atol=1e-5)
    assert found.ids.sort(1).values.diff(dim=1).gt(0).all()


def test_equal_logits_are_ordered_by_their_column():
    z = torch.zeros(2, 5000)
    z[:, [4000, 17, 300]] = 1.0
    found = vocab_parallel_topk(z, 5, backend="triton")
    assert found.ids.tolist() == [[17, 300, 4000, 0, 1]] * 2


def test_negative_zero_equals_zero():
    z = torch.full((1, 300), -1.0)
    z[0, [10, 11, 200]] = torch.tensor([-0.0, 0.0, 0.0])
    assert vocab_parallel_topk(z, 2, backend="triton").ids.tolist() == [[10, 11]]


@pytest.mark.parametrize(("shape", "k"), [((1, 100), 65), ((1, 2**19 + 1), 1)])
def test_what_the_kernel_cannot_hold_is_refused_or_left_to_torch(shape: tuple[int, int], k: int):
    z = torch.zeros(shape)
    with pytest.raises(ValueError, match=f"backend: triton finds at most 64 .*; got {k} of {shape[1]}"):
        vocab_parallel_topk(z, k, backend="triton")
    assert vocab_parallel_topk(z, k).ids.shape == (1, k)


@pytest.mark.parametrize("temperature", [1.0, 8.0])
def test_masked_columns_have_probability_zero(temperature: float):
    z = torch.full((1, 300), -torch.inf)
    z[0, [3, 200]] = torch.tensor([1.0, 2.0])
    found = vocab_parallel_topk(z, 4, temperature=temperature, backend="triton")
    assert found.ids[0, :2].tolist() == [200, 3]
    assert found.logprobs[0, 2:].tolist() == [-torch.inf] * 2
    assert found.rest_logprob.tolist() == [-torch.inf]


def test_rest_is_exact_however_small_it_is():
    z = torch.full((1, 5000), -400.0)
    z[0, 7] = 0.0
    found = vocab_parallel_topk(z, 1, backend="triton")
    torch.testing.assert_close(found.rest_logprob, torch.tensor([-400 + torch.log(torch.tensor(4999.0)).item()]))


def test_masked_row_and_nan_are_as_without_the_kernel():
    z = torch.randn(3, 300)
    z[1] = -torch.inf
    z[2, 5] = torch.nan
    found, plain = (vocab_parallel_topk(z, 4, backend=backend) for backend in ("triton", "eager"))
    assert torch.equal(found.logprobs.isnan(), plain.logprobs.isnan())
    torch.testing.assert_close(found.logprobs[:2], plain.logprobs[:2], equal_nan=True)
    torch.testing.assert_close(found.rest_logprob[:2], plain.rest_logprob[:2], equal_nan=True)


def test_triton_that_gives_wrong_results_is_refused_or_warned_of(monkeypatch: pytest.MonkeyPatch):
    from distill_rl.losses.kernels import launch

    def wrong(logits: torch.Tensor, k: int, temperature: float) -> tuple[torch.Tensor, ...]:
        return best(logits.roll(1, 1), k, temperature)

    best = launch.best
    monkeypatch.setattr(launch, "best", wrong)
    for cached in (kernels._defect, kernels._works_on):
        cached.cache_clear()
    try:
        with pytest.raises(
            ValueError, match="backend: triton does not work here: a kernel's result is wrong; take eager"
        ):
            vocab_parallel_topk(torch.zeros(1, 20), 2, backend="triton")
        with pytest.warns(UserWarning, match="so torch computes the losses: a kernel's result is wrong"):
            assert not kernels._works_on(torch.device("cpu"))
    finally:
        for cached in (kernels._defect, kernels._works_on):
            cached.cache_clear()
