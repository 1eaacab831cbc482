"""The cost of moving a teacher's targets to another process: shared_memory and object_store, and on a GPU cuda_ipc.

A writer and a reader process time themselves: how long `publish` takes, and how long until the reader has its tensors.
The call that carries the handle is not timed. In every round the writer also copies the same number of bytes between
two plain buffers, so that the machine's speed and load affect both figures.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from distill_rl.config.schema import RayConfig
from distill_rl.transport.base import Handle, Layout, Offer, Receipt, Ring, Slot, describe
from distill_rl.transport.choose import make
from distill_rl.transport.ring import bytes_needed
from distill_rl.workers.cluster.session import ray, ray_session
from tests.bench import harness

LEAST_SHARE, MOST_IPC_FETCH_S = 0.70, 100e-6
TOP_K, WARM_UP, SLOTS = 64, 5, 2
DEADLINE_S = 120.0


class Writer:
    """Publishes top-k targets of about `num_bytes` bytes, on one thread."""

    def __init__(self, name: str, num_bytes: int, device: str):
        torch.set_num_threads(1)
        tokens = num_bytes // (6 * TOP_K + 8)
        self._device, self._layout = device, Layout(0, 1, tokens)
        self._tensors = {
            "ids": torch.randint(0, 2**17, (tokens, TOP_K), dtype=torch.int32, device=device),
            "logprobs": torch.randn(tokens, TOP_K, device=device).bfloat16(),
            "rest_logprob": torch.randn(tokens, device=device),
            "label_logprob": torch.randn(tokens, device=device),
        }
        sizes = [tensor.nbytes for tensor in self._tensors.values()]
        self._from = torch.ones(sum(sizes), dtype=torch.uint8).numpy()
        self._to = self._from.copy()
        self._transport = make(
            name, deadline_s=DEADLINE_S, node_id=_node_id(), ring=Ring(SLOTS, bytes_needed(sizes)), device=device
        )

    def offer(self) -> Offer:
        """The ring's offer to reader 0, the only one."""
        return self._transport.offer(0)

    def accept(self, receipt: Receipt) -> None:
        self._transport.accept(receipt)

    def publish(self, turn: int) -> tuple[Handle, float, float]:
        """Publishes the targets of a round, with `turn` % 100 as last element of each tensor for the reader to check.

        Returns:
            The handle, the seconds to publish, and the seconds of a plain copy of the same size in this process.
        """
        for tensor in self._tensors.values():
            tensor.view(-1)[-1] = turn % 100  # a value that every dtype can represent
        _finish(self._device)
        start = time.perf_counter()
        handle = self._transport.publish(Slot(turn % SLOTS, 2 * turn + 2), self._tensors, self._layout)
        _finish(self._device)
        published = time.perf_counter()
        self._to[:] = self._from
        return handle, published - start, time.perf_counter() - published

    def describe(self) -> tuple[int, int]:
        """(bytes, tokens) of the targets."""
        return sum(spec.num_bytes for spec in describe(self._tensors)), self._layout.tokens_per_row


class Reader:
    """Fetches targets, on one thread."""

    def __init__(self, name: str, device: str):
        torch.set_num_threads(1)
        self._device = device
        self._transport = make(name, deadline_s=DEADLINE_S, node_id=_node_id(), device=device)

    def open(self, offer: Offer) -> Receipt:
        return self._transport.open(offer)

    def fetch(self, published: tuple[Handle, float, float], turn: int) -> tuple[float, float, bool]:
        """Fetches the targets of round `turn` and moves them to this process's device.

        Args:
            published: what `Writer.publish` returned.

        Returns:
            Seconds until the tensors are open, seconds until they are on the device, and whether the last element of
            each is the one that the writer wrote in this round.
        """
        _finish(self._device)
        start = time.perf_counter()
        with self._transport.fetch(published[0]) as tensors:
            there = time.perf_counter()
            moved = {name: tensor.to(self._device) for name, tensor in tensors.items()}
            _finish(self._device)
            done = time.perf_counter()
            right = all(float(tensor.view(-1)[-1]) == turn % 100 for tensor in moved.values())
        return there - start, done - start, right


