"""What processes share of a GPU: an allocation, and events. Waiting for an event of a process that may die.

An allocation is exported once per importer and imported once. Torch counts the importers of an export in a word that
starts at one, so an export used by two readers, or imported twice, would be freed too early.
"""

from __future__ import annotations

import select
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from distill_rl.errors import TransportError
from distill_rl.system.gpu_memory import gpu_phase
from distill_rl.transport.ring import round_up

ALIVE = "its writer must live while it is read"
"""The rule in the message about a writer that died."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
"""Pauses between two queries of an event double from the first to the longest. Most are reached already, or in milliseconds."""
_LEAST, _STEP = 10 << 20, 2 << 20
"""From 10 MiB on, in steps of 2 MiB, the allocator takes exactly what is requested, so that nothing is left over."""
_DEVICE, _HANDLE, _OFFSET = 6, 7, 9
"""Positions of the device, the memory's handle and the offset among the arguments that torch rebuilds a tensor from."""


def buffer_bytes(size: int) -> int:
    """The size of a buffer for `size` bytes, which the allocator takes exactly: a multiple of 2 MiB, and at least 10 MiB."""
    return max(round_up(size, _STEP), _LEAST)


@gpu_phase("transport ring")
def allocate(size: int, device: torch.device) -> tuple[torch.cuda.MemPool, Tensor]:
    """Allocates a uint8 buffer in a new memory pool, and returns the pool and the buffer.

    Readers map its whole allocation, so nothing else may be in it; for that, the caller must keep the pool as long as the
    buffer. Empties the allocator's cache first.

    Args:
        size: in bytes, from `buffer_bytes`.

    Raises:
        TransportError: the buffer is not a whole allocation.
        GpuMemoryError: the GPU has too little memory.
    """
    torch.cuda.empty_cache()  # if memory is short, a pool gives back only its own
    with torch.inference_mode(False), torch.cuda.device(device):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool, device):
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
    check_alone(torch.cuda.memory_snapshot(), buffer.data_ptr())
    return pool, buffer


def export_buffer(buffer: Tensor) -> tuple[Any, ...]:
    """Exports the buffer for one reader, and returns the arguments from which that reader rebuilds it (`import_buffer`).

    Raises:
        TransportError: the buffer is not a whole allocation that can be shared.
    """
    _, arguments = reduce_tensor(buffer)
    check_export(arguments)
    return arguments


def check_alone(segments: Sequence[Mapping[str, Any]], address: int) -> None:
    """Raises TransportError unless the block at `address` is a whole segment of the allocator.

    Args:
        segments: `torch.cuda.memory_snapshot()`.
        address: of the block's first byte.
    """
    blocks = next((segment["blocks"] for segment in segments if segment["address"] == address), None)
    if blocks is None or len(blocks) > 1:
        raise _not_alone("a part of a larger one" if blocks is None else f"one of {len(blocks)} blocks")


def check_export(arguments: Sequence[Any]) -> None:
    """Raises TransportError unless the arguments describe a whole allocation that another process can map.

    Args:
        arguments: those that torch's `reduce_tensor` gives for a tensor on a GPU.
    """
    if (kind := arguments[_HANDLE][1:2]) != b"c":  # "e": expandable segments, turned on inside the program
        raise TransportError(
            "transport cuda_ipc",
            "the buffer must be memory of cudaMalloc",
            f"an allocation of kind {kind!r}",
            "turn expandable segments off, or use transport=object_store",
        )
    if offset := arguments[_OFFSET]:
        raise _not_alone(f"the part from byte {offset} of a larger one")


def _not_alone(value: str) -> TransportError:
    """The error for a ring that shares its allocation; `value` says what it is instead. It is not raised here."""
    return TransportError(
        "transport cuda_ipc",
        "a ring must be an allocation of its own, because readers map the whole allocation",
        value,
        "use transport=object_store",
    )


def import_buffer(arguments: tuple[Any, ...], device: torch.device) -> Tensor:
    """The buffer of another process, rebuilt from `export_buffer`'s arguments on the device that it has in this process."""
    here = (*arguments[:_DEVICE], device.index, *arguments[_DEVICE + 1 :])
    with torch.inference_mode(False), torch.cuda.device(device):
        return rebuild_cuda_tensor(*here)


def shared_events(count: int, device: torch.device) -> list[torch.cuda.Event]:
    """`count` events on this GPU that other processes can wait for.

    They are recorded once on the current stream, because an event has no handle before.
    """
    with torch.cuda.device(device):
        events = [torch.cuda.Event(interprocess=True) for _ in range(count)]
        for event in events:
            event.record(torch.cuda.current_stream(device))
    return events


def has_ended(process: int) -> bool:
    """Whether the process behind this file descriptor (`os.pidfd_open`) has ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def wait_for(event: torch.cuda.Event, writer: int, *, deadline_s: float, what: str) -> None:
    """Returns once the GPU has reached `event`. Unlike `event.synchronize()`, it also ends if that never happens.

    Args:
        writer: file descriptor (`os.pidfd_open`) of the process whose memory is read. If it dies, its GPU work ends,
            and an event behind that work may never be reached.
        deadline_s: how long to wait, in seconds.
        what: what the event marks, for messages (`slot 3 is read`).

    Raises:
        TransportError: the writer has ended, or the deadline has passed, before the event was reached.
    """
    deadline, pause = time.monotonic() + deadline_s, _FIRST_PAUSE_S
    while not event.query():
        if has_ended(writer):
            raise TransportError(what.partition(" is ")[0], ALIVE, "a writer that died")
        if time.monotonic() > deadline:
            rule = f"must get to the point where {what} within {deadline_s:g} s"
            remedy = "raise ray.step_timeout_s, or check with nvidia-smi and dmesg whether the GPU hangs"
            raise TransportError("the GPU", rule, "no answer", remedy)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
