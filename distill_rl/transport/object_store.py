"""Ray's object store: from any node to any node, through shared memory on one node.

Tensors travel as numpy arrays, which readers map without a copy; a bare `torch.Tensor` would be pickled (8.6 ms against
79 ms for 64 MiB). An object is immutable, so a handle can never read a later write, and nothing is acknowledged. A slot
only bounds how many objects a teacher keeps alive.

A handle has the location of its object and no reference, which Ray would count on all processes that the handle passes
through, the driver above all. So it does not keep the object alive: the teacher does, until it writes the slot again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch
from ray._private.worker import global_worker
from torch import Tensor

from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout, Offer, Receipt, Ring, Slot, Transport, describe
from distill_rl.transport.ring import unwritten

_ray: Any = global_worker
"""This process's part of Ray. It has no public way to make a reference to an object that another process keeps alive."""


class ObjectStoreTransport(Transport):
    """Keeps each slot's last object alive until the slot is written again.

    Args:
        ring: bounds the slots; None for a side that only reads.
        deadline_s: seconds that a fetch may wait for an object.
    """

    name = "object_store"

    def __init__(self, ring: Ring | None = None, *, deadline_s: float, source: str = "", node_id: str = ""):
        self._ring, self._source = ring, source
        self._deadline_s, self._node_id = deadline_s, node_id
        self._kept: dict[int, tuple[int, ray.ObjectRef]] = {}
        """Generation and object by slot."""

    def offer(self, reader: int) -> Offer:
        """Returns an offer without content, for any reader: a fetch needs nothing but the handle."""
        return Offer(self.name, self._source, self._node_id, "cpu", reader)

    def open(self, offer: Offer) -> Receipt:
        """Returns a receipt. Nothing is opened or checked."""
        return Receipt(offer.reader)

    def publish(self, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        """Puts the tensors into the object store, copied to host memory, and returns a handle with its location.

        The slot's previous object is let go of. Acknowledgements are not needed, and neither sizes nor readers are
        checked.

        Raises:
            TransportError: no such slot (checked only if this side has a ring), or a generation that is odd or not
                larger than the slot's previous one.
        """
        if self._ring is not None and not 0 <= slot.index < self._ring.num_slots:
            raise TransportError(f"slot {slot.index}", f"the ring has {self._ring.num_slots} slots")
        last, _ = self._kept.get(slot.index, (0, None))
        if slot.generation % 2 or slot.generation <= last:
            raise TransportError(f"slot {slot.index}", f"the generation must be even and above {last}", slot.generation)
        reference = ray.put([_to_numpy(tensor) for tensor in tensors.values()])
        self._kept[slot.index] = (slot.generation, reference)
        # What Ray needs to find an object that this process owns, in its own bytes. Unlike a reference it does not keep it alive.
        _, owner, status = _ray.core_worker.serialize_object_ref(reference)
        location = reference.binary(), owner, status
        return Handle(self.name, self._node_id, slot, layout, describe(tensors), location)

    @contextmanager
    def fetch(self, handle: Handle) -> Iterator[dict[str, Tensor]]:
        """Gives a `with` block the tensors in host memory, by name, read-only; no copy if the object is on this node.

        Waits for the object, which may come from another node. Nothing is acknowledged.

        Raises:
            TransportError: the object does not arrive within the deadline, its publisher has died, or the block wrote
                to a tensor.
        """
        what = f"slot {handle.slot.index}"
        object_id, owner, status = handle.payload
        reference: ray.ObjectRef = ray.ObjectRef(object_id)  # of this process, to what its owner keeps alive
        _ray.core_worker.deserialize_and_register_object_ref(object_id, ray.ObjectRef.nil(), owner, status)
        try:
            arrays = ray.get(reference, timeout=self._deadline_s)
        except ray.exceptions.GetTimeoutError:
            raise TransportError(what, f"its object must arrive within {self._deadline_s:g} s") from None
        except ray.exceptions.ObjectLostError as error:
            rule = "the process that published it must live until it is read"
            raise TransportError(what, rule, type(error).__name__) from error
        tensors = {spec.name: _to_tensor(array, spec.dtype) for spec, array in zip(handle.tensors, arrays, strict=True)}
        with unwritten(tensors, handle.slot):
            yield tensors

    def close(self) -> None:
        """Lets go of the slots' objects; Ray frees those to which nobody else holds a reference."""
        self._kept.clear()


def _to_numpy(tensor: Tensor) -> np.ndarray:
    """The tensor in host memory, without its gradient; bfloat16, which numpy lacks, as int16 of the same bits."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _to_tensor(array: np.ndarray, dtype: str) -> Tensor:
    """The tensor of an array from `_to_numpy`, without a copy."""
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
