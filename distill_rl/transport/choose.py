"""Which transport a run uses, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distill_rl.errors import ConfigError
from distill_rl.transport.place import Place, expandable_segments

if TYPE_CHECKING:
    import torch

    from distill_rl.transport.base import Ring, Transport
    from distill_rl.transport.segment import Backing

NAMES = ("local", "object_store", "shared_memory", "cuda_ipc")


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    reason: str


def choose(name: str, writer: Place, readers: Sequence[Place]) -> Choice:
    """The transport from one teacher rank to the student ranks that read it; resolves `auto`.

    Raises:
        ConfigError: the transport that was asked for cannot work between these places.
    """
    ipc = list(_against_cuda_ipc(writer, readers))
    if name == "auto":
        if not ipc:
            return Choice("cuda_ipc", "teacher and student are on GPUs of one node that reach each other")
        return Choice("object_store", f"goes from any node to any node; no cuda_ipc: {ipc[0]}")
    if name == "cuda_ipc" and ipc:
        raise ConfigError("transport", "cuda_ipc needs GPUs of one node that reach each other", ipc[0], _REMEDY)
    if name == "shared_memory" and (why := next(_against_sharing(writer, readers), "")):
        raise ConfigError("transport", "shared_memory works inside one node", why, _REMEDY)
    return _named(name)


def require_between_nodes(name: str) -> None:
    """For teachers on other nodes than the student's.

    Raises:
        ConfigError: the transport that was asked for works inside one node.
    """
    if name in ("shared_memory", "cuda_ipc"):
        where = "ray.placement=disaggregated, which puts teachers and student on nodes of their own"
        raise ConfigError("transport", f"{name} works inside one node", where, _REMEDY)


def expected(name: str, *, gpus: int) -> Choice:
    """What `choose` will say as far as is known before a process of the run is there.

    Args:
        gpus: how many GPUs the run will use.

    Raises:
        ConfigError: the transport that was asked for cannot work here.
    """
    if name == "auto":
        if gpus and not expandable_segments(os.environ):
            return Choice("cuda_ipc", "if the GPUs of teacher and student reach each other, otherwise object_store")
        why = "expandable segments are on" if gpus else "no GPU"
        return Choice("object_store", f"goes from any node to any node; no cuda_ipc: {why}")
    if name == "cuda_ipc":
        if not gpus:
            raise ConfigError("transport", "cuda_ipc needs GPUs", "none", _REMEDY)
        if variable := expandable_segments(os.environ):
            raise ConfigError("transport", "cuda_ipc cannot share expandable segments", f"{variable} turns them on")
    return _named(name)


def make(
    name: str,
    *,
    deadline_s: float,
    node_id: str = "",
    ring: Ring | None = None,
    source: str = "",
    device: torch.device | str = "cpu",
    backing: Backing = "memfd",
) -> Transport:
    """The transport of this process: the writing side of a ring, or with none the reading side.

    Args:
        name: what `choose` said.
        deadline_s: how long a fetch may wait.
        node_id: of this process, as Ray names it.
        ring: what this process writes.
        source: the ring's name, the same for every writer that takes its place.
        device: of this process's model.
        backing: of the memory of shared_memory.
    """
    if name == "local":
        from distill_rl.transport.local import LocalTransport

        return LocalTransport(ring, source=source, node_id=node_id)
    if name == "object_store":
        from distill_rl.transport.object_store import ObjectStoreTransport

        return ObjectStoreTransport(ring, deadline_s=deadline_s, source=source, node_id=node_id)
    if name == "shared_memory":
        from distill_rl.transport.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(ring, source=source, node_id=node_id, backing=backing)
    if name == "cuda_ipc":
        from distill_rl.transport.cuda_ipc import CudaIpcTransport

        return CudaIpcTransport(ring, source=source, node_id=node_id, device=device, deadline_s=deadline_s)
    raise ConfigError("transport", f"must be one of auto, {', '.join(NAMES)}", name)


_REMEDY = "use transport=auto"


def _named(name: str) -> Choice:
    if name not in NAMES:
        raise ConfigError("transport", f"must be one of auto, {', '.join(NAMES)}", name)
    if name == "local":
        raise ConfigError("transport", "local works inside one process, and a run has several", name, _REMEDY)
    return Choice(name, "asked for by name")


def _against_sharing(writer: Place, readers: Sequence[Place]) -> Iterator[str]:
    for reader in readers:
        if reader.node_id != writer.node_id:
            yield f"the teacher is on node {writer.node_id}, a student on {reader.node_id}"
        elif reader.uid != writer.uid:
            yield f"the teacher runs as user {writer.uid}, a student as user {reader.uid}"


def _against_cuda_ipc(writer: Place, readers: Sequence[Place]) -> Iterator[str]:
    places = [writer, *readers]
    for role, place in zip(["teacher", *["student"] * len(readers)], places):
        if place.device == "cpu":
            yield f"the {role} is on a CPU"
        elif place.expandable:
            yield f"{place.expandable} turns expandable segments on, whose memory cannot be shared"
    yield from _against_sharing(writer, readers)
    for reader in readers:
        if reader.device not in writer.reaches or writer.device not in reader.reaches:
            yield f"GPU {writer.device} of the teacher and GPU {reader.device} of a student do not reach each other"
