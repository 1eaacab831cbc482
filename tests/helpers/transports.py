"""Transports for tests: each side in a process of its own, or all in this one.

    stage = Stage("shared_memory", [Process(), Process()])
    writer, reader = stage.writer(Ring(3, 4096)), stage.reader()
    stage.connect(writer, reader)
    handle = writer.publish(Slot(0, 2), tensors, layout)
    assert reader.read(handle).keys() == tensors.keys()

A `Side` runs the test's requests in its process; a `Process` (or a Ray actor) is a Side elsewhere. Errors are raised here.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout, Offer, Place, Receipt, Ring, Slot, place_of
from distill_rl.transport.choose import make

DEADLINE_S = 60.0


class Side:
    """The transports of one process, by number."""

    def __init__(self) -> None:
        self._transports: dict[int, Any] = {}
        self._blocks: dict[int, ExitStack] = {}
        self._views: dict[int, dict[str, Tensor]] = {}
        self._means: list[Tensor] = []
        self._held: list[Tensor] = []

    def make(self, number: int, name: str, device: str, backing: str, arguments: Mapping[str, Any]) -> None:
        if backing == "file":
            from distill_rl.transport.shared_memory import SharedMemoryTransport

            self._transports[number] = SharedMemoryTransport(**arguments, backing="file")
        else:
            earlier = self._transports.pop(arguments.get("earlier"), None)
            arguments = {**arguments, "earlier": earlier}
            self._transports[number] = make(name, deadline_s=DEADLINE_S, device=device, **arguments)

    def call(self, number: int, method: str, *arguments: Any) -> Any:
        """A method of the transport itself."""
        return getattr(self._transports[number], method)(*arguments)

    def publish(self, number: int, device: str, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        moved = {name: tensor.to(device) for name, tensor in tensors.items()}
        return self._transports[number].publish(slot, moved, layout)

    def read(self, number: int, handle: Handle) -> dict[str, Tensor]:
        """The content as it was inside the block."""
        with self._transports[number].fetch(handle) as tensors:
            return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

    def begin(self, number: int, handle: Handle) -> None:
        """Enters a block that stays open until `end`."""
        stack = self._blocks[number] = ExitStack()
        self._views[number] = stack.enter_context(self._transports[number].fetch(handle))

    def look(self, number: int) -> dict[str, Tensor]:
        """What the views of the open block show now."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._views[number].items()}

    def end(self, number: int) -> None:
        del self._views[number]
        self._blocks.pop(number).close()

    def close_with_live_views(self, number: int) -> dict[str, Tensor]:
        """Closes the transport inside an open block; what its views show afterwards."""
        self._transports.pop(number).close()
        seen = self.look(number)
        del self._views[number], self._blocks[number]
        return seen

    def write_to_view(self, number: int, handle: Handle, name: str, part: slice, inference: bool) -> None:
        with self._transports[number].fetch(handle) as tensors, torch.inference_mode(inference):
            tensors[name][part].add_(1)

    def fail_inside(self, number: int, handle: Handle) -> None:
        with self._transports[number].fetch(handle):
            raise KeyError("of the reader's own")

    def publish_half_and_die(self, number: int, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        """Is killed by the kernel when all tensors but the last are written."""
        self._transports[number].publish(slot, _Fatal(tensors), layout)

    def place(self, device: str, node_id: str) -> Place:
        return place_of(torch.device(device), node_id)

    def device_memory_of_fetch(self, number: int, handle: Handle) -> int:
        """Bytes of GPU memory that this process takes while it looks at the content."""
        before = torch.cuda.memory_allocated()
        with self._transports[number].fetch(handle):
            return torch.cuda.memory_allocated() - before

    def reserved_gpu_memory(self, number: int) -> int:
        """Bytes of GPU memory that torch has taken in this process."""
        return torch.cuda.memory_reserved()

    def hold_gpu_memory(self, num_bytes: int) -> None:
        """Takes a block of the allocator's, and leaves the rest of what that is cut from to others."""
        self._held.append(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))

    def publish_later(self, number: int, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        """Hands the handle out before the GPU has written the content: its stream is busy with something else first."""
        moved = {name: tensor.cuda() for name, tensor in tensors.items()}
        torch.cuda._sleep(200_000_000)
        return self._transports[number].publish(slot, moved, layout)

    def values_in_pieces(self, number: int, handle: Handle) -> list[float]:
        """Which values the content has, seen by a kernel that puts pieces of it together."""
        with self._transports[number].fetch(handle) as tensors:
            return torch.cat(tensors["x"].chunk(2)).unique().tolist()

    def mean_later(self, number: int, handle: Handle) -> None:
        """Leaves the block before the GPU has read the content: its stream is busy with something else first."""
        with self._transports[number].fetch(handle) as tensors:
            torch.cuda._sleep(20_000_000)
            self._means.append(tensors["x"].mean())

    def means(self) -> list[float]:
        """What `mean_later` saw, in order."""
        seen, self._means = [float(value) for value in self._means], []
        return seen

    def pour(self, number: int, address: str, slots: int, size: int) -> None:
        """Publishes as fast as a reader in `drink` permits, until the reader is gone."""
        with Listener(address) as listener:
            Path(f"{address}-listens").touch()  # the socket's file exists before anybody listens
            with listener.accept() as reader:
                for turn in itertools.count():
                    slot, tensors = Slot(turn % slots, 2 * turn + 2), {"x": torch.full((size,), turn)}
                    handle = self._transports[number].publish(slot, tensors, Layout(0, 1, size))
                    try:
                        reader.send(handle)
                        if turn >= slots - 1:
                            reader.recv()
                    except (EOFError, OSError):
                        return
        raise AssertionError("unreachable")

    def drink(self, number: int, address: str) -> tuple[int, list[int]]:
        """Reads what `pour` publishes until it is gone; how much, and which of it was not of one piece."""
        torn = []
        with Client(address) as writer:
            Path(f"{address}-met").touch()
            for turn in itertools.count():
                try:
                    handle = writer.recv()
                    with self._transports[number].fetch(handle) as tensors:
                        if not bool((tensors["x"] == turn).all()):
                            torn.append(turn)
                    writer.send(turn)
                except (EOFError, OSError):
                    return turn, torn
                except TransportError as error:
                    if "must live while it is read" not in str(error):
                        raise
                    return turn, torn
        raise AssertionError("unreachable")

    def close(self, number: int) -> None:
        block = self._blocks.pop(number, None)
        self._views.pop(number, None)
        if block is not None:
            with contextlib.suppress(Exception):
                block.close()
        transport = self._transports.pop(number, None)
        if transport is not None:
            transport.close()

    def pid(self) -> int:
        return os.getpid()

    def references(self) -> int:
        """Objects of Ray's that this process knows."""
        from ray._private.worker import global_worker

        return len(global_worker.core_worker.get_all_reference_counts())

    def footprint(self) -> tuple[int, int]:
        """(bytes of memory that are this process's alone, open file descriptors)."""
        process = psutil.Process()
        return process.memory_full_info().uss, process.num_fds()


class _Fatal(dict[str, Tensor]):
    """Kills its process when the second pass reaches the last tensor. The first pass describes the tensors, the second copies."""

    _passes = 0

    def items(self) -> Iterator[tuple[str, Tensor]]:  # type: ignore[override]
        self._passes += 1
        for number, item in enumerate(super().items()):
            if (self._passes, number) == (2, len(self) - 1):
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


def forget_exports(pid: int) -> None:
    """Removes torch's counters of GPU memory that a killed process had shared, as a run does for its workers."""
    for file in Path("/dev/shm").glob(f"torch_{pid}_*"):
        file.unlink(missing_ok=True)


class Process:
    """A Side in a new process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.transports"])
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, sys.path), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def tell(self, method: str, *arguments: Any) -> Any:
        """Raises what the Side raised; EOFError if it died."""
        self.start(method, *arguments)
        return self.answer()

    def start(self, method: str, *arguments: Any) -> None:
        self._ours.send_bytes(pickle.dumps((method, arguments)))

    def answer(self) -> Any:
        if not self._ours.poll(DEADLINE_S):
            raise AssertionError(f"process {self.pid} has hung")
        value, error = pickle.loads(self._ours.recv_bytes())
        if error is not None:
            raise error
        return value

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        if not self._ours.closed:
            self._process.kill()
            self.wait()

    def wait(self) -> int | None:
        """How it ended by itself: a negative number is a signal."""
        self._process.join(DEADLINE_S)
        self._ours.close()
        forget_exports(self.pid)
        return self._process.exitcode


class Here:
    """A Side in this process."""

    alive = True

    def __init__(self) -> None:
        self._side = Side()

    def tell(self, method: str, *arguments: Any) -> Any:
        return getattr(self._side, method)(*arguments)


class Actor:
    """A Side in a Ray actor."""

    def __init__(self, ray: Any):
        self._ray, self._actor = ray, ray.remote(num_cpus=0)(Side).remote()
        self.alive = True

    def tell(self, method: str, *arguments: Any) -> Any:
        from ray.exceptions import RayTaskError

        try:
            return self._ray.get(getattr(self._actor, method).remote(*arguments), timeout=DEADLINE_S)
        except RayTaskError as error:
            raise error.cause from None

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        if self.alive:
            process = psutil.Process(self.tell("pid"))
            self._ray.kill(self._actor)
            psutil.wait_procs([process], timeout=DEADLINE_S)
            self.alive = False


def _serve(connection: Connection, path: list[str]) -> None:
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    side = Side()
    while True:
        try:
            method, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps((getattr(side, method)(*arguments), None))
        except Exception as error:
            answer = pickle.dumps((None, error))
        connection.send_bytes(answer)


class Peer:
    """One transport on one side; the methods are those of Side and of Transport."""

    def __init__(self, side: Any, number: int, device: str):
        self.side, self.number, self._device = side, number, device

    def __getattr__(self, method: str) -> Any:
        if method in ("offer", "open", "accept"):
            return lambda *arguments: self.side.tell("call", self.number, method, *arguments)
        return lambda *arguments: self.side.tell(method, self.number, *arguments)

    def start(self, method: str, *arguments: Any) -> None:
        """A method of Side whose answer is fetched later, with `answer` of the side."""
        self.side.start(method, self.number, *arguments)

    def publish(self, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        return self.side.tell("publish", self.number, self._device, slot, tensors, layout)

    def close(self) -> None:
        if self.side.alive:
            self.side.tell("close", self.number)

    def footprint(self) -> tuple[int, int]:
        return self.side.tell("footprint")

    def references(self) -> int:
        return self.side.tell("references")


class Stage:
    """Makes transports on sides and closes them. The first side is for writers, the others are for readers."""

    def __init__(self, name: str, sides: list[Any], *, device: str = "cpu", backing: str = "memfd"):
        self.name, self.sides, self._device, self._backing = name, sides, device, backing
        self._peers: list[Peer] = []

    def writer(
        self,
        ring: Ring,
        *,
        source: str = "teacher/dp0-tp0",
        node_id: str = "node",
        side: Any = None,
        earlier: Peer | None = None,
    ) -> Peer:
        """`earlier` is the writer of the same side whose place it takes."""
        arguments = {"ring": ring, "source": source, "node_id": node_id}
        if earlier is not None:
            arguments["earlier"] = earlier.number
        return self._make(side or self.sides[0], arguments)

    def reader(self, *, node_id: str = "node", side: Any = None) -> Peer:
        return self._make(side or self.sides[-1], {"node_id": node_id})

    def connect(self, writer: Peer, *readers: Peer) -> None:
        """Reader number i opens the ring as reader i."""
        for number, reader in enumerate(readers):
            offer: Offer = writer.offer(number)
            receipt: Receipt = reader.open(offer)
            writer.accept(receipt)

    def pair(self, ring: Ring) -> tuple[Peer, Peer]:
        """A writer and its only reader."""
        writer, reader = self.writer(ring), self.reader()
        self.connect(writer, reader)
        return writer, reader

    def trio(self, ring: Ring) -> tuple[Peer, Peer, Peer]:
        """A writer and two readers, each on another side if there are so many."""
        writer, first, second = self.writer(ring), self.reader(side=self.sides[1 % len(self.sides)]), self.reader()
        self.connect(writer, first, second)
        return writer, first, second

    def close(self) -> None:
        """Readers first, as a writer's memory must outlive them."""
        for peer in reversed(self._peers):
            peer.close()
        self._peers.clear()

    def _make(self, side: Any, arguments: dict[str, Any]) -> Peer:
        peer = Peer(side, next(_numbers), self._device)
        peer.make(self.name, self._device, self._backing, arguments)
        self._peers.append(peer)
        return peer


_numbers = itertools.count()
