"""The table of kernels: its losses, by the default backend and, where that is Triton, by torch as well."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.check.checks import kernels

CPU = torch.device("cpu")


def made(monkeypatch: pytest.MonkeyPatch, *, triton: bool) -> list[kernels.Kernel]:
    monkeypatch.setattr(kernels, "uses_triton", lambda backend, logits: triton)
    return list(kernels._kernels(kernels.SMALL, CPU, torch.float32))


def test_losses_and_top_k_are_timed_in_torch_beside_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, both = made(monkeypatch, triton=False), made(monkeypatch, triton=True)
    assert not any("eager" in kernel.name for kernel in alone)
    losses = [kernel for kernel in alone if kernel.logits]
    assert [kernel.name for kernel in both if kernel.logits] == [
        f"{kernel.name}{note}" for kernel in losses for note in ("", ", eager")
    ]
    for default, eager in zip(both[: 2 * len(losses) : 2], both[1 : 2 * len(losses) : 2]):
        assert (default.num_bytes, default.flops) == (eager.num_bytes, eager.flops)


def test_each_kernel_is_run_with_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kd_loss", "fused_linear_kd_loss", "vocab_parallel_topk"):
        monkeypatch.setattr(kernels, name, _recorded(getattr(kernels, name), backends := []))
        for kernel in made(monkeypatch, triton=True):
            if kernel.name.startswith(name):
                backends.clear()
                kernel.make()()
                assert backends[-1] == ("eager" if kernel.name.endswith("eager") else None)


def _recorded(function, backends: list):
    def called(*arguments, backend=None, **keywords):
        backends.append(backend)
        return function(*arguments, backend=backend, **keywords)

    return called
