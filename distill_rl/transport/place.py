"""Where a rank's tensors are: what the choice of a transport depends on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank's tensors are."""

    node_id: str
    device: str
    """`"cpu"` or the UUID of a GPU."""
    uid: int
    expandable: str = ""
    """The environment variable that turns expandable segments on, whose memory cannot be shared. Empty: none."""
    reaches: tuple[str, ...] = ()
    """UUIDs of the GPUs whose memory this process can map: its own, and visible peers."""


def place_of(device: torch.device, node_id: str) -> Place:
    """The place of the calling process, whose model is on `device`. For a GPU, this initialises CUDA.

    Args:
        device: without an index, the current GPU.
        node_id: of this process's node, as Ray names it.
    """
    expandable = expandable_segments(os.environ)
    if device.type != "cuda":
        return Place(node_id, "cpu", os.getuid(), expandable)
    import torch

    this_gpu = torch.cuda.current_device() if device.index is None else device.index
    reaches = tuple(
        gpu_uuid(index)
        for index in range(torch.cuda.device_count())
        if index == this_gpu or torch.cuda.can_device_access_peer(this_gpu, index)
    )
    return Place(node_id, gpu_uuid(this_gpu), os.getuid(), expandable, reaches)


def gpu_uuid(index: int) -> str:
    """The name of a GPU that is the same in all processes. Its index depends on CUDA_VISIBLE_DEVICES."""
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def expandable_segments(environment: Mapping[str, str]) -> str:
    """The environment variable that turns expandable segments of torch's allocator on; empty if none does.

    Args:
        environment: variables and their values, such as `os.environ`.
    """
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        settings = environment.get(variable, "").replace(" ", "").lower().split(",")
        if "expandable_segments:true" in settings:
            return variable
    return ""
