from contextlib import ExitStack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distill_rl.errors import TransportError
from distill_rl.transport.base import Layout, Ring, Slot, assemble, plan
from distill_rl.transport.local import LocalTransport


def cut(rows, width, sizes):
    """Layouts of consecutive micro-batches of these sizes."""
    first, layouts = 0, []
    for size in sizes:
        layouts.append(Layout(first, size, width))
        first += size
    assert first == rows
    return layouts


def ring(num_slots):
    """A transport that writes and reads."""
    transport = LocalTransport(Ring(num_slots, slot_bytes=4096))
    transport.accept(transport.open(transport.offer(0)))
    return transport


@st.composite
def splits(draw):
    rows = draw(st.integers(1, 12))
    sizes, left = [], rows
    while left:
        sizes.append(draw(st.integers(1, left)))
        left -= sizes[-1]
    first = draw(st.integers(0, rows - 1))
    return rows, draw(st.integers(1, 5)), sizes, first, draw(st.integers(1, rows - first)), draw(st.randoms())


@given(splits())
def test_any_rows_of_any_split_are_restored(case):
    rows, width, sizes, first, count, random = case
    whole = {"ids": torch.arange(rows * width * 2).view(-1, 2), "rest": torch.arange(rows * width).double()}
    layouts = cut(rows, width, sizes)
    order = list(range(len(layouts)))
    random.shuffle(order)
    transport = ring(len(layouts))
    handles = []
    for slot in order:
        layout = layouts[slot]
        tokens = slice(layout.first_row * width, (layout.first_row + layout.num_rows) * width)
        handles.append(transport.publish(Slot(slot, 2), {name: t[tokens] for name, t in whole.items()}, layout))
    with ExitStack() as stack:
        part = assemble(lambda handle: stack.enter_context(transport.fetch(handle)), handles, first, count)
        for name, tensor in whole.items():
            assert torch.equal(part[name], tensor[first * width : (first + count) * width])


def test_rows_of_one_slot_are_views():
    transport = ring(1)
    handle = transport.publish(Slot(0, 2), {"x": torch.arange(8)}, Layout(4, 4, 2))
    with transport.fetch(handle) as whole:
        part = assemble(lambda _: whole, [handle], 5, 2)
        assert part["x"].tolist() == [2, 3, 4, 5]
        assert part["x"].untyped_storage().data_ptr() == whole["x"].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("layouts", "why"),
    [
        ([Layout(0, 2, 4), Layout(3, 2, 4)], "a hole"),
        ([Layout(0, 3, 4), Layout(2, 3, 4)], "an overlap"),
        ([Layout(0, 4, 4)], "an end that comes too early"),
        ([], "nothing"),
    ],
)
def test_rows_covered_by_none_or_two_are_refused(layouts, why):
    with pytest.raises(TransportError, match="exactly one"):
        plan(layouts, 0, 5)
