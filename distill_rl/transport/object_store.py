"""Ray's object store: from any node to any node, through shared memory on one node.

Tensors travel as numpy arrays, which readers map without a copy; a bare `torch.Tensor` would be pickled
(8.6 ms against 79 ms for 64 MiB). The object is immutable, so a handle can never read a later write:
the slot only bounds how many objects a teacher keeps alive.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import ray
import torch
from torch import Tensor

from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout, Slot, describe


class ObjectStoreTransport:
    """Keeps each slot's last object alive until the slot is written again or released."""

    name = "object_store"

    def __init__(self, *, deadline_s: float):
        self._deadline_s = deadline_s
        self._kept: dict[int, tuple[int, ray.ObjectRef]] = {}

    def publish(self, slot: Slot, tensors: Mapping[str, Tensor], layout: Layout) -> Handle:
        last, _ = self._kept.get(slot.index, (0, None))
        if slot.generation % 2 or slot.generation <= last:
            raise TransportError(f"slot {slot.index}", f"the generation must be even and above {last}", slot.generation)
        reference = ray.put([_to_numpy(tensor) for tensor in tensors.values()])
        self._kept[slot.index] = (slot.generation, reference)
        node_id = ray.get_runtime_context().get_node_id()
        return Handle(self.name, node_id, "cpu", slot, layout, describe(tensors), reference)

    @contextmanager
    def fetch(self, handle: Handle) -> Iterator[dict[str, Tensor]]:
        try:
            arrays = ray.get(handle.payload, timeout=self._deadline_s)
        except ray.exceptions.GetTimeoutError:
            raise TransportError(
                f"slot {handle.slot.index}", f"its object must arrive within {self._deadline_s:g} s"
            ) from None
        yield {spec.name: _to_tensor(array, spec.dtype) for spec, array in zip(handle.tensors, arrays, strict=True)}

    def release(self, slot: Slot) -> None:
        if self._kept.get(slot.index, (0, None))[0] == slot.generation:
            del self._kept[slot.index]

    def close(self) -> None:
        self._kept.clear()


def _to_numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _to_tensor(array: np.ndarray, dtype: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
