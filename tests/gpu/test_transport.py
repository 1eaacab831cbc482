"""Targets from one process to another without Ray: by CUDA IPC on a GPU, through shared memory on a CPU."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout, Receipt, Ring, Slot, Transport
from distill_rl.transport.choose import make
from distill_rl.transport.ring import bytes_needed
from tests.bench.gpu.timing import synchronize
from tests.gpu.conftest import Figures

pytestmark = pytest.mark.gpu

SLOTS, GENERATIONS = 2, 6
REPLY_S = 60.0
"""For the reader to reply."""
_NODE = "this machine"


@pytest.fixture(scope="module")
def tokens(tiny: bool) -> int:
    """Per slot."""
    return 64 if tiny else 16384


@pytest.fixture
def sides(device: torch.device, tokens: int) -> Iterator[tuple[Transport, Connection]]:
    """A writer in this process, and the connection to its reader in a new one."""
    name = "cuda_ipc" if device.type == "cuda" else "shared_memory"
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
        yield writer, connection
        _ask(connection, "close")
    finally:
        connection.close()  # the reader exits when its connection is closed
        reader.join(REPLY_S)
        reader.kill()
        writer.close()
    assert reader.exitcode == 0, f"the reader ended with exit code {reader.exitcode}"


def test_contents_arrive_bit_for_bit(
    sides: tuple[Transport, Connection], tokens: int, device: torch.device, figures: Figures
) -> None:
    """Several generations of every slot. The rates are those of publishing and of fetching with a copy."""
    writer, reader = sides
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
    figures |= {
        "MiB per slot": handle.num_bytes / 2**20,
        "publish, GB/s": num_bytes / seconds["publish"] / 1e9,
        "fetch with a copy, GB/s": num_bytes / seconds["fetch"] / 1e9,
    }


def test_unread_slots_are_kept_and_overwritten_ones_are_refused(
    sides: tuple[Transport, Connection], tokens: int, device: torch.device
) -> None:
    writer, reader = sides
    tensors = _content(0, tokens, device)
    old = writer.publish(_slot(0), tensors, Layout(0, 1, tokens))
    message = _refusal(lambda: writer.publish(_slot(SLOTS), tensors, Layout(0, 1, tokens)))
    assert "every reader must be done" in message, f"an unread slot was written again: {message or 'no error'}"
    _ask(reader, "read", old)
    new = writer.publish(_slot(SLOTS), tensors, Layout(0, 1, tokens))
    message = _ask(reader, "refusal", old)
    assert "is for generation" in message, f"an overwritten slot was read: {message or 'no error'}"
    _ask(reader, "read", new)


def test_reads_and_writes_keep_their_order_on_the_device(
    sides: tuple[Transport, Connection], tokens: int, device: torch.device, figures: Figures
) -> None:
    """A read waits for a write whose kernels have not run yet, and the next write for that read."""
    writer, reader = sides
    turns = range(0, 10 * SLOTS, SLOTS)
    for turn in turns:
        value = torch.full((tokens, 64), float(turn), device=device)
        _be_busy(device)
        handle = writer.publish(_slot(turn), {"x": value}, Layout(0, 1, tokens))
        _ask(reader, "mean_later", handle)
    means = _ask(reader, "means")
    assert means == [float(turn) for turn in turns], f"the reader saw {means} instead of {list(turns)}"
    figures["ordered writes and reads"] = len(means)


def _content(seed: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Random targets of `tokens` tokens on the device, with every dtype that is transported; fixed by the seed."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        "ids": torch.randint(0, 150_000, (tokens, 64), generator=draw, dtype=torch.int32),
        "logprobs": torch.randn(tokens, 64, generator=draw).half(),
        "states": torch.randn(tokens, 96, generator=draw).bfloat16(),
        "rest_logprob": torch.randn(tokens, generator=draw),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _bytes(tensor: Tensor) -> np.ndarray:
    """The tensor's bytes as uint8 [bytes] in host memory.

    They are sent instead of the tensor itself, which would go through torch's own shared memory.
    """
    return tensor.cpu().flatten().view(torch.uint8).numpy()


def _slot(turn: int) -> Slot:
    """The slot of the `turn`-th message: the SLOTS indices take turns, and the generation, always even, rises."""
    return Slot(turn % SLOTS, 2 * turn + 2)


def _refusal(action: Any) -> str:
    """Calls `action` and returns the message of the TransportError that it raises; empty if it raises none."""
    try:
        action()
    except TransportError as error:
        return str(error)
    return ""


def _ask(reader: Connection, method: str, *arguments: Any) -> Any:
    """Calls a method of the reader process and returns its result.

    Raises:
        AssertionError: the reader does not reply within REPLY_S, ends before it replies, or reports an error.
        OSError: the reader had died before the request was sent.
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
    """Queues about ten milliseconds of work on the current stream of a GPU, without waiting. Nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)


def _read(connection: Connection, name: str, device: str) -> None:
    """The reader's process: handles requests until the other end of the connection is closed.

    A request is (method of `_Reader`, arguments), the reply (result, None), or (None, error as text) if the method
    raised.

    Args:
        name: of the transport.
    """
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
        """Reads this handle; returns the message of the TransportError if it cannot be read, otherwise ""."""
        return _refusal(lambda: self.read(handle))

    def mean_later(self, handle: Handle) -> None:
        """Keeps the mean of the content's tensor `x`. A GPU computes it after other work; this does not wait for it."""
        with self._transport.fetch(handle) as tensors:
            _be_busy(self._device)
            self._means.append(tensors["x"].mean())

    def means(self) -> list[float]:
        """The means of everything that `mean_later` has read, in order. Waits for the device."""
        return [float(mean) for mean in self._means]

    def read(self, handle: Handle) -> tuple[Mapping[str, np.ndarray], float]:
        """The content as bytes by name (`_bytes`), and the seconds until it was copied on the reader's device."""
        began = time.perf_counter()
        with self._transport.fetch(handle) as tensors:
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            synchronize(self._device)
            seconds = time.perf_counter() - began
        return {name: _bytes(tensor) for name, tensor in copies.items()}, seconds
