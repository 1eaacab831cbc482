"""Copies of GPU tensors in plain host memory, through a small page-locked buffer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from distill_rl.parallel.shards import local_part

BUFFER_BYTES = 64 * 2**20
"""Of both halves together. A copy of 32 MiB takes about a millisecond on PCIe, far more than launching it."""


@dataclass
class _Half:
    """One half of the buffer, and the destination of its content."""

    memory: Tensor
    target: Tensor | None = None
    done: torch.cuda.Event | None = None


class Staging:
    """Copies tensors of a GPU into pageable host memory, at the speed of page-locked memory.

    The driver copies straight into pageable memory at a fraction of the bus, and page-locking the whole copy would
    lock three times the size of the weights on the node. So each tensor goes in pieces through two page-locked halves:
    while the GPU fills one on a stream of its own, the host empties the other.

        gpu    ── piece 0 → A ─ piece 1 → B ─ piece 2 → A ─ …
        host            ─────── A → target ── B → target ── …

    On a CPU the same steps run with plain memory and without streams; product code clones there instead.

    Args:
        device: of the tensors.
        buffer_bytes: size of both halves together.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES):
        on_gpu = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._halves = [_Half(torch.empty(buffer_bytes // 2, dtype=torch.uint8, pin_memory=on_gpu)) for _ in range(2)]

    @torch.no_grad()
    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies of the tensors in pageable host memory, by name.

        A DTensor remains one on the same mesh, with its local part on the host. The copies include all work queued on
        the current stream before the call, and are complete when it returns: nothing queued afterwards (the next
        optimizer step) can change them.

        Args:
            tensors: contiguous, on `device` or on the CPU.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copies = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
        turn, size = 0, self._halves[0].memory.numel()
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for name, tensor in tensors.items():
                for source, target in zip(_bytes(tensor).split(size), _bytes(copies[name]).split(size)):
                    self._empty(self._halves[turn])
                    self._fill(self._halves[turn], source, target)
                    turn = 1 - turn
            for half in (self._halves[turn], self._halves[1 - turn]):
                self._empty(half)
        return copies

    def _fill(self, half: _Half, source: Tensor, target: Tensor) -> None:
        """Begins to copy `source` into an empty half (`_empty`), which must be large enough, and notes `target`."""
        half.memory[: source.numel()].copy_(source, non_blocking=True)
        half.target = target
        if self._stream is not None:
            half.done = self._stream.record_event()

    def _empty(self, half: _Half) -> None:
        """Waits until the half is filled, copies its content to the target, and marks it as empty.

        Nothing happens if it is empty already.
        """
        if half.target is None:
            return
        if half.done is not None:
            half.done.synchronize()
        half.target.copy_(half.memory[: half.target.numel()])
        half.target, half.done = None, None


def _bytes(tensor: Tensor) -> Tensor:
    """A flat uint8 view of a tensor's local part, which must be contiguous."""
    return local_part(tensor).detach().view(-1).view(torch.uint8)
