"""Slots in a GPU's memory, mapped by the readers' processes: a copy on the device, then views.

Words and rules are those of `shared_memory`; they speak of what the CPU has submitted. That the copy is done before it
is read, and the reading before the next copy, is for two events per slot and reader, recorded on the streams: the
writer's `written`, each reader's `finished`. Where the slots lie on a peer, a reader's kernels on them run on the peer's
stream of the reader's process: both that and the stream of its own GPU keep to the events.

A writer never waits on the CPU. A reader does, at both ends of its block, for as long as the writer lives and not
beyond a deadline (`gpu_wait`): before, so that it never queues kernels behind a copy which a dead writer's GPU will not
make; after, so that it knows the writer to have lived until its kernels were done.

A ring is one allocation, exported once per reader and imported once. Torch counts the importers of each export in a
word of its own that starts at one, so an export for two readers, or imported twice, would be freed too early.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from distill_rl.errors import TransportError
from distill_rl.system.gpu_memory import gpu_phase
from distill_rl.transport.base import Handle, Layout, Offer, Receipt, Ring, Slot, TensorSpec, describe
from distill_rl.transport.gpu_wait import ALIVE, has_ended, wait_for
from distill_rl.transport.place import expandable_segments, gpu_uuid
from distill_rl.transport.ring import (
    ALIGNMENT,
    SlotReader,
    SlotWriter,
    check_offer,
    check_reader,
    find_ring,
    place,
    round_up,
    state_bytes,
    unwritten,
)
from distill_rl.transport.segment import Address, Segment

_LEAST, _STEP = 10 << 20, 2 << 20
"""From 10 MiB on, in steps of 2 MiB, the allocator takes what is asked for and not more, so that nothing is left over."""
_DEVICE, _HANDLE, _OFFSET = 6, 7, 9
"""where the device, the memory's handle and the place in it stand among the arguments that torch rebuilds a tensor from"""


@dataclass(frozen=True)
class _Exported:
    """An offer's payload."""

    address: Address
    ring: Ring
    rebuild: tuple[Any, ...]
    written: tuple[bytes, ...]


@dataclass(frozen=True)
class _Own:
    control: Segment
    ring: Ring
    writer: SlotWriter
    buffer: Tensor
    pool: torch.cuda.MemPool
    """that nothing but the buffer comes from"""
    written: list[torch.cuda.Event]
    finished: dict[int, list[torch.cuda.Event]] = field(default_factory=dict)
    """per reader that was accepted"""


@dataclass(frozen=True)
class _Open:
    nonce: bytes
    control: Segment
    ring: Ring
    reader: SlotReader
    buffer: Tensor
    written: list[torch.cuda.Event]
    finished: list[torch.cuda.Event]
    process: int
    """a descriptor of the writer's process"""

    def streams(self, own: torch.device) -> list[torch.cuda.Stream]:
        """Of the reader's own GPU, then of the writer's if that is another: where kernels on the views run."""
        return [torch.cuda.current_stream(device) for device in dict.fromkeys((own, self.buffer.device))]

    def require_writer(self, slot: str, rule: str) -> None:
        if has_ended(self.process):
            raise TransportError(slot, rule, "a writer that died")

    def close(self) -> None:
        self.control.close()
        os.close(self.process)


