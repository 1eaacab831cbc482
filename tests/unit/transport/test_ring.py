import gc
import weakref
from array import array

import pytest
import torch

from distill_rl.errors import TransportError
from distill_rl.transport.base import Handle, Layout, Offer, Ring, Slot, TensorSpec
from distill_rl.transport.ring import (
    ALIGNMENT,
    LINE,
    OpenedRing,
    WrittenRing,
    bytes_needed,
    check_offer,
    place,
    state_bytes,
)
from distill_rl.transport.shared_memory import SharedMemoryTransport

LAYOUT = Layout(0, 1, 4)
RING = Ring(num_slots=2, slot_bytes=1024, readers=(0, 3))


def spec(name, num_bytes):
    return TensorSpec(name, (num_bytes,), "uint8", num_bytes)


@pytest.fixture
def words():
    return array("Q", bytes(state_bytes(RING)))


@pytest.fixture
def writer(words):
    return WrittenRing(ring=RING, nonce=b"", buffer=torch.empty(0), words=words)


def handle(slot):
    return Handle("local", "node", slot, LAYOUT, ())


def write(writer, slot, layout=LAYOUT):
    with writer.writing(slot, (), layout):
        pass


def read(words, slot, reader):
    ring = OpenedRing(ring=RING, nonce=b"", buffer=torch.empty(0), words=words, reader=reader)
    with ring.reading(handle(slot)):
        pass


def test_tensors_are_aligned_within_bytes_needed():
    sizes = (1, 0, 256, 257, 1000)
    offsets, room = place([spec(f"t{index}", size) for index, size in enumerate(sizes)])
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    ends = [offset + size for offset, size in zip(offsets, sizes)]
    assert all(end <= start for end, start in zip(ends, [*offsets[1:], room]))
    assert room == bytes_needed(sizes)


def test_every_word_has_its_own_cache_line(words, writer):
    for index in range(RING.num_slots):
        write(writer, Slot(index, 2))
        for reader in RING.readers:
            read(words, Slot(index, 2), reader)
    used = {position * 8 // LINE for position, word in enumerate(words) if word}
    assert len(used) == RING.num_slots * (1 + len(RING.readers))
    assert 0 not in used  # holds the nonce


def test_slot_is_odd_while_written_and_after_failure(words, writer):
    def fail():
        with writer.writing(Slot(0, 4), (), LAYOUT):
            assert writer.generation(0) == 3
            raise MemoryError

    write(writer, Slot(0, 2))
    for reader in RING.readers:
        read(words, Slot(0, 2), reader)
    with pytest.raises(MemoryError):
        fail()
    for generation in (2, 4):
        with pytest.raises(TransportError, match=f"is for generation {generation}; got generation 3"):
            read(words, Slot(0, generation), 0)
    write(writer, Slot(0, 6))  # failed content has no readers to wait for
    read(words, Slot(0, 6), 0)


def test_old_acknowledgement_does_not_count(words, writer):
    write(writer, Slot(0, 2))
    for reader in RING.readers:
        read(words, Slot(0, 2), reader)
    write(writer, Slot(0, 4))
    read(words, Slot(0, 4), 3)
    with pytest.raises(TransportError, match=r"done with generation 4 .* still reading: 0$"):
        write(writer, Slot(0, 6))


def test_refused_write_changes_nothing(words, writer):
    write(writer, Slot(0, 2))
    before = words[:]
    for slot, specs, layout in (
        (Slot(0, 4), (), LAYOUT),  # not acknowledged
        (Slot(1, 3), (), LAYOUT),
        (Slot(1, 2), (spec("x", 1025),), LAYOUT),
        (Slot(1, 2), (), Layout(0, 1, 4, readers=(1,))),
        (Slot(2, 2), (), LAYOUT),
    ):
        with pytest.raises(TransportError), writer.writing(slot, specs, layout):
            pytest.fail("must not be written")
    assert words == before
    read(words, Slot(0, 2), 0)


@pytest.mark.parametrize(
    ("offer", "message"),
    [
        (Offer("cuda_ipc", "t", "here", "cpu", 0), "its transport is cuda_ipc; got a reader of shared_memory"),
        (Offer("shared_memory", "t", "there", "cpu", 0), "it is on node there; got a reader on node here"),
    ],
)
def test_ring_of_another_transport_or_node_is_refused(offer, message):
    with pytest.raises(TransportError, match=f"ring of t: {message}"):
        check_offer(offer, "shared_memory", "here")


def test_a_closed_transport_holds_no_ring():
    writer = SharedMemoryTransport(Ring(1, 4096, readers=(0,)), source="teacher", node_id="node")
    reader = SharedMemoryTransport(None, source="student", node_id="node")
    reader.open(writer.offer(0))
    written = writer.publish(Slot(0, 2), {"x": torch.arange(4)}, LAYOUT)
    with reader.fetch(written) as tensors:
        assert tensors["x"].tolist() == [0, 1, 2, 3]
    opened = weakref.ref(reader._opened["teacher"])
    tensors = None
    reader.close()
    writer.close()
    gc.collect()
    assert opened() is None
    with pytest.raises(TransportError, match="must be opened before it is fetched"), reader.fetch(written):
        pass
