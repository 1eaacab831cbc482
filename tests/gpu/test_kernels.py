"""The kernels of a training step, each timed alone and compared with what the card's bandwidth and FLOP/s allow.

1. Measure two ceilings: a copy inside the device's memory, and a bf16 product of large matrices.
2. Bound each kernel from below by the time for the bytes it must read and write at the copy's bandwidth, or for its
   FLOPs at the product's rate.
3. Time the kernel. `of bound` is bound / time: 1 is as fast as the card can be.

The losses run as by default, and where that is with Triton's kernels, with torch alone as well (`eager`). The bound is
the same for both: the bytes that a loss cannot do without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill_rl.config.schema import OptimizerConfig
from distill_rl.losses import DenseLogits, fused_linear_kd_loss, kd_loss, vocab_parallel_topk
from distill_rl.losses.core.checks import Backend
from distill_rl.losses.kernels import uses_triton
from distill_rl.student.optim import build_optimizer
from tests.bench.gpu.losses_cuda import describe_triton
from tests.bench.gpu.timing import copy_bandwidth, matmul_rate, median_seconds, peak_bytes
from tests.gpu.conftest import Figures

TOP_K = 64
HOST_COPY_BYTES = 1 << 29
REPEATS = 10
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of all kernels; tokens, columns (vocabulary) and hidden are those of the losses."""

    tokens: int
    columns: int
    hidden: int
    intermediate: int
    parameters: int
    """Parameters that AdamW updates."""
    attention: tuple[int, int, int, int]
    """Rows, heads, positions, head size."""