class CudaIpcTransport:
    """A ring that this process writes, or those of others on the same GPU or its peers.

    Args:
        ring: what to write; None for a side that only reads.
        source: the ring's name.
        node_id: of this process; readers elsewhere are refused.
        device: the GPU of this process's model. Fetched views lie on the writer's.
        deadline_s: how long a fetch may wait for the GPU, before its block and after it.

    Raises:
        TransportError: there is no GPU, or its allocator's memory cannot be shared.
    """

    name = "cuda_ipc"

    def __init__(
        self,
        ring: Ring | None = None,
        *,
        source: str = "",
        node_id: str = "",
        device: torch.device | str = "cuda",
        deadline_s: float,
    ):
        _check_device(torch.device(device))
        self._deadline_s = deadline_s
        self._device, self._source, self._node_id = _with_index(torch.device(device)), source, node_id
        self._uuid = gpu_uuid(_index(self._device))
        self._opened: dict[str, _Open] = {}
        self._own = None if ring is None else _make_ring(ring, self._device)

    def offer(self, reader: int) -> Offer:
        own = self._writing_side()
        check_reader(own.ring, reader, self._source)
        exported = _Exported(
            own.control.address, own.ring, _export(own.buffer), tuple(event.ipc_handle() for event in own.written)
        )
        return Offer(self.name, self._source, self._node_id, self._uuid, reader, exported)

    def open(self, offer: Offer) -> Receipt:
        check_offer(offer, self.name, self._node_id)
        what = f"ring of {offer.source or 'a writer'}"
        exported: _Exported = offer.payload
        if exported.address.pid == os.getpid():
            raise TransportError(what, "its memory is this process's own", remedy="use transport local inside one")
        local = _local_device(offer.device, what)
        if (replaced := self._opened.pop(offer.source, None)) is not None:
            replaced.close()
        try:
            opened = _open_ring(exported, local, offer.reader, self._device, what)
        except (OSError, RuntimeError) as error:
            raise TransportError(what, "its GPU memory must open here", _first_line(error)) from error
        self._opened[offer.source] = opened
        return Receipt(offer.reader, (self._uuid, tuple(event.ipc_handle() for event in opened.finished)))

    def accept(self, receipt: Receipt) -> None:
        uuid, handles = receipt.payload
        device = _local_device(uuid, f"events of reader {receipt.reader}")
        events = [torch.cuda.Event.from_ipc_handle(device, handle) for handle in handles]
        self._writing_side().finished[receipt.reader] = events

    def publish(self, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        own, specs = self._writing_side(), describe(tensors)
        if unknown := set(own.writer.readers_of(slot.index)) - own.finished.keys():
            rule = "receipts of its readers must be accepted before it is written again"
            raise TransportError(f"slot {slot.index}", rule, f"none of {sorted(unknown)}")
        with own.writer.writing(slot, specs, layout), torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            for events in own.finished.values():
                stream.wait_event(events[slot.index])
            views = _views(own.buffer, own.ring, slot.index, specs)
            for name, tensor in tensors.items():
                views[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            own.written[slot.index].record(stream)
        payload = (self._source, own.control.address.nonce)
        return Handle(self.name, self._node_id, self._uuid, slot, layout, specs, payload)

    @contextmanager
    def fetch(self, handle: Handle) -> Iterator[dict[str, Tensor]]:
        opened, index = find_ring(self._opened, handle), handle.slot.index
        slot = f"slot {index}"
        opened.require_writer(slot, ALIVE)  # the driver may give a dead one's memory to others at any time
        with opened.reader.reading(handle):
            self._wait_for(opened.written[index], opened, f"{slot} is written")
            for stream in opened.streams(self._device):
                stream.wait_event(opened.written[index])  # done by now; the streams must still see what it wrote
            with unwritten(_views(opened.buffer, opened.ring, index, handle.tensors), handle.slot) as views:
                yield views
            own, *peers = opened.streams(self._device)
            for peer in peers:
                own.wait_stream(peer)
            opened.finished[index].record(own)  # an event of the own GPU, which no stream of another can record
            self._wait_for(opened.finished[index], opened, f"{slot} is read")
            opened.require_writer(slot, "its writer must live until it was read")  # else nobody knows what was read

    def release(self, slot: Slot) -> None:
        if self._own is not None:
            self._own.writer.release(slot)

    def close(self) -> None:
        """To be called by readers first: a writer's memory must outlive what maps it."""
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()
        if self._own is not None:
            self._own.control.close()
            self._own = None
        torch.cuda.ipc_collect()

    def _wait_for(self, event: torch.cuda.Event, opened: _Open, what: str) -> None:
        wait_for(event, opened.process, deadline_s=self._deadline_s, what=what)

    def _writing_side(self) -> _Own:
        if self._own is None:
            raise TransportError(f"transport {self.name}", "this side has no ring to write, or has closed it")
        return self._own


def _make_ring(ring: Ring, device: torch.device) -> _Own:
    if variable := expandable_segments(os.environ):
        raise TransportError(
            "transport cuda_ipc", f"{variable} turns expandable segments on, whose memory cannot be shared",
            remedy=f"take expandable_segments out of {variable}, or use transport=object_store",
        )  # fmt: skip
    with ExitStack() as undo:
        control = Segment.create(round_up(state_bytes(ring), 4096))
        undo.callback(control.close)
        pool, buffer = _allocate(ring.num_slots * _slot_stride(ring), device)
        own = _Own(
            control, ring, SlotWriter(control.words, ring), buffer, pool, written=_events(ring.num_slots, device)
        )
        undo.pop_all()
    return own


@gpu_phase("transport ring")
def _allocate(size: int, device: torch.device) -> tuple[torch.cuda.MemPool, Tensor]:
    """An allocation that holds nothing else, as readers map all of it; the pool keeps it so."""
    torch.cuda.empty_cache()  # for lack of memory a pool gives back only what is its own
    with torch.inference_mode(False), torch.cuda.device(device):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool, device):
            buffer = torch.empty(max(round_up(size, _STEP), _LEAST), dtype=torch.uint8, device=device)
    check_alone(torch.cuda.memory_snapshot(), buffer.data_ptr())
    return pool, buffer


def _open_ring(exported: _Exported, local: torch.device, reader: int, own: torch.device, what: str) -> _Open:
    """Maps a writer's ring, on GPU `local`, for a reader whose stream is on GPU `own`."""
    with ExitStack() as undo:
        control = Segment.attach(exported.address, what)
        undo.callback(control.close)
        process = os.pidfd_open(exported.address.pid)
        undo.callback(os.close, process)
        ring = exported.ring
        opened = _Open(
            nonce=exported.address.nonce,
            control=control,
            ring=ring,
            reader=SlotReader(control.words, ring, reader),
            buffer=_import(exported.rebuild, local),
            written=[torch.cuda.Event.from_ipc_handle(local, handle) for handle in exported.written],
            finished=_events(ring.num_slots, own),
            process=process,
        )
        undo.pop_all()
    return opened


def _export(buffer: Tensor) -> tuple[Any, ...]:
    """What one reader rebuilds the buffer from."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    check_export(arguments)
    return arguments


def check_alone(segments: Sequence[Mapping[str, Any]], address: int) -> None:
    """Raises TransportError unless the block at `address` is a whole segment of the allocator's `memory_snapshot`."""
    blocks = next((each["blocks"] for each in segments if each["address"] == address), None)
    if blocks is None or len(blocks) > 1:
        raise _not_alone("a part of a larger one" if blocks is None else f"one of {len(blocks)} blocks")


def check_export(arguments: Sequence[Any]) -> None:
    """Raises TransportError unless the arguments are of a whole allocation that another process can map."""
    if (kind := arguments[_HANDLE][1:2]) != b"c":  # "e": expandable segments, turned on in the program
        raise TransportError(
            "transport cuda_ipc",
            "the buffer must be memory of cudaMalloc",
            f"an allocation of kind {kind!r}",
            "turn expandable segments off, or use transport=object_store",
        )
    if offset := arguments[_OFFSET]:
        raise _not_alone(f"the part from byte {offset} of a larger one")


def _not_alone(found: str) -> TransportError:
    return TransportError(
        "transport cuda_ipc",
        "a ring must be an allocation of its own, because readers map all of what it lies in",
        found,
        "use transport=object_store",
    )


def _import(arguments: tuple[Any, ...], device: torch.device) -> Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    here = (*arguments[:_DEVICE], _index(device), *arguments[_DEVICE + 1 :])
    with torch.inference_mode(False), torch.cuda.device(device):
        return rebuild_cuda_tensor(*here)


def _events(count: int, device: torch.device) -> list[torch.cuda.Event]:
    """Events that other processes can wait for; recorded once, because an event has a handle only then."""
    with torch.cuda.device(device):
        events = [torch.cuda.Event(interprocess=True) for _ in range(count)]
        for event in events:
            event.record(torch.cuda.current_stream(device))
    return events


def _slot_stride(ring: Ring) -> int:
    return round_up(ring.slot_bytes, ALIGNMENT)


def _views(buffer: Tensor, ring: Ring, index: int, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    start = index * _slot_stride(ring)
    offsets, _ = place(specs)
    with torch.inference_mode(False):
        return {spec.name: _view(buffer, start + offset, spec) for spec, offset in zip(specs, offsets)}


def _view(buffer: Tensor, offset: int, spec: TensorSpec) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if not prod(spec.shape):
        return torch.empty(spec.shape, dtype=dtype, device=buffer.device)
    # `.data`: a count of writes of its own, where plain views of one buffer would share theirs
    return buffer[offset : offset + spec.num_bytes].view(dtype).view(spec.shape).data


def _check_device(device: torch.device) -> None:
    if device.type != "cuda" or not torch.cuda.is_available():
        raise TransportError("transport cuda_ipc", "needs a GPU", str(device), "use transport=auto")
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        raise TransportError(
            "transport cuda_ipc", "needs torch's own allocator", backend, "take backend out of PYTORCH_ALLOC_CONF"
        )


def _with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _index(device: torch.device) -> int:
    assert device.index is not None
    return device.index


def _local_device(uuid: str, what: str) -> torch.device:
    """The GPU of that UUID as this process counts them."""
    for index in range(torch.cuda.device_count()):
        if gpu_uuid(index) == uuid:
            return torch.device("cuda", index)
    raise TransportError(what, f"GPU {uuid} must be visible", remedy="see CUDA_VISIBLE_DEVICES")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
