"""The kernels of a training step, each timed alone and compared with what the card's bandwidth and FLOP/s allow.

1. Measure two ceilings: a copy inside the device's memory, and a bf16 product of large matrices.
2. Bound each kernel from below by the time for the bytes it must read and write at the copy's bandwidth, or for its
   FLOPs at the product's rate.
3. Time the kernel. `of bound` is bound / time: 1 is as fast as the card can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill_rl.bench.gpu.ceilings import copy_bandwidth, matmul_rate
from distill_rl.bench.gpu.timing import median_seconds, peak_bytes
from distill_rl.config.schema import OptimizerConfig
from distill_rl.losses import DenseLogits, fused_linear_kd_loss, kd_loss, vocab_parallel_topk
from distill_rl.losses.targets import Teacher
from distill_rl.student.optim import build_optimizer

TOP_K = 64
HOST_COPY_BYTES = 1 << 29
REPEATS = 10


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
    make: Callable[[], Callable[[], object]]
    num_bytes: float = 0.0
    """Bytes that it must read and write; 0 if it is bound by FLOPs."""
    flops: float = 0.0
    logits: int = 0
    """Tokens × columns, if extra memory is reported in bytes per logit; otherwise 0."""


def measure(device: torch.device, tiny: bool) -> dict[str, Any]:
    """The ceilings `copy, GB/s` and `product, TFLOP/s`, and `kernels`, a table of all kernels against them.

    A kernel that runs out of memory gets a row that says so.
    """
    sizes = SMALL if tiny or device.type != "cuda" else LARGE
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bandwidth, rate = copy_bandwidth(device), matmul_rate(device)
    rows = [_row(kernel, device, bandwidth, rate) for kernel in _kernels(sizes, device, dtype)]
    figures: dict[str, Any] = {"copy, GB/s": bandwidth / 1e9, "product, TFLOP/s": rate / 1e12, "kernels": rows}
    if device.type == "cuda":
        figures["copy to pinned host memory, GB/s"] = _host_bandwidth(device) / 1e9
    return figures


def _row(kernel: Kernel, device: torch.device, bandwidth: float, rate: float) -> dict[str, Any]:
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
    """Bytes per second from the device into page-locked memory."""
    source = torch.ones(HOST_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
    return source.numel() / median_seconds(lambda: target.copy_(source, non_blocking=True), device, REPEATS)


def _kernels(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Kernel]:
    yield from _loss_kernels(sizes, device, dtype)
    yield from _model_kernels(sizes, device, dtype)
    # Reads weight, gradient and two moments, writes all but the gradient: 7 numbers of 4 bytes.
    num_bytes = 28.0 * sizes.parameters
    yield Kernel("AdamW step, fp32", f"{sizes.parameters:,}", lambda: _adamw(sizes, device), num_bytes)


def _loss_kernels(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Kernel]:
    tokens, columns, hidden, item = sizes.tokens, sizes.columns, sizes.hidden, dtype.itemsize
    logits, shape = tokens * columns, f"[{tokens}, {columns}]"

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    def loss(target: Callable[[], Teacher]) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            student, teacher = randn(tokens, columns).mul_(2).requires_grad_(), target()

            def run() -> None:
                student.grad = None
                kd_loss(student, teacher).loss.backward()

            return run

        return make

    def top() -> Teacher:
        return vocab_parallel_topk(randn(tokens, columns).mul_(2), TOP_K)

    def fused() -> Callable[[], object]:
        states, head = randn(tokens, hidden).requires_grad_(), randn(columns, hidden).div_(hidden**0.5).requires_grad_()
        teacher = top()

        def run() -> None:
            states.grad = head.grad = None
            fused_linear_kd_loss(states, head, teacher).loss.backward()

        return run

    def topk() -> Callable[[], object]:
        teacher = randn(tokens, columns)
        return lambda: vocab_parallel_topk(teacher, TOP_K)

    # Reads the student's logits twice (softmax sum, then loss and gradient) and writes their gradient; reads the logits of
    # a dense teacher twice.
    yield Kernel("kd_loss, top-k", shape, loss(top), 3.0 * item * logits, logits=logits)
    yield Kernel(
        "kd_loss, dense", shape, loss(lambda: DenseLogits(randn(tokens, columns))), 5.0 * item * logits, logits=logits
    )
    yield Kernel(f"vocab_parallel_topk, k = {TOP_K}", shape, topk, 1.0 * item * logits, logits=logits)
    # One matrix product in the forward pass, two in the backward pass.
    flops = 6.0 * logits * hidden
    yield Kernel("fused_linear_kd_loss, top-k", f"{shape} of {hidden}", fused, flops=flops, logits=logits)


def _model_kernels(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Kernel]:
    rows, heads, positions, head_size = sizes.attention
    tokens, item = sizes.tokens, dtype.itemsize

    def both_ways(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            leaves = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
            gradient = torch.randn_like(function(*leaves))

            def run() -> None:
                torch.autograd.grad(function(*leaves), leaves, gradient)

            return run

        return make

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    # Two matrix products forward and five backward, 2·S²·E FLOPs each, halved by the causal mask.
    flops = 7.0 * rows * heads * positions**2 * head_size
    shape = (rows, heads, positions, head_size)
    yield Kernel("sdpa, causal, both ways", str(list(shape)), both_ways(attention, shape, shape, shape), flops=flops)
    size, numel = (tokens, sizes.hidden), tokens * sizes.hidden
    # Forward: one read, one write. Backward: reads input and gradient, writes one.
    make = both_ways(_rms_norm(sizes.hidden, device, dtype), size)
    yield Kernel("RMSNorm of transformers, both ways", str(list(size)), make, 5.0 * item * numel)
    size, numel = (tokens, sizes.intermediate), tokens * sizes.intermediate
    # Forward: two reads, one write. Backward: three reads, two writes.
    make = both_ways(lambda gate, up: F.silu(gate) * up, size, size)
    yield Kernel("SwiGLU elementwise, both ways", str(list(size)), make, 8.0 * item * numel)


def _rms_norm(hidden: int, device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm(hidden).to(device, dtype)


def _adamw(sizes: Sizes, device: torch.device) -> Callable[[], object]:
    """A step of the student's optimizer on one matrix."""
    model = nn.Linear(1 << 7, sizes.parameters >> 7, bias=False, device=device)
    model.weight.grad = torch.randn_like(model.weight)
    return build_optimizer(model, OptimizerConfig()).step
