"""Targets from one process to another without Ray: by CUDA IPC on a GPU, through shared memory on a CPU."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_rl.bench.gpu.timing import synchronize
from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout, Receipt, Ring, Slot, Transport
from distill_rl.transport.choose import make
from distill_rl.transport.ring import bytes_needed

SLOTS, GENERATIONS = 2, 6
REPLY_S = 60.0
"""For the reader to reply."""
_NODE = "this machine"


def check(device: torch.device, tiny: bool) -> dict[str, float]:
    """Connect a writer in this process and a reader in another by one ring, and check contents, rules and order.

    Raises:
        AssertionError: content arrives changed, the reader sees later writes, or a rule of the ring
            (docs/transport.md) is broken.
    """
    name = "cuda_ipc" if device.type == "cuda" else "shared_memory"
    tokens = 64 if tiny else 16384
    ring = Ring(SLOTS, bytes_needed([tensor.nbytes for tensor in _content(0, tokens, device).values()]))
    context = multiprocessing.get_context("spawn")
    connection, reader_end = context.Pipe()
    reader = context.Process(target=_read, args=(reader_end, name, str(device)), daemon=True)
    writer = make(name, deadline_s=REPLY_S, node_id=_NODE, ring=ring, source="teacher", device=str(device))
    reader.start()
    reader_end.close()
    try:
        receipt: Receipt = _ask(connection, "open", writer.offer(0))
        writer.accept(receipt)
        figures = _contents(writer, connection, tokens, device)
        _rules(writer, connection, tokens, device)
        figures |= _order_on_the_device(writer, connection, tokens, device)
        _ask(connection, "close")
    finally:
        connection.close()  # the reader exits when its connection is closed
        reader.join(REPLY_S)
        reader.kill()
        writer.close()
    assert reader.exitcode == 0, f"the reader ended with exit code {reader.exitcode}"
    return figures


def _content(seed: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Targets of `tokens` tokens, with every dtype that is transported."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        "ids": torch.randint(0, 150_000, (tokens, 64), generator=draw, dtype=torch.int32),
        "logprobs": torch.randn(tokens, 64, generator=draw).half(),
        "states": torch.randn(tokens, 96, generator=draw).bfloat16(),
        "rest_logprob": torch.randn(tokens, generator=draw),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _contents(writer: Transport, reader: Connection, tokens: int, device: torch.device) -> dict[str, float]:
    """Check that several generations of every slot arrive bit for bit, and measure how fast."""
    seconds, num_bytes = {"publish": 0.0, "fetch": 0.0}, 0
    for turn in range(SLOTS * GENERATIONS):
        tensors = _content(turn, tokens, device)
        synchronize(device)
        began = time.perf_counter()
        handle = writer.publish(_slot(turn), tensors, Layout(0, 1, tokens))
        synchronize(device)
        publish_s = time.perf_counter() - began
        received, fetch_s = _ask(reader, "read", handle)
        for name, tensor in tensors.items():
            assert np.array_equal(received[name], _bytes(tensor)), f"{name} of generation {turn} arrived changed"
        if turn >= SLOTS:  # not the first use of a slot, whose pages may be new
            seconds["publish"] += publish_s
            seconds["fetch"] += fetch_s
            num_bytes += handle.num_bytes
    return {
        "MiB per slot": handle.num_bytes / 2**20,
        "publish, GB/s": num_bytes / seconds["publish"] / 1e9,
        "fetch with a copy, GB/s": num_bytes / seconds["fetch"] / 1e9,
    }


def _rules(writer: Transport, reader: Connection, tokens: int, device: torch.device) -> None:
    """Check that a slot is not written before its reader is done, and that an overwritten slot cannot be read."""
    tensors, first = _content(0, tokens, device), SLOTS * GENERATIONS
    old = writer.publish(_slot(first), tensors, Layout(0, 1, tokens))
    message = _refusal(lambda: writer.publish(_slot(first + SLOTS), tensors, Layout(0, 1, tokens)))
    assert "every reader must be done" in message, f"an unread slot was written again: {message or 'no error'}"
    _ask(reader, "read", old)
    new = writer.publish(_slot(first + SLOTS), tensors, Layout(0, 1, tokens))
    message = _ask(reader, "refusal", old)
    assert "is for generation" in message, f"an overwritten slot was read: {message or 'no error'}"
    _ask(reader, "read", new)


def _order_on_the_device(writer: Transport, reader: Connection, tokens: int, device: torch.device) -> dict[str, float]:
    """Check that a read waits for a write whose kernels have not run yet, and the next write for that read."""
    turns = range(SLOTS * (GENERATIONS + 2), SLOTS * (GENERATIONS + 12), SLOTS)
    for turn in turns:
        value = torch.full((tokens, 64), float(turn), device=device)
        _be_busy(device)
        handle = writer.publish(_slot(turn), {"x": value}, Layout(0, 1, tokens))
        _ask(reader, "mean_later", handle)
    means = _ask(reader, "means")
    assert means == [float(turn) for turn in turns], f"the reader saw {means} instead of {list(turns)}"
    return {"ordered writes and reads": float(len(means))}


def _bytes(tensor: Tensor) -> np.ndarray:
    """uint8 [bytes]. Sending the tensor itself would use torch's own shared memory."""
    return tensor.cpu().flatten().view(torch.uint8).numpy()


