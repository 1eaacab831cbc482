"""Slots in a GPU's memory, mapped into the readers' processes: one copy on the device to write, none to read.

Words and rules are those of every ring (`ring.py`), but they only order what the CPUs submit. Two kinds of interprocess
events order what the GPUs do:

    written[slot]           recorded by the writer after its copy; readers' streams wait for it before they read
    finished[reader][slot]  recorded by a reader after its block; the writer's stream waits for it before it writes

Where the slots are on a peer GPU, a reader's kernels on them run on the reader's stream of that GPU, so both that
stream and the stream of the reader's own GPU observe the events.

The writer's CPU never waits. A reader's CPU waits at both ends of its block, as long as the writer lives and no longer
than a deadline (`wait_for`). Before the block, so that no kernels are queued behind a copy that a dead writer's GPU
will never make. After it, so that the writer is known to have lived until the reader's kernels were done.

A ring is one allocation, exported once per reader and imported once. Torch never frees
that allocation once a reader has been killed, so the ring for new readers reuses the memory of the one before.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from distill_rl.errors import TransportError, first_line
from distill_rl.system.gpu_memory import gpu_phase
from distill_rl.transport import ring as rings
from distill_rl.transport.base import Handle, Layout, Offer, Receipt, Ring, Slot, expandable_segments, gpu_uuid
from distill_rl.transport.segment import Address, Segment

# What processes share of a GPU: an allocation, and events. Waiting for an event of a process that may die.
#
# An allocation is exported once per importer and imported once. Torch counts the importers of an export in a word that
# starts at one, so an export used by two readers, or imported twice, would be freed too early.

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
    return max(rings.round_up(size, _STEP), _LEAST)


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
        rule, value = "the buffer must be memory of cudaMalloc", f"an allocation of kind {kind!r}"
        remedy = "turn expandable segments off, or use transport=object_store"
        raise TransportError("transport cuda_ipc", rule, value, remedy)
    if offset := arguments[_OFFSET]:
        raise _not_alone(f"the part from byte {offset} of a larger one")


def _not_alone(value: str) -> TransportError:
    """The error for a ring that shares its allocation; `value` says what it is instead. It is not raised here."""
    rule = "a ring must be an allocation of its own, because readers map the whole allocation"
    return TransportError("transport cuda_ipc", rule, value, "use transport=object_store")


def import_buffer(arguments: tuple[Any, ...], device: torch.device) -> Tensor:
    """The buffer of another process, rebuilt from `reduce_tensor`'s arguments on the device that it has in this process."""
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


_Memory = tuple[torch.cuda.MemPool, Tensor]
"""A buffer, and the pool that holds nothing else."""


@dataclass(frozen=True)
class _Exported:
    """An offer's payload."""

    address: Address
    ring: Ring
    rebuild: tuple[Any, ...]
    written: tuple[bytes, ...]
    """Handles of the `written` events."""


@dataclass(frozen=True, kw_only=True)
class _Written(rings.WrittenRing):
    control: Segment
    """The ring's words."""
    pool: torch.cuda.MemPool
    """Holds nothing but the buffer."""
    written: list[torch.cuda.Event]
    finished: dict[int, list[torch.cuda.Event]] = field(default_factory=dict)
    """By reader, from the moment its receipt is accepted."""


@dataclass(frozen=True, kw_only=True)
class _Opened(rings.OpenedRing):
    control: Segment
    written: list[torch.cuda.Event]
    finished: list[torch.cuda.Event]
    process: int
    """File descriptor of the writer's process."""

    def streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        """Returns the current stream of the reader's GPU and then, if the ring is on another GPU, that of the ring's.

        Kernels on the ring's views run on these streams.

        Args:
            device: the reader's GPU.
        """
        return [torch.cuda.current_stream(gpu) for gpu in dict.fromkeys((device, self.buffer.device))]

    def require_writer(self, slot: str, rule: str) -> None:
        """Raises TransportError, with these parts of its message, if the writer's process has ended."""
        if has_ended(self.process):
            raise TransportError(slot, rule, "a writer that died")

    def close(self) -> None:
        """Lets go of the ring's words and closes `process`. The slots stay mapped as long as their tensors exist."""
        self.control.close()
        os.close(self.process)


