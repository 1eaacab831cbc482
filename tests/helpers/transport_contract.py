"""The contract of transports. A test class inherits the parts that apply to its transport and defines `stage`.

class TestSharedMemory(Every, Acknowledged, Apart):
    @pytest.fixture
    def stage(self): ...
"""

from __future__ import annotations

import pickle

import pytest
import torch

from distill_rl.errors import TransportError
from distill_rl.transport.base import Layout, Ring, Slot
from tests.helpers.command import shared_memory, until

ROOM = 1 << 20
LAYOUT = Layout(0, 2, 3)
NO_READERS = Layout(0, 2, 3, readers=())
"""For content that may be overwritten at any time, because no acknowledgement is required."""
ROUNDS = 700


def targets(seed=0, tokens=6):
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 9, (tokens, 4), generator=generator, dtype=torch.int32),
        "logprobs": torch.randn(tokens, 4, generator=generator).bfloat16(),
        "half": torch.randn(tokens, 4, generator=generator).half(),
        "rest_logprob": torch.randn(tokens, generator=generator),
    }


def assert_same(read, written):
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def _is_gone(reader, handle, written):
    """Whether the object can no longer be read; as long as it can, it is what was written."""
    try:
        assert_same(reader.read(handle), written)
    except TransportError as error:
        return "must live until it is read" in str(error)
    return False


