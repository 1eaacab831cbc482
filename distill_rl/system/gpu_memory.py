"""CUDA out of memory as one line: doing what, bytes asked and held, and the settings that would need less.

PyTorch's own text runs over several lines, names no setting, and is one of several: cuBLAS, cuDNN and NCCL, which
allocate beside PyTorch's allocator, have their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from distill_rl.errors import GpuMemoryError

Phase = Literal[
    "student load", "forward", "backward", "optimizer step", "checkpoint copy", "weight export",
    "teacher load", "teacher forward", "transport ring", "evaluation",
]  # fmt: skip

_SHARE_LESS = "ray.placement=disaggregated gives teachers GPUs of their own"
_PER_STEP = "lower train.micro_batch_size or data.max_length, or set student.activation_checkpointing=true"
REMEDIES: dict[Phase, str] = {
    "student load": f"raise student.parallel.dp or student.parallel.tp; {_SHARE_LESS}",
    "forward": _PER_STEP,
    "backward": _PER_STEP,
    "optimizer step": f"raise student.parallel.dp, over which its state is divided; {_PER_STEP}",
    "checkpoint copy": f"the training leaves too little beside it: {_PER_STEP}",
    "weight export": f"the training leaves too little beside it: {_PER_STEP}",
    "teacher load": f"raise teachers[].parallel.tp; {_SHARE_LESS}",
    "teacher forward": "lower teachers[].micro_batch_size (or train.micro_batch_size) or data.max_length",
    "transport ring": "lower prefetch.depth, prefetch.slots or loss.top_k, or set transport=object_store",
    "evaluation": "lower evaluate.batch_size (--batch-size), or raise evaluate.gpu_share",
}

_ELSEWHERE = (
    "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED", "CUDA_ERROR_OUT_OF_MEMORY",
)  # fmt: skip
"""What RuntimeErrors say that are not PyTorch's OutOfMemoryError; NCCL's has `'out of memory'` in quotes."""
_AMOUNT = r"([\d.]+ (?:bytes|[KMGTP]iB))"


@contextmanager
def gpu_phase(phase: Phase) -> Iterator[None]:
    """Raises GpuMemoryError in place of a CUDA out of memory inside the block. A decorator too.

    Nested, the innermost phase is the one that is named.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise GpuMemoryError(f"{_rank()}{phase}", "needs more GPU memory", amounts(error), REMEDIES[phase]) from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception says that a GPU has no memory left, whichever library it comes from."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        any(words in text for words in _ELSEWHERE) or ("NCCL" in text and "'out of memory'" in text)
    )


def amounts(error: BaseException) -> str:
    """Asked, held and free, as far as the error or PyTorch's allocator knows; for instance
    `2.00 GiB asked, 70.10 GiB held and 1.50 GiB reserved by PyTorch, 0.50 GiB free of 79.15 GiB`."""
    text = str(error)
    asked = _found(rf"Tried to allocate {_AMOUNT}", text)
    held = _found(rf"{_AMOUNT} is allocated by PyTorch", text)
    reserved = _found(rf"{_AMOUNT} is reserved by PyTorch but unallocated", text)
    total, free = _found(rf"total capacity of {_AMOUNT}", text), _found(rf"of which {_AMOUNT} is free", text)
    allowed = _found(rf"{_AMOUNT} allowed", text)
    if not held:
        held, reserved, free, total = _measured()
    parts = [
        f"{asked} asked" if asked else _first_line(text),
        f"{held} held and {reserved} more reserved by PyTorch" if held else "",
        f"{free} free of {total}" if total else "",
        f"{allowed} allowed to this process" if allowed else "",
    ]
    return ", ".join(part for part in parts if part)


def _measured() -> tuple[str, str, str, str]:
    """Held and reserved by this process, free and total on its current GPU; empty where CUDA is not in use."""
    import torch

    if not torch.cuda.is_initialized():
        return "", "", "", ""
    held = torch.cuda.memory_allocated()
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # after some errors of CUDA nothing works any more
        return gib(held), gib(torch.cuda.memory_reserved() - held), "", ""
    return gib(held), gib(torch.cuda.memory_reserved() - held), gib(free), gib(total)


def gib(num_bytes: float) -> str:
    """As `12.34 GiB`."""
    return f"{num_bytes / 2**30:.2f} GiB"


def _rank() -> str:
    """`rank 3, ` inside a process group."""
    import torch.distributed as dist

    return f"rank {dist.get_rank()}, " if dist.is_available() and dist.is_initialized() else ""


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["out of memory"])[0][:200]