def _slot(turn: int) -> Slot:
    """The slot of the `turn`-th message: the indices take turns, the generation rises."""
    return Slot(turn % SLOTS, 2 * turn + 2)


def _refusal(action: Any) -> str:
    """The message of the TransportError that `action` raises; empty if it raises none."""
    try:
        action()
    except TransportError as error:
        return str(error)
    return ""


def _ask(reader: Connection, method: str, *arguments: Any) -> Any:
    """Calls a method of the reader process and returns its result.

    Raises:
        AssertionError: the reader does not reply within REPLY_S, dies, or reports an error.
    """
    reader.send((method, arguments))
    assert reader.poll(REPLY_S), f"the reader did not reply to {method!r} within {REPLY_S:.0f} s"
    try:
        reply, error = reader.recv()
    except EOFError:
        raise AssertionError(f"the reader died at {method!r}") from None
    assert error is None, f"the reader failed at {method!r}: {error}"
    return reply


def _be_busy(device: torch.device) -> None:
    """Keep the current stream of a GPU busy for about ten milliseconds."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)


def _read(connection: Connection, name: str, device: str) -> None:
    """The reader's process: handles requests until the connection is closed."""
    reader = _Reader(name, torch.device(device))
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            reply, error = getattr(reader, method)(*arguments), None
        except Exception as failure:
            reply, error = None, f"{type(failure).__name__}: {failure}"
        connection.send((reply, error))


class _Reader:
    """The methods that the writer's process calls by name."""

    def __init__(self, name: str, device: torch.device):
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        self._device, self._means = device, list[Tensor]()
        self._transport = make(name, deadline_s=REPLY_S, node_id=_NODE, device=str(device))
        self.open, self.close = self._transport.open, self._transport.close

    def refusal(self, handle: Handle) -> str:
        """Why this handle cannot be read; empty if it can."""
        return _refusal(lambda: self.read(handle))

    def mean_later(self, handle: Handle) -> None:
        """Keep the mean of the content, computed after other work of the device."""
        with self._transport.fetch(handle) as tensors:
            _be_busy(self._device)
            self._means.append(tensors["x"].mean())

    def means(self) -> list[float]:
        """The means of everything that was read, in order."""
        return [float(mean) for mean in self._means]

    def read(self, handle: Handle) -> tuple[Mapping[str, np.ndarray], float]:
        """The content, and the seconds until it was copied on the reader's device."""
        began = time.perf_counter()
        with self._transport.fetch(handle) as tensors:
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            synchronize(self._device)
            seconds = time.perf_counter() - began
        return {name: _bytes(tensor) for name, tensor in copies.items()}, seconds