LARGE = Sizes(4096, 128_256, 2048, 8192, 1 << 28, (4, 32, 2048, 64))
SMALL = Sizes(64, 1000, 32, 64, 1 << 14, (1, 2, 64, 16))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel to time. `make` allocates the inputs and returns the function to call."""

    name: str
    shape: str
    make: Callable[[], Run]
    num_bytes: float = 0.0
    """Bytes that it must read and write; 0 if it is bound by FLOPs."""
    flops: float = 0.0
    logits: int = 0
    """Tokens × columns, if extra memory is reported in bytes per logit; otherwise 0."""


@pytest.mark.gpu
@pytest.mark.usefixtures("budget_s")
def test_all_kernels_are_measured(device: torch.device, tiny: bool, figures: Figures) -> None:
    """The ceilings, and a table of all kernels against them. A kernel that runs out of memory gets a row that says so.

    Sizes are small with `tiny` and on a CPU. The dtype is bf16 on a GPU and fp32 on a CPU; AdamW always runs in fp32.
    """
    sizes = SMALL if tiny or device.type != "cuda" else LARGE
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # First, so that a reason why Triton does not work is not lost: it is given once per process.
    triton = describe_triton(device.type)
    bandwidth, rate = copy_bandwidth(device), matmul_rate(device)
    rows = [_row(kernel, device, bandwidth, rate) for kernel in _kernels(sizes, device, dtype)]
    figures |= {"Triton": triton, "copy, GB/s": bandwidth / 1e9, "product, TFLOP/s": rate / 1e12, "kernels": rows}
    if device.type == "cuda":
        figures["copy to pinned host memory, GB/s"] = _host_bandwidth(device) / 1e9


def _row(kernel: Kernel, device: torch.device, bandwidth: float, rate: float) -> dict[str, Any]:
    """Times one kernel and compares its median time with the bound that memory or arithmetic sets; a row of the table.

    A kernel that runs out of memory gets a row that says so. Empties torch's cache of GPU memory afterwards.

    Args:
        bandwidth: bytes per second of copies on this device.
        rate: FLOP/s of matrix products on this device.
    """
    row: dict[str, Any] = {"kernel": kernel.name, "shape": kernel.shape}
    try:
        run = kernel.make()
        milliseconds = 1000 * median_seconds(run, device, REPEATS)
        peak = peak_bytes(run, device) if kernel.logits else None
        del run
    except torch.OutOfMemoryError:
        row["ms"] = "out of memory"
        return row
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    bound = 1000 * (kernel.flops / rate if kernel.flops else kernel.num_bytes / bandwidth)
    row |= {"ms": milliseconds, "bound ms": bound, "of bound": bound / milliseconds}
    row["GB/s"] = kernel.num_bytes / milliseconds / 1e6 if kernel.num_bytes else None
    row["TFLOP/s"] = kernel.flops / milliseconds / 1e9 if kernel.flops else None
    row["extra bytes per logit"] = peak / kernel.logits if peak is not None else None
    return row


def _host_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy from the GPU into page-locked host memory."""
    source = torch.ones(HOST_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
    return source.numel() / median_seconds(lambda: target.copy_(source, non_blocking=True), device, REPEATS)


def _kernels(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Kernel]:
    """Yields the kernels to be timed, with the bytes or FLOPs that each needs at least.

    Their inputs are allocated only by `Kernel.make`.

    Args:
        dtype: of all kernels but AdamW, which is fp32.
    """
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    tokens, columns, hidden, item = sizes.tokens, sizes.columns, sizes.hidden, dtype.itemsize

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).mul_(scale)

    def logits() -> Tensor:
        return randn(tokens, columns, scale=2)

    def topk(backend: Backend | None) -> Run:
        return partial(vocab_parallel_topk, randn(tokens, columns), TOP_K, backend=backend)

    def dense(backend: Backend | None) -> Run:
        return _loss_step(partial(kd_loss, teacher=DenseLogits(logits()), backend=backend), logits())

    def sparse(backend: Backend | None) -> Run:
        teacher = vocab_parallel_topk(logits(), TOP_K)
        return _loss_step(partial(kd_loss, teacher=teacher, backend=backend), logits())

    def fused(backend: Backend | None) -> Run:
        loss = partial(fused_linear_kd_loss, teacher=vocab_parallel_topk(logits(), TOP_K), backend=backend)
        return _loss_step(loss, randn(tokens, hidden), randn(columns, hidden, scale=hidden**-0.5))

    backends: dict[str, Backend | None] = {"": None}
    if uses_triton(None, randn(0)):
        backends[", eager"] = "eager"
    num_logits, shape = tokens * columns, f"[{tokens}, {columns}]"

    def by_backend(
        name: str, make: Callable[[Backend | None], Run], shape: str = shape, **bound: float
    ) -> Iterator[Kernel]:
        """One kernel for each backend, with the same bound: `num_bytes` or `flops`."""
        for note, backend in backends.items():
            yield Kernel(f"{name}{note}", shape, partial(make, backend), logits=num_logits, **bound)

    # Reads the student's logits twice (softmax sum, then loss and gradient) and writes their gradient; reads the logits of
    # a dense teacher twice.
    yield from by_backend("kd_loss, top-k", sparse, num_bytes=3.0 * item * num_logits)
    yield from by_backend("kd_loss, dense", dense, num_bytes=5.0 * item * num_logits)
    yield from by_backend(f"vocab_parallel_topk, k = {TOP_K}", topk, num_bytes=1.0 * item * num_logits)
    # One matrix product in the forward pass, two in the backward pass.
    flops = 6.0 * num_logits * hidden
    yield from by_backend("fused_linear_kd_loss, top-k", fused, f"{shape} of {hidden}", flops=flops)

    def both_ways(
        name: str,
        function: Callable[..., Tensor],
        *shapes: tuple[int, ...],
        num_bytes: float = 0.0,
        flops: float = 0.0,
    ) -> Kernel:
        """A kernel that runs forward and backward of `function` on random inputs of these shapes."""

        def make() -> Run:
            leaves = [randn(*shape).requires_grad_() for shape in shapes]
            gradient = torch.randn_like(function(*leaves))
            return lambda: torch.autograd.grad(function(*leaves), leaves, gradient)

        return Kernel(f"{name}, both ways", str(list(shapes[0])), make, num_bytes, flops)

    rows, heads, positions, head_size = sizes.attention
    attention = partial(F.scaled_dot_product_attention, is_causal=True)
    # Two matrix products forward and five backward, 2·S²·E FLOPs each, halved by the causal mask.
    flops = 7.0 * rows * heads * positions**2 * head_size
    yield both_ways("sdpa, causal", attention, *[sizes.attention] * 3, flops=flops)
    # Forward: one read, one write. Backward: reads input and gradient, writes one.
    norm = LlamaRMSNorm(hidden).to(device, dtype)
    yield both_ways("RMSNorm of transformers", norm, (tokens, hidden), num_bytes=5.0 * item * tokens * hidden)
    # Forward: two reads, one write. Backward: three reads, two writes.
    size = (tokens, sizes.intermediate)
    yield both_ways("SwiGLU elementwise", _swiglu, size, size, num_bytes=8.0 * item * tokens * sizes.intermediate)
    # Reads weight, gradient and two moments, writes all but the gradient: 7 numbers of 4 bytes.
    yield Kernel("AdamW step, fp32", f"{sizes.parameters:,}", lambda: _adamw(sizes, device), 28.0 * sizes.parameters)


def _loss_step(loss: Callable[..., Any], *inputs: Tensor) -> Run:
    """Returns a function that runs forward and backward of a loss; the gradients of its last call stay allocated.

    Args:
        loss: called with `inputs`; its result has the scalar `loss`.
        inputs: made to require gradients, in place.
    """
    leaves = [tensor.requires_grad_() for tensor in inputs]

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss(*leaves).loss.backward()

    return run


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, element by element, in plain torch."""
    return F.silu(gate) * up


def _adamw(sizes: Sizes, device: torch.device) -> Run:
    """Returns a function that takes one step of foreach AdamW on an fp32 matrix with a random gradient.

    The matrix has `sizes.parameters` elements; every call uses the same gradient.
    """
    model = nn.Linear(1 << 7, sizes.parameters >> 7, bias=False, device=device)
    model.weight.grad = torch.randn_like(model.weight)
    return build_optimizer(model, OptimizerConfig()).step


def made(monkeypatch: pytest.MonkeyPatch, *, triton: bool) -> list[Kernel]:
    monkeypatch.setattr(f"{__name__}.uses_triton", lambda backend, logits: triton)
    return list(_kernels(SMALL, torch.device("cpu"), torch.float32))


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
        monkeypatch.setattr(f"{__name__}.{name}", _recorded(globals()[name], backends := []))
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