class Every:
    """Holds for all transports."""

    def test_published_tensors_are_fetched_bit_for_bit(self, stage):
        writer, reader = stage.pair(Ring(3, ROOM))
        handle = writer.publish(Slot(1, 2), targets(), LAYOUT)
        assert_same(reader.read(handle), targets())
        assert handle.layout == LAYOUT
        assert handle.num_bytes == sum(tensor.nbytes for tensor in targets().values())

    def test_handle_describes_its_content(self, stage):
        writer, _ = stage.pair(Ring(1, ROOM))
        handle = writer.publish(Slot(0, 2), targets(tokens=2_000), Layout(0, 1, 2_000))
        assert (handle.transport, handle.node_id) == (stage.name, "node")
        assert [(spec.name, spec.shape, spec.dtype) for spec in handle.tensors] == [
            ("ids", (2_000, 4), "int32"),
            ("logprobs", (2_000, 4), "bfloat16"),
            ("half", (2_000, 4), "float16"),
            ("rest_logprob", (2_000,), "float32"),
        ]

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64])
    @pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 3, 2)])
    def test_any_dtype_and_shape_arrives(self, stage, dtype, shape):
        writer, reader = stage.pair(Ring(1, ROOM))
        tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        read = reader.read(writer.publish(Slot(0, 2), {"x": tensor}, LAYOUT))["x"]
        assert (read.dtype, read.shape) == (dtype, tensor.shape)
        assert torch.equal(read, tensor)

    def test_slot_is_rewritten_with_another_size(self, stage):
        writer, reader = stage.pair(Ring(1, ROOM))
        for generation, tokens in ((2, 6), (4, 3), (6, 12), (8, 1)):  # the last: a ragged batch
            written = targets(seed=generation, tokens=tokens)
            handle = writer.publish(Slot(0, generation), written, Layout(0, 1, tokens))
            assert_same(reader.read(handle), written)

    @pytest.mark.parametrize("generation", [2, 1, 5, 4])
    def test_odd_or_old_generation_is_refused(self, stage, generation):
        writer, reader = stage.pair(Ring(1, ROOM))
        handle = writer.publish(Slot(0, 4), targets(), LAYOUT)
        reader.read(handle)
        with pytest.raises(TransportError, match="even and above 4"):
            writer.publish(Slot(0, generation), targets(), LAYOUT)
        assert_same(reader.read(handle), targets())

    def test_slot_outside_the_ring_is_refused(self, stage):
        writer, _ = stage.pair(Ring(2, ROOM))
        for index in (2, -1):
            with pytest.raises(TransportError, match="ring has 2 slots"):
                writer.publish(Slot(index, 2), targets(), LAYOUT)

    def test_slots_are_independent_and_read_in_any_order(self, stage):
        writer, reader = stage.pair(Ring(3, ROOM))
        written = [targets(seed=index) for index in range(3)]
        handles = [writer.publish(Slot(index, 2), tensors, LAYOUT) for index, tensors in enumerate(written)]
        for index in (2, 0, 1):
            assert_same(reader.read(handles[index]), written[index])

    def test_slot_may_be_read_repeatedly(self, stage):
        writer, reader = stage.pair(Ring(1, ROOM))
        handle = writer.publish(Slot(0, 2), targets(), LAYOUT)
        for _ in range(3):
            assert_same(reader.read(handle), targets())

    def test_late_reader_never_sees_a_later_write(self, stage):
        writer, reader = stage.pair(Ring(1, ROOM))
        stale = writer.publish(Slot(0, 2), targets(seed=1), NO_READERS)
        writer.publish(Slot(0, 4), targets(seed=2), LAYOUT)
        if stage.name == "object_store":  # objects are immutable, and Ray frees them some time later
            until(lambda: _is_gone(reader, stale, targets(seed=1)), "the earlier object to be freed")
        else:
            with pytest.raises(TransportError, match="generation 4"):
                reader.read(stale)

    def test_strided_and_differentiable_tensors_are_copied(self, stage):
        writer, reader = stage.pair(Ring(1, ROOM))
        strided = {"x": torch.arange(12.0).view(3, 4).t(), "y": torch.ones(3, requires_grad=True)}
        assert_same(reader.read(writer.publish(Slot(0, 2), strided, LAYOUT)), strided)

    @pytest.mark.parametrize("part", [slice(None), slice(2, 3)], ids=["all", "a part"])
    @pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
    @pytest.mark.parametrize("name", ["ids", "logprobs"])
    def test_write_to_a_view_is_an_error(self, stage, name, part, inference):
        writer, reader = stage.pair(Ring(1, ROOM))
        handle = writer.publish(Slot(0, 2), targets(), LAYOUT)
        with pytest.raises(TransportError, match=f"{name} of slot 0.*must not be written to"):
            reader.write_to_view(handle, name, part, inference)

    def test_error_inside_the_block_propagates(self, stage):
        writer, reader = stage.pair(Ring(1, ROOM))
        handle = writer.publish(Slot(0, 2), targets(), LAYOUT)
        with pytest.raises(KeyError, match="of the reader's own"):
            reader.fail_inside(handle)
        assert_same(reader.read(handle), targets())

    def test_two_readers_read_the_same(self, stage):
        writer, first, second = stage.trio(Ring(1, ROOM, (0, 1)))
        for generation in (2, 4):
            written = targets(seed=generation)
            handle = writer.publish(Slot(0, generation), written, LAYOUT)
            first.begin(handle)
            assert_same(second.read(handle), written)
            assert_same(first.look(), written)
            first.end()

    def test_reader_may_open_after_the_first_write(self, stage):
        writer, reader = stage.writer(Ring(2, ROOM)), stage.reader()
        handle = writer.publish(Slot(0, 2), targets(), LAYOUT)
        stage.connect(writer, reader)
        assert_same(reader.read(handle), targets())

    def test_one_reader_reads_several_teachers(self, stage):
        reader = stage.reader()
        handles = []
        for number in range(2):
            writer = stage.writer(Ring(1, ROOM), source=f"teacher-{number}/dp0-tp0")
            stage.connect(writer, reader)
            handles.append(writer.publish(Slot(0, 2), targets(seed=number), LAYOUT))
        for number in (1, 0):
            assert_same(reader.read(handles[number]), targets(seed=number))

    def test_closing_keeps_live_views_valid(self, stage):
        writer, reader = stage.pair(Ring(1, ROOM))
        reader.begin(writer.publish(Slot(0, 2), targets(), LAYOUT))
        assert_same(reader.close_with_live_views(), targets())

    def test_hundreds_of_rounds_leak_nothing(self, stage):
        """700 rounds of 96 KiB would show as 65 MiB; 8 MiB is what an allocator may keep."""
        tensors = {"x": torch.ones(8192, 3)}
        writer, reader = stage.pair(Ring(3, ROOM))
        before, shared = [], set()
        for turn in range(ROUNDS + 200):
            if turn == 200:
                before, shared = [peer.footprint() for peer in (writer, reader)], shared_memory()
            handle = writer.publish(Slot(turn % 3, 2 * (turn // 3) + 2), tensors, LAYOUT)
            reader.read(handle)
        del handle
        after = [peer.footprint() for peer in (writer, reader)]
        for (memory, fds), (memory_before, fds_before) in zip(after, before):
            assert memory - memory_before < 8 << 20
            assert fds == fds_before
        until(lambda: shared_memory() <= shared, "no more shared memory than before")


class Acknowledged:
    """For slots that are written again: acknowledgements are required, generations and rings are checked."""

    def test_handle_is_small_and_picklable(self, stage):
        writer, reader = stage.pair(Ring(1, ROOM))
        handle = writer.publish(Slot(0, 2), targets(tokens=2_000), Layout(0, 1, 2_000))
        wire = pickle.dumps(handle)
        assert len(wire) < 2_000
        assert_same(reader.read(pickle.loads(wire)), targets(tokens=2_000))

    def test_slot_unread_by_one_reader_is_refused(self, stage):
        writer, first, second = stage.trio(Ring(1, ROOM, (0, 1)))
        handle = writer.publish(Slot(0, 2), targets(), LAYOUT)
        first.read(handle)
        with pytest.raises(TransportError, match="still reading: 1"):
            writer.publish(Slot(0, 4), targets(seed=4), LAYOUT)
        assert_same(second.read(handle), targets())
        writer.publish(Slot(0, 4), targets(), LAYOUT)

    def test_only_readers_of_the_content_must_acknowledge(self, stage):
        writer, _, second = stage.trio(Ring(1, ROOM, (0, 1)))
        for generation in (2, 4):
            second.read(writer.publish(Slot(0, generation), targets(), Layout(0, 2, 3, readers=(1,))))
        with pytest.raises(TransportError, match=r"ring is for readers \[0, 1\]; got \[7\]"):
            writer.publish(Slot(0, 6), targets(), Layout(0, 2, 3, readers=(1, 7)))

    def test_delayed_reader_keeps_only_its_slot(self, stage):
        writer, reader = stage.pair(Ring(2, ROOM))
        reader.begin(writer.publish(Slot(0, 2), targets(seed=1), LAYOUT))
        for generation in (2, 4, 6):
            writer.publish(Slot(1, generation), targets(seed=2), NO_READERS)
            with pytest.raises(TransportError, match="still reading"):
                writer.publish(Slot(0, generation + 2), targets(seed=3), LAYOUT)
        assert_same(reader.look(), targets(seed=1))
        reader.end()
        writer.publish(Slot(0, 4), targets(), LAYOUT)

    def test_overwrite_while_reading_is_detected(self, stage):
        writer, reader = stage.pair(Ring(1, ROOM))
        reader.begin(writer.publish(Slot(0, 2), targets(), NO_READERS))
        writer.publish(Slot(0, 4), targets(seed=4), LAYOUT)
        with pytest.raises(TransportError, match="is for generation 2; got generation 4"):
            reader.end()

    @pytest.mark.parametrize("how", ["write_to_view", "fail_inside"])
    def test_failed_block_acknowledges_nothing(self, stage, how):
        writer, reader = stage.pair(Ring(1, ROOM))
        handle = writer.publish(Slot(0, 2), targets(), LAYOUT)
        arguments = ("ids", slice(None), False) if how == "write_to_view" else ()
        with pytest.raises((TransportError, KeyError)):
            getattr(reader, how)(handle, *arguments)
        with pytest.raises(TransportError, match="still reading: 0"):
            writer.publish(Slot(0, 4), targets(), LAYOUT)

    def test_oversized_tensors_leave_the_slot_unchanged(self, stage):
        writer, reader = stage.pair(Ring(1, slot_bytes=4096))
        fits = {"x": torch.ones(1024)}
        handle = writer.publish(Slot(0, 2), fits, LAYOUT)
        assert_same(reader.read(handle), fits)
        with pytest.raises(TransportError, match=r"4096 bytes must hold .* got 4352 bytes"):
            writer.publish(Slot(0, 4), {"x": torch.ones(1025)}, LAYOUT)
        assert_same(reader.read(handle), fits)

    def test_unopened_ring_is_refused(self, stage):
        writer, reader = stage.writer(Ring(1, ROOM)), stage.reader()
        handle = writer.publish(Slot(0, 2), targets(), LAYOUT)
        with pytest.raises(TransportError, match="must be opened before it is fetched"):
            reader.read(handle)

    def test_ring_is_offered_to_its_readers_only(self, stage):
        with pytest.raises(TransportError, match=r"its readers are \[0\]; got 1"):
            stage.writer(Ring(1, ROOM)).offer(1)

    def test_later_ring_of_a_source_replaces_the_first(self, stage):
        first, reader = stage.pair(Ring(1, ROOM))
        stale = first.publish(Slot(0, 2), targets(seed=1), LAYOUT)
        second = stage.writer(Ring(1, ROOM))
        stage.connect(second, reader)
        fresh = second.publish(Slot(0, 2), targets(seed=2), LAYOUT)
        assert_same(reader.read(fresh), targets(seed=2))
        with pytest.raises(TransportError, match="replaced by that of a newer writer"):
            reader.read(stale)

    def test_reader_on_another_node_is_refused(self, stage):
        offer = stage.writer(Ring(1, ROOM), node_id="a").offer(0)
        with pytest.raises(TransportError, match="on node a; got a reader on node b; use transport=object_store"):
            stage.reader(node_id="b").open(offer)


class Apart:
    """Writer and readers are processes, which the tests kill. `stage` must end with sides that no other test uses."""

    def test_dead_reader_is_an_error_not_a_hang(self, stage):
        writer, reader = stage.pair(Ring(1, ROOM))
        reader.begin(writer.publish(Slot(0, 2), targets(), LAYOUT))
        reader.side.kill()
        if stage.name != "object_store":  # an object is never written again
            with pytest.raises(TransportError, match="still reading: 0"):
                writer.publish(Slot(0, 4), targets(), LAYOUT)
        stage.writer(Ring(1, ROOM)).publish(Slot(0, 2), targets(), LAYOUT)  # a new ring works

    def test_dead_writer_leaves_content_or_an_error(self, stage):
        writer, reader = stage.pair(Ring(2, ROOM))
        written = targets(tokens=20_000)
        handle = writer.publish(Slot(0, 2), written, Layout(0, 1, 20_000))
        writer.side.kill()
        if stage.name == "shared_memory":
            assert_same(reader.read(handle), written)
        else:
            with pytest.raises(TransportError):
                until(lambda: assert_same(reader.read(handle), written), "an object without an owner is lost")

    def test_ring_of_a_dead_writer_cannot_be_opened(self, stage):
        writer, reader = stage.writer(Ring(1, ROOM)), stage.reader()
        offer = writer.offer(0)
        writer.side.kill()
        if stage.name == "object_store":  # there is nothing to open
            reader.open(offer)
        else:
            with pytest.raises(TransportError, match=r"ring of teacher/dp0-tp0"):
                reader.open(offer)
