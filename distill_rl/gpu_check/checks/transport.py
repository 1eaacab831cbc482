"""Targets from one process to another, without Ray: CUDA IPC on a GPU, its twin in shared memory on a CPU."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout, Receipt, Ring, Slot, Transport
from distill_rl.transport.choose import make
from distill_rl.transport.ring import bytes_needed

SLOTS, GENERATIONS = 2, 6
ANSWER_S = 60.0
"""for the reader to answer"""
_NODE = "this machine"


def check(device: torch.device, tiny: bool) -> dict[str, float]:
    """A writer here and a reader in a process of its own, over one ring.

    Raises:
        AssertionError: content changes on its way, the reader sees what is written later, or a rule of the ring
            (docs/transport.md) is not kept.
    """
    name = "cuda_ipc" if device.type == "cuda" else "shared_memory"
    tokens = 64 if tiny else 16384
    ring = Ring(SLOTS, bytes_needed([tensor.nbytes for tensor in _content(0, tokens, device).values()]))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read, args=(theirs, name, str(device)), daemon=True)
    writer = make(name, deadline_s=ANSWER_S, node_id=_NODE, ring=ring, source="teacher", device=device)
    reader.start()
    theirs.close()
    try:
        receipt: Receipt = _ask(ours, "open", writer.offer(0))
        writer.accept(receipt)
        figures = _contents(writer, ours, tokens, device)
        _rules(writer, ours, tokens, device)
        figures |= _order_on_the_device(writer, ours, tokens, device)
        _ask(ours, "close")
    finally:
        ours.close()  # the reader ends when nobody can ask it any more
        reader.join(ANSWER_S)
        reader.kill()
        writer.close()
    assert reader.exitcode == 0, f"the reader ended with exit code {reader.exitcode}"
    return figures


def _content(seed: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Top-k targets of `tokens` tokens: every dtype that travels."""
    draw = torch.Generator().manual_seed(seed)
    made = {
        "ids": torch.randint(0, 150_000, (tokens, 64), generator=draw, dtype=torch.int32),
        "logprobs": torch.randn(tokens, 64, generator=draw).half(),
        "states": torch.randn(tokens, 96, generator=draw).bfloat16(),
        "rest_logprob": torch.randn(tokens, generator=draw),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def _contents(writer: Transport, reader: Connection, tokens: int, device: torch.device) -> dict[str, float]:
    """Several generations of every slot arrive as they were, bit for bit; how fast."""
    seconds, moved = {"publish": 0.0, "fetch": 0.0}, 0
    for turn in range(SLOTS * GENERATIONS):
        tensors = _content(turn, tokens, device)
        _wait_for(device)
        began = time.perf_counter()
        handle = writer.publish(_slot(turn), tensors, Layout(0, 1, tokens))
        _wait_for(device)
        took = time.perf_counter() - began
        seen, fetched_s = _ask(reader, "read", handle)
        for name, tensor in tensors.items():
            assert np.array_equal(seen[name], _bytes(tensor)), f"{name} of generation {turn} changed on its way"
        if turn >= SLOTS:  # the first time a slot is used its pages may be new
            seconds["publish"] += took
            seconds["fetch"] += fetched_s
            moved += handle.num_bytes
    return {
        "MiB per slot": handle.num_bytes / 2**20,
        "publish, GB/s": moved / seconds["publish"] / 1e9,
        "fetch with a copy, GB/s": moved / seconds["fetch"] / 1e9,
    }


def _rules(writer: Transport, reader: Connection, tokens: int, device: torch.device) -> None:
    """A slot is not written before its reader is done, and what was overwritten cannot be read."""
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
    """Kernels that have been submitted and not run: a read waits for the write, and the next write for the read."""
    turns = range(SLOTS * (GENERATIONS + 2), SLOTS * (GENERATIONS + 12), SLOTS)
    for turn in turns:
        value = torch.full((tokens, 64), float(turn), device=device)
        _be_busy(device)
        handle = writer.publish(_slot(turn), {"x": value}, Layout(0, 1, tokens))
        _ask(reader, "mean later", handle)
    means = _ask(reader, "means")
    assert means == [float(turn) for turn in turns], f"a reader saw {means} instead of {list(turns)}"
    return {"ordered writes and reads": float(len(means))}


def _bytes(tensor: Tensor) -> np.ndarray:
    """uint8 [bytes]; a tensor itself would go through shared memory of torch's own."""
    return tensor.cpu().flatten().view(torch.uint8).numpy()


def _slot(turn: int) -> Slot:
    return Slot(turn % SLOTS, 2 * turn + 2)


def _refusal(action: Any) -> str:
    try:
        action()
    except TransportError as error:
        return str(error)
    return ""


def _ask(reader: Connection, what: str, argument: Any = None) -> Any:
    reader.send((what, argument))
    assert reader.poll(ANSWER_S), f"the reader did not answer {what!r} within {ANSWER_S:.0f} s"
    try:
        answer, error = reader.recv()
    except EOFError:
        raise AssertionError(f"the reader died at {what!r}") from None
    assert error is None, f"the reader failed at {what!r}: {error}"
    return answer


def _be_busy(device: torch.device) -> None:
    """Keeps the current stream of a GPU busy for some ten milliseconds."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read(connection: Connection, name: str, device: str) -> None:
    """The reader's process: does what it is asked until nobody can ask any more."""
    side = _Reader(name, torch.device(device))
    while True:
        try:
            what, argument = connection.recv()
        except EOFError:
            return
        try:
            answer, error = side.answer(what, argument), None
        except Exception as failure:
            answer, error = None, f"{type(failure).__name__}: {failure}"
        connection.send((answer, error))


class _Reader:
    def __init__(self, name: str, device: torch.device):
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        self.device, self.means = device, list[Tensor]()
        self.transport = make(name, deadline_s=ANSWER_S, node_id=_NODE, device=device)

    def answer(self, what: str, argument: Any) -> Any:
        if what == "open":
            return self.transport.open(argument)
        if what == "read":
            return self.read(argument)
        if what == "refusal":
            return _refusal(lambda: self.read(argument))
        if what == "mean later":
            with self.transport.fetch(argument) as tensors:
                _be_busy(self.device)
                self.means.append(tensors["x"].mean())
            return None
        if what == "means":
            return [float(mean) for mean in self.means]
        return self.transport.close()

    def read(self, handle: Handle) -> tuple[Mapping[str, np.ndarray], float]:
        """The content, and the seconds until a copy of it was made on this side's device."""
        began = time.perf_counter()
        with self.transport.fetch(handle) as tensors:
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            _wait_for(self.device)
            seconds = time.perf_counter() - began
        return {name: _bytes(tensor) for name, tensor in copies.items()}, seconds