class CudaIpcTransport(rings.RingTransport[_Written, _Opened]):
    """Writes one ring, or reads those of other processes on the same GPU or its peers.

    Args:
        ring: the ring to write; None for a side that only reads.
        source: name of the ring.
        node_id: node of this process; offers from other nodes are refused.
        device: the GPU of this process's model. Fetched views are on the writer's.
        deadline_s: seconds that a fetch may wait for the GPU, before its block and again after it.
        earlier: the ring that this process has written so far. It is closed, and its memory is used again if its size is right;
            its readers must have ended or closed it.

    Raises:
        TransportError: there is no GPU, its allocator's memory cannot be shared, or there is too little shared memory
            for the ring's words.
        GpuMemoryError: the GPU has too little memory for the ring.
    """

    name = "cuda_ipc"

    def __init__(
        self,
        ring: Ring | None = None,
        *,
        source: str = "",
        node_id: str = "",
        device: str = "cuda",
        deadline_s: float,
        earlier: CudaIpcTransport | None = None,
    ):
        memory = None if earlier is None else earlier._release_memory(ring)
        gpu = torch.device(device)
        if gpu.type != "cuda" or not torch.cuda.is_available():
            raise TransportError("transport cuda_ipc", "needs a GPU", device, "use transport=auto")
        if (backend := torch.cuda.get_allocator_backend()) != "native":
            rule, remedy = "needs torch's own allocator", "take backend out of PYTORCH_ALLOC_CONF"
            raise TransportError("transport cuda_ipc", rule, backend, remedy)
        self._deadline_s = deadline_s
        index = torch.cuda.current_device() if gpu.index is None else gpu.index
        self._device = torch.device("cuda", index)
        written = None if ring is None else _make_ring(ring, self._device, memory)
        super().__init__(written, source, node_id, gpu_uuid(index))

    def open(self, offer: Offer) -> Receipt:
        """Maps the ring of an offer; the receipt carries the events that this reader records when it has read a slot.

        Open each offer only once; this is not checked. An earlier ring of the same source is closed.

        Raises:
            TransportError: another transport, node or user, or a GPU that is not visible; the writer is gone, or is
                this process.
        """
        super().open(offer)
        finished = self._opened[offer.source].finished
        return Receipt(offer.reader, (self._device_name, tuple(event.ipc_handle() for event in finished)))

    def accept(self, receipt: Receipt) -> None:
        """Opens the events of a reader, so that later writes wait on the GPU until it has read.

        Raises:
            TransportError: the reader's GPU is not visible here, or this side writes no ring.
        """
        uuid, handles = receipt.payload
        device = _local_device(uuid, f"events of reader {receipt.reader}")
        events = [torch.cuda.Event.from_ipc_handle(device, handle) for handle in handles]
        self._writing_side().finished[receipt.reader] = events

    def publish(self, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        """Queues the copy of the tensors into the slot on this GPU's current stream, and returns a handle at once.

        On the GPU, the copy waits until the readers have read the slot's previous content.

        Raises:
            TransportError: as for `Transport.publish`; the receipt of a reader of the slot's previous content was not
                accepted; this side writes no ring.
        """
        written = self._writing_side()
        if unknown := set(written.readers_of(slot.index)) - written.finished.keys():
            rule = "the receipts of its readers must be accepted before it is written again"
            raise TransportError(f"slot {slot.index}", rule, f"none of {sorted(unknown)}")
        return super().publish(slot, tensors, layout)

    @contextmanager
    def fetch(self, handle: Handle) -> Iterator[dict[str, Tensor]]:
        """Gives a `with` block the tensors on the writer's GPU by name, without a copy; read-only, valid inside only.

        Waits on the CPU until the slot is written and, at the end of the block, until the GPU work that the block has
        queued on the current streams is done. The slot is then acknowledged, unless the block fails.

        Raises:
            TransportError: as for `Transport.fetch`; the writer has died; a wait took longer than the deadline.
        """
        opened, index = self._ring_of(handle), handle.slot.index
        slot = f"slot {index}"
        opened.require_writer(slot, ALIVE)  # the driver may give a dead writer's memory to others at any time
        with opened.reading(handle):
            wait_for(opened.written[index], opened.process, deadline_s=self._deadline_s, what=f"{slot} is written")
            for stream in opened.streams(self._device):
                stream.wait_event(opened.written[index])  # reached by now; it makes the copy visible to the stream
            with rings.unwritten(opened.views(index, handle.tensors), handle.slot) as views:
                yield views
            stream, *peers = opened.streams(self._device)
            for peer in peers:
                stream.wait_stream(peer)
            opened.finished[index].record(stream)  # the event belongs to this GPU; no other GPU's stream can record it
            wait_for(opened.finished[index], opened.process, deadline_s=self._deadline_s, what=f"{slot} is read")
            opened.require_writer(slot, "its writer must live until it was read")  # or the views may have been reused

    def close(self) -> None:
        """Closes all rings that this side has opened or writes; the transport is unusable afterwards.

        Readers must be closed before their writer, whose memory must outlive their mappings of it.
        """
        for opened in self._opened.values():
            opened.close()
        if self._written is not None:
            self._written.control.close()
        super().close()
        torch.cuda.ipc_collect()

    def _release_memory(self, ring: Ring | None) -> _Memory | None:
        """Closes this side, and returns the memory of the ring that it wrote if it has the size of `ring`; other memory is let go."""
        written = self._written
        self.close()
        if written is None or ring is None or written.buffer.nbytes != _buffer_bytes(ring):
            return None
        return written.pool, written.buffer

    def _payload(self, written: _Written) -> _Exported:
        """Returns what one reader needs to open the ring: the address of its words, its sizes and IPC handles."""
        _, arguments = reduce_tensor(written.buffer)
        check_export(arguments)
        events = tuple(event.ipc_handle() for event in written.written)
        return _Exported(written.control.address, written.ring, arguments, events)

    def _attach(self, offer: Offer) -> _Opened:
        """Maps the ring of an offer, after closing an earlier one of the same source."""
        exported: _Exported = offer.payload
        if exported.address.pid == os.getpid():
            rule = "its memory must be another process's"
            raise TransportError(offer.ring_name, rule, "this process's own", "use transport local inside one process")
        gpu = _local_device(offer.device, offer.ring_name)
        if (replaced := self._opened.pop(offer.source, None)) is not None:
            replaced.close()
        try:
            return _open_ring(exported, offer, gpu, self._device)
        except (OSError, RuntimeError) as error:
            raise TransportError(offer.ring_name, "its GPU memory must open here", first_line(error)) from error

    def _copy(self, written: _Written, index: int, views: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Queues the copy on this GPU's current stream and records the slot's `written` event after it."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            for events in written.finished.values():
                stream.wait_event(events[index])
            super()._copy(written, index, views, tensors)
            written.written[index].record(stream)


def _buffer_bytes(ring: Ring) -> int:
    return buffer_bytes(ring.num_slots * rings.slot_stride(ring))


def _make_ring(ring: Ring, device: torch.device, memory: _Memory | None) -> _Written:
    """Allocates the words of a ring in shared memory and its slots on the GPU, and creates its `written` events."""
    if variable := expandable_segments(os.environ):
        rule = f"{variable} turns expandable segments on, whose memory cannot be shared"
        remedy = f"take expandable_segments out of {variable}, or use transport=object_store"
        raise TransportError("transport cuda_ipc", rule, remedy=remedy)
    with ExitStack() as undo:
        control = Segment.create(rings.state_bytes(ring))
        undo.callback(control.close)
        pool, buffer = memory or allocate(_buffer_bytes(ring), device)
        events = shared_events(ring.num_slots, device)
        written = _Written(**rings.words_of(control, ring), control=control, buffer=buffer, pool=pool, written=events)
        undo.pop_all()
    return written


def _open_ring(exported: _Exported, offer: Offer, gpu: torch.device, reader_gpu: torch.device) -> _Opened:
    """Maps a writer's ring, which is on `gpu`, and creates the events of a reader whose stream is on `reader_gpu`."""
    with ExitStack() as undo:
        control = Segment.attach(exported.address, offer.ring_name)
        undo.callback(control.close)
        process = os.pidfd_open(exported.address.pid)
        undo.callback(os.close, process)
        opened = _Opened(
            **rings.words_of(control, exported.ring),
            reader=offer.reader,
            control=control,
            buffer=import_buffer(exported.rebuild, gpu),
            written=[torch.cuda.Event.from_ipc_handle(gpu, handle) for handle in exported.written],
            finished=shared_events(exported.ring.num_slots, reader_gpu),
            process=process,
        )
        undo.pop_all()
    return opened


def _local_device(uuid: str, what: str) -> torch.device:
    """The GPU with this UUID, by the index it has in this process."""
    for index in range(torch.cuda.device_count()):
        if gpu_uuid(index) == uuid:
            return torch.device("cuda", index)
    raise TransportError(what, f"GPU {uuid} must be visible", remedy="see CUDA_VISIBLE_DEVICES")
