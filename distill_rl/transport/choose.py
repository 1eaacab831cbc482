"""Which transport a run uses, and why: it depends on where the tensors of each rank are.

`auto` takes `cuda_ipc` for a teacher rank if nothing speaks against it for any of its readers, else `object_store`.
A transport that was requested by name is taken, or refused with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distill_rl.errors import ConfigError
from distill_rl.transport.base import Place, expandable_segments

if TYPE_CHECKING:
    from distill_rl.transport.base import Ring, Transport
    from distill_rl.transport.segment import Backing

_REMEDY = "use transport=auto"


@dataclass(frozen=True, slots=True)
class TransportChoice:
    name: str
    reason: str


def choose(name: str, writer: Place, readers: Sequence[Place]) -> TransportChoice:
    """The transport from one teacher rank to the student ranks that read from it, and the reason. Resolves `auto`.

    Args:
        name: auto, or a transport by name. A name that does not exist is not noticed here, but by `make`.
        writer: where the teacher rank is.
        readers: where the student ranks are that read from it.

    Raises:
        ConfigError: the requested transport cannot work between these places; `local` never can.
    """
    no_ipc = next(_obstacles_to_cuda_ipc(writer, readers), None)
    if name == "auto":
        if no_ipc is None:
            return TransportChoice("cuda_ipc", "teacher and student are on GPUs of one node that reach each other")
        return _object_store(no_ipc)
    if name == "cuda_ipc" and no_ipc is not None:
        raise ConfigError("transport", "cuda_ipc needs GPUs of one node that reach each other", no_ipc, _REMEDY)
    if name == "shared_memory" and (obstacle := next(_obstacles_to_sharing(writer, readers), "")):
        raise ConfigError("transport", "shared_memory works inside one node", obstacle, _REMEDY)
    return _requested(name)


def require_between_nodes(name: str) -> None:
    """Refuses a transport that cannot connect teachers and student on different nodes; other names, `auto` too, pass.

    Raises:
        ConfigError: `name` is shared_memory or cuda_ipc, which work only within one node.
    """
    if name in ("shared_memory", "cuda_ipc"):
        where = "ray.placement=disaggregated, which puts teachers and student on nodes of their own"
        raise ConfigError("transport", f"{name} works inside one node", where, _REMEDY)


def expected(name: str, *, gpus: int) -> TransportChoice:
    """What `choose` will probably decide, judged before any process of the run exists, by this process's environment.

    Args:
        name: auto, or a transport by name.
        gpus: how many GPUs the run will use.

    Raises:
        ConfigError: `local`, which no run can use; or cuda_ipc without GPUs or with expandable segments on.
    """
    if name == "auto":
        if gpus and not expandable_segments(os.environ):
            reason = "if the GPUs of teacher and student reach each other, otherwise object_store"
            return TransportChoice("cuda_ipc", reason)
        return _object_store("expandable segments are on" if gpus else "no GPU")
    if name == "cuda_ipc":
        if not gpus:
            raise ConfigError("transport", "cuda_ipc needs GPUs", "none", _REMEDY)
        if variable := expandable_segments(os.environ):
            raise ConfigError("transport", "cuda_ipc cannot share expandable segments", f"{variable} turns them on")
    return _requested(name)


def make(
    name: str,
    *,
    deadline_s: float,
    node_id: str = "",
    ring: Ring | None = None,
    source: str = "",
    device: str = "cpu",
    backing: Backing = "memfd",
    earlier: Transport | None = None,
) -> Transport:
    """Returns this process's side of a transport, which writes `ring` or, without one, reads.

    The ring's memory is allocated here, except for object_store, which needs none.

    Args:
        name: as in `TransportChoice`, or `local`; not `auto`.
        deadline_s: seconds that a fetch may wait; used by object_store and cuda_ipc, the others do not wait.
        node_id: node of this process, as Ray names it.
        ring: the ring to write; None for a side that only reads.
        source: name of the ring, the same for every writer that replaces it.
        device: of this process's model.
        backing: of the memory of shared_memory.
        earlier: the side of the same name that this process has had so far, whose readers have ended or closed it. It is
            closed; a ring of cuda_ipc may take over its memory.

    Raises:
        ConfigError: an unknown name, or `auto`.
        TransportError: the ring cannot be allocated, or cuda_ipc has no GPU that it can use.
        GpuMemoryError: the GPU has too little memory for a ring of cuda_ipc.
    """
    if name == "cuda_ipc":
        from distill_rl.transport.cuda_ipc import CudaIpcTransport

        assert earlier is None or isinstance(earlier, CudaIpcTransport), "it has the same name"
        return CudaIpcTransport(
            ring, source=source, node_id=node_id, device=device, deadline_s=deadline_s, earlier=earlier
        )
    if earlier is not None:
        earlier.close()
    if name == "local":
        from distill_rl.transport.local import LocalTransport

        return LocalTransport(ring, source=source, node_id=node_id, device=device)
    if name == "object_store":
        from distill_rl.transport.object_store import ObjectStoreTransport

        return ObjectStoreTransport(ring, deadline_s=deadline_s, source=source, node_id=node_id)
    if name == "shared_memory":
        from distill_rl.transport.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(ring, source=source, node_id=node_id, backing=backing)
    raise ConfigError("transport", "must be one of auto, local, object_store, shared_memory, cuda_ipc", name)


def _object_store(no_ipc: str) -> TransportChoice:
    return TransportChoice("object_store", f"goes from any node to any node; no cuda_ipc: {no_ipc}")


def _requested(name: str) -> TransportChoice:
    """The choice of a transport that was requested by name. Raises ConfigError for `local`, which no run can use."""
    if name == "local":
        raise ConfigError("transport", "local works inside one process, and a run has several", name, _REMEDY)
    return TransportChoice(name, "requested by name")


def _obstacles_to_sharing(writer: Place, readers: Sequence[Place]) -> Iterator[str]:
    """Yields, for messages, why readers cannot map the writer's memory: another node, or another user."""
    for reader in readers:
        if reader.node_id != writer.node_id:
            yield f"the teacher is on node {writer.node_id}, a student on {reader.node_id}"
        elif reader.uid != writer.uid:
            yield f"the teacher runs as user {writer.uid}, a student as user {reader.uid}"


def _obstacles_to_cuda_ipc(writer: Place, readers: Sequence[Place]) -> Iterator[str]:
    """Yields, for messages, what speaks against cuda_ipc between a teacher rank and its readers."""
    for role, place in [("teacher", writer), *(("student", reader) for reader in readers)]:
        if place.device == "cpu":
            yield f"the {role} is on a CPU"
        elif place.expandable:
            yield f"{place.expandable} turns expandable segments on, whose memory cannot be shared"
    yield from _obstacles_to_sharing(writer, readers)
    for reader in readers:
        if reader.device not in writer.reaches or writer.device not in reader.reaches:
            yield f"GPU {writer.device} of the teacher and GPU {reader.device} of a student do not reach each other"
