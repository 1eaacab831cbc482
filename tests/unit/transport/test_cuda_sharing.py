"""The part of CUDA IPC that can be tested without a GPU: whether memory may be exported."""

import pytest

from distill_rl.errors import TransportError
from distill_rl.transport.cuda_ipc import check_alone, check_export

SEGMENTS = [
    {"address": 0x1000, "blocks": [{"address": 0x1000}, {"address": 0x1800}]},
    {"address": 0x4000, "blocks": [{"address": 0x4000}]},
]
"""As in `torch.cuda.memory_snapshot()`."""


def arguments(handle=b"\0c", offset=0):
    """As returned by `reduce_tensor`, with only the parts that are checked."""
    return (*[None] * 7, handle, 10 << 20, offset)


def test_whole_allocation_may_be_exported():
    check_alone(SEGMENTS, 0x4000)
    check_export(arguments())


@pytest.mark.parametrize(
    ("address", "found"), [(0x1000, "one of 2 blocks"), (0x1800, "a part of a larger one"), (0x4800, "a part")]
)
def test_part_of_an_allocation_is_refused(address, found):
    with pytest.raises(TransportError, match=f"allocation of its own, .* got {found}.*; use transport=object_store"):
        check_alone(SEGMENTS, address)


@pytest.mark.parametrize(
    ("case", "found"),
    [
        (
            arguments(handle=b"\0e"),
            "memory of cudaMalloc; got an allocation of kind b'e'; turn expandable segments off",
        ),
        (arguments(offset=4096), "allocation of its own, .* got the part from byte 4096 of a larger one"),
    ],
)
def test_unmappable_export_is_refused(case, found):
    with pytest.raises(TransportError, match=found):
        check_export(case)
