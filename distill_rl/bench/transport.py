"""What moving a teacher's targets to another process costs: shared_memory and object_store, on a GPU cuda_ipc too.

Two processes, a writer and a reader. Timed inside them: how long `publish` takes, and how long until the reader has
its tensors; never the call that carries the handle. In every round the writer also copies as many bytes from one plain
buffer to another, so that the machine's own speed, and whatever else runs on it, is in both figures.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

from distill_rl.bench import record
from distill_rl.config.schema import RayConfig
from distill_rl.transport.base import Handle, Layout, Offer, Receipt, Ring, Slot, describe
from distill_rl.transport.choose import make
from distill_rl.transport.ring import bytes_needed
from distill_rl.workers.cluster.session import ray, ray_session

LEAST_SHARE, MOST_IPC_FETCH_S = 0.70, 100e-6
TOP_K, WARM_UP, SLOTS = 64, 5, 2
DEADLINE_S = 120.0


class Writer:
    """Publishes top-k targets of about `num_bytes` bytes; one thread."""

    def __init__(self, name: str, num_bytes: int, device: str):
        import torch

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
        return self._transport.offer(0)

    def accept(self, receipt: Receipt) -> None:
        self._transport.accept(receipt)

    def publish(self, turn: int) -> tuple[Handle, float, float]:
        """The handle, seconds to publish it, seconds of a plain copy of as many bytes in this process."""
        for tensor in self._tensors.values():
            tensor.view(-1)[-1] = turn % 100  # what every dtype can hold
        _finish(self._device)
        start = time.perf_counter()
        handle = self._transport.publish(Slot(turn % SLOTS, 2 * turn + 2), self._tensors, self._layout)
        _finish(self._device)
        published = time.perf_counter()
        self._to[:] = self._from
        return handle, published - start, time.perf_counter() - published

    def describe(self) -> tuple[int, int]:
        """(bytes, tokens) of what is published."""
        return sum(spec.num_bytes for spec in describe(self._tensors)), self._layout.tokens_per_row


class Reader:
    """Fetches what it is handed; one thread."""

    def __init__(self, name: str, device: str):
        import torch

        torch.set_num_threads(1)
        self._device = device
        self._transport = make(name, deadline_s=DEADLINE_S, node_id=_node_id(), device=device)

    def open(self, offer: Offer) -> Receipt:
        return self._transport.open(offer)

    def fetch(self, published: tuple[Handle, float, float], turn: int) -> tuple[float, float, bool]:
        """Seconds until the tensors are there, until they are on this process's device, and if they are the right ones."""
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
    return ray.get_runtime_context().get_node_id()


def _finish(device: str) -> None:
    """Until the GPU has done what it was told."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def measure(name: str, *, num_bytes: int, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Medians over the rounds, in seconds, inside a Ray session."""
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
            raise RuntimeError(f"{name}: round {turn} did not arrive as it was sent")
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
    """What is not as promised; nothing if all is."""
    problems = []
    share = figures["cpu"]["shared_memory"]["share_of_memcpy"]
    if share < LEAST_SHARE:
        problems.append(f"shared_memory moves {share:.0%} of what a plain copy does; it must be {LEAST_SHARE:.0%}")
    fetch = figures.get("cuda", {}).get("cuda_ipc", {}).get("fetch_s", 0.0)
    if fetch >= MOST_IPC_FETCH_S:
        problems.append(f"a cuda_ipc fetch takes {fetch * 1e6:.0f} µs; it must be below {MOST_IPC_FETCH_S * 1e6:.0f}")
    return problems


def compare(num_bytes: int, rounds: int, *, cuda: bool) -> dict[str, Any]:
    """All transports that this machine has."""
    plan = {"cpu": ("shared_memory", "object_store")} | ({"cuda": ("cuda_ipc", "object_store")} if cuda else {})
    with ray_session(RayConfig(), num_cpus=2, target_bytes=4 * num_bytes):
        return {
            device: {name: measure(name, num_bytes=num_bytes, rounds=rounds, device=device) for name in names}
            for device, names in plan.items()
        }


def main() -> int:
    import torch

    parser = record.parser(__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="size of what is moved; %(default)s")
    parser.add_argument("--rounds", type=int, default=40, help="rounds measured; %(default)s")
    options = parser.parse_args()
    figures = compare(options.mib << 20, options.rounds, cuda=torch.cuda.is_available())
    print(f"\n{'device':<8}{'transport':<16}{'publish':>10}{'fetch':>10}{'on device':>11}{'memcpy':>10}{'share':>8}")
    for device, found in figures.items():
        for name, one in found.items():
            times = (f"{one[key] * 1e3:.3f}" for key in ("publish_s", "fetch_s", "on_device_s", "memcpy_s"))
            publish, fetch, moved, copy = times
            print(f"{device:<8}{name:<16}{publish:>10}{fetch:>10}{moved:>11}{copy:>10}{one['share_of_memcpy']:>8.0%}")
    print("milliseconds, medians; share: of a plain copy's bandwidth, publish and fetch together")
    print(f"written   {record.write('transport', figures, options.out)}")
    problems = verdict(figures)
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