def _node_id() -> str:
    """The id of the Ray node this process runs on."""
    return ray.get_runtime_context().get_node_id()


def _finish(device: str) -> None:
    """Waits for all submitted GPU work if `device` is cuda; otherwise does nothing."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name: str, *, num_bytes: int, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Times one transport between two actors, which it ends afterwards. Needs a Ray session.

    Args:
        name: of the transport.
        num_bytes: size of the targets, rounded down to whole tokens.
        rounds: how many are timed, after `WARM_UP` untimed ones.
        device: of both processes' tensors.

    Returns:
        Sizes; medians over the rounds in seconds; and as `share_of_memcpy` the time of a plain copy over that of
        publishing and fetching.

    Raises:
        RuntimeError: the reader got other values than the writer published.
    """
    gpus = 0.4 if device == "cuda" else 0
    writer: Any = ray.remote(num_cpus=0, num_gpus=gpus)(Writer).remote(name, num_bytes, device)
    reader: Any = ray.remote(num_cpus=0, num_gpus=gpus)(Reader).remote(name, device)
    ray.get(writer.accept.remote(reader.open.remote(writer.offer.remote())), timeout=DEADLINE_S)
    rows = []
    for turn in range(WARM_UP + rounds):
        published = writer.publish.remote(turn)
        seen, moved, right = ray.get(reader.fetch.remote(published, turn), timeout=DEADLINE_S)
        _, write, copy = ray.get(published, timeout=DEADLINE_S)
        if not right:
            raise RuntimeError(f"{name}: round {turn} arrived changed")
        rows.append((write, seen, moved, copy))
    size, tokens = ray.get(writer.describe.remote(), timeout=DEADLINE_S)
    for actor in (reader, writer):
        ray.kill(actor)
    write, seen, moved, copy = (median(column) for column in zip(*rows[WARM_UP:]))
    return {
        "bytes": size,
        "tokens": tokens,
        "rounds": rounds,
        "publish_s": write,
        "fetch_s": seen,
        "on_device_s": moved,
        "memcpy_s": copy,
        "share_of_memcpy": round(median(row[3] / (row[0] + row[1]) for row in rows[WARM_UP:]), 3),
    }


def verdict(figures: dict[str, Any]) -> list[str]:
    """Missed targets, one line each: shared_memory's speed and, where it was measured, cuda_ipc's fetch time."""
    share = figures["cpu"]["shared_memory"]["share_of_memcpy"]
    fetch = figures.get("cuda", {}).get("cuda_ipc", {}).get("fetch_s", 0.0)
    return harness.missed(
        (
            share < LEAST_SHARE,
            f"shared_memory reaches {share:.0%} of the speed of a plain copy; must be at least {LEAST_SHARE:.0%}",
        ),
        (
            fetch >= MOST_IPC_FETCH_S,
            f"a cuda_ipc fetch takes {fetch * 1e6:.0f} µs; must be below {MOST_IPC_FETCH_S * 1e6:.0f}",
        ),
    )


def measure_all(_: Path, *, mib: int = 64, rounds: int = 40) -> dict[str, Any]:
    """Measure all transports that this machine supports; the figures of `measure` by device and transport.

    Args:
        mib: MiB of targets per round.
        rounds: timed rounds.
    """
    plan = {"cpu": ("shared_memory", "object_store")}
    if torch.cuda.is_available():
        plan["cuda"] = ("cuda_ipc", "object_store")
    with ray_session(RayConfig(), num_cpus=2, target_bytes=4 * mib << 20):
        return {
            device: {name: measure(name, num_bytes=mib << 20, rounds=rounds, device=device) for name in names}
            for device, names in plan.items()
        }


main = harness.program("transport", measure_all, verdict)

if __name__ == "__main__":
    sys.exit(main())
