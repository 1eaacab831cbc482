"""Turns CUDA out of memory into one line: the phase, bytes requested and held, and settings that need less.

PyTorch's own message has several lines and names no setting. cuBLAS, cuDNN and NCCL, which allocate outside PyTorch's
allocator, raise other messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from distill_rl.errors import GpuMemoryError, first_line

Phase = Literal[
    "student load", "forward", "backward", "optimizer step", "checkpoint copy", "weight export",
    "teacher load", "teacher forward", "engine load", "engine step", "transport ring", "comparison", "evaluation",
]  # fmt: skip

_SHARE_LESS = "ray.placement=disaggregated gives teachers GPUs of their own"
_PER_STEP = "lower train.micro_batch_size or data.max_length, set student.activation_checkpointing=true, or raise student.parallel.sp"
REMEDIES: dict[Phase, str] = {
    "student load": f"raise student.parallel.dp or student.parallel.tp; {_SHARE_LESS}",
    "forward": _PER_STEP,
    "backward": _PER_STEP,
    "optimizer step": f"raise student.parallel.dp, over which its state is divided; {_PER_STEP}",
    "checkpoint copy": f"the training leaves too little beside it: {_PER_STEP}",
    "weight export": f"the training leaves too little beside it: {_PER_STEP}",
    "teacher load": f"raise teachers[].parallel.tp; {_SHARE_LESS}",
    "teacher forward": "lower teachers[].micro_batch_size (or train.micro_batch_size) or data.max_length, or raise "
    "teachers[].parallel.sp",
    "engine load": f"raise teachers[].parallel.tp or teachers[].vllm.gpu_share; {_SHARE_LESS}",
    "engine step": "lower teachers[].vllm.gpu_share, which leaves more memory beside vLLM's engine",
    "transport ring": "lower prefetch.depth, prefetch.slots or loss.top_k, or set transport=object_store",
    "comparison": "lower teachers[].micro_batch_size, or hide the GPU, for instance with CUDA_VISIBLE_DEVICES=, to compare on the CPU",
    "evaluation": "lower evaluate.batch_size (--batch-size), or raise evaluate.gpu_share",
}

_OTHER_MESSAGES = (
    "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED", "CUDA_ERROR_OUT_OF_MEMORY",
)  # fmt: skip
"""Messages of RuntimeErrors other than PyTorch's OutOfMemoryError. NCCL's has `'out of memory'` in quotes."""
_AMOUNT = r"([\d.]+ (?:bytes|[KMGTP]iB))"


@contextmanager
def gpu_phase(phase: Phase) -> Iterator[None]:
    """Raises GpuMemoryError instead of CUDA out of memory inside the block. Also a decorator.

    The error names the rank, the phase, the amounts and settings that need less. Other exceptions pass through. If
    blocks are nested, the error names the innermost phase.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise GpuMemoryError(f"{_rank()}{phase}", "needs more GPU memory", amounts(error), REMEDIES[phase]) from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception means that a GPU has no memory left, whichever library it comes from; False for None."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        any(words in text for words in _OTHER_MESSAGES) or ("NCCL" in text and "'out of memory'" in text)
    )


def amounts(error: BaseException) -> str:
    """Text on the memory asked for, held and free, as far as the error or PyTorch's allocator gives it.

    For instance `2.00 GiB asked, 70.10 GiB held and 1.50 GiB more reserved by PyTorch, 0.50 GiB free of 79.15 GiB`. If
    the error does not say what was asked for, the text begins with its first line instead.
    """
    text = str(error)
    asked = _match(rf"Tried to allocate {_AMOUNT}", text)
    held = _match(rf"{_AMOUNT} is allocated by PyTorch", text)
    reserved = _match(rf"{_AMOUNT} is reserved by PyTorch but unallocated", text)
    total, free = _match(rf"total capacity of {_AMOUNT}", text), _match(rf"of which {_AMOUNT} is free", text)
    allowed = _match(rf"{_AMOUNT} allowed", text)
    if not held:
        held, reserved, free, total = _current_usage()
    parts = [
        f"{asked} asked" if asked else first_line(error)[:200],
        f"{held} held and {reserved} more reserved by PyTorch" if held else "",
        f"{free} free of {total}" if total else "",
        f"{allowed} allowed to this process" if allowed else "",
    ]
    return ", ".join(part for part in parts if part)


def _current_usage() -> tuple[str, str, str, str]:
    """Memory held by this process, reserved but not held by it, free on its current GPU, and that GPU's total."""
    import torch

    if not torch.cuda.is_initialized():
        return "", "", "", ""
    held = torch.cuda.memory_allocated()
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # some CUDA errors make every later call fail
        return gib(held), gib(torch.cuda.memory_reserved() - held), "", ""
    return gib(held), gib(torch.cuda.memory_reserved() - held), gib(free), gib(total)


def gib(num_bytes: float) -> str:
    """A number of bytes as text in GiB, such as `12.34 GiB`."""
    return f"{num_bytes / 2**30:.2f} GiB"


def _rank() -> str:
    """`rank 3, ` inside a process group, else empty."""
    import torch.distributed as dist

    return f"rank {dist.get_rank()}, " if dist.is_available() and dist.is_initialized() else ""


def _match(pattern: str, text: str) -> str:
    """The first group of the first match of a pattern anywhere in a text; empty if there is none."""
    match = re.search(pattern, text)
    return match[1] if match else ""
