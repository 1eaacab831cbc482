"""Who computes a loss, as far as that needs no Triton; `tests/triton` has the rest."""

import importlib.util

import pytest
import torch

from distill_rl.losses import DenseLogits, KDLoss, kd_loss, vocab_parallel_logprobs, vocab_parallel_topk
from distill_rl.losses.core.logits import computed_chunk
from distill_rl.losses.kernels import uses_triton

LOGITS = torch.zeros(2, 5)
IDS = torch.zeros(2, dtype=torch.int64)
CALLS = {
    "kd_loss": lambda backend: kd_loss(LOGITS, DenseLogits(LOGITS), backend=backend),
    "vocab_parallel_topk": lambda backend: vocab_parallel_topk(LOGITS, 2, backend=backend),
    "vocab_parallel_logprobs": lambda backend: vocab_parallel_logprobs(LOGITS, IDS, backend=backend),
}


@pytest.mark.parametrize("name", CALLS)
def test_unknown_backend_is_refused(name: str):
    with pytest.raises(ValueError, match="backend: must be eager, triton or None; got 'cuda'"):
        CALLS[name]("cuda")


@pytest.mark.parametrize("name", CALLS)
def test_triton_that_is_not_installed_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="backend: triton is not installed; install it, or leave the choice to None"):
        CALLS[name]("triton")


@pytest.mark.parametrize("name", CALLS)
def test_cpu_tensors_are_computed_by_torch(name: str):
    CALLS[name](None)
    CALLS[name]("eager")
    assert not uses_triton(None, LOGITS)


@pytest.mark.parametrize("columns", [1, 300, 32_000, 128_256, 262_208])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("device", "most"), [("cpu", 192 * 2**20), ("cuda", 2**30)])
def test_fused_chunks_are_whole_multiples_of_sixteen_rows_within_their_memory(
    device: str, most: int, dense: bool, columns: int
):
    on = torch.device(device)
    eager, kernels = (computed_chunk(4096, columns, on, dense=dense, kernels=kernels) for kernels in (False, True))
    assert 16 <= eager <= kernels <= 2048
    assert eager % 16 == kernels % 16 == 0
    for rows, item in ((eager, 32 if dense else 12), (kernels, 12 if dense else 8)):
        assert rows == 16 or rows * columns * item <= most


def test_module_refuses_an_unknown_backend_when_it_is_made():
    with pytest.raises(ValueError, match="backend: must be"):
        KDLoss(backend="cuda")
