"""One contract, every transport. A new one is a line in TRANSPORTS."""

import pickle

import pytest
import torch

from distill_rl.errors import TransportError
from distill_rl.transport.base import Layout, Slot
from distill_rl.transport.local import LocalTransport

pytestmark = pytest.mark.ray


def local(ray):
    return LocalTransport(3)


def object_store(ray):
    from distill_rl.transport.object_store import ObjectStoreTransport

    return ObjectStoreTransport(deadline_s=30)


TRANSPORTS = [local, object_store]


@pytest.fixture(params=TRANSPORTS, ids=lambda make: make.__name__)
def transport(request, ray_cluster):
    made = request.param(ray_cluster)
    yield made
    made.close()


def targets(seed=0, tokens=6):
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 9, (tokens, 4), generator=generator, dtype=torch.int32),
        "logprobs": torch.randn(tokens, 4, generator=generator).bfloat16(),
        "half": torch.randn(tokens, 4, generator=generator).half(),
        "rest_logprob": torch.randn(tokens, generator=generator),
    }


LAYOUT = Layout(0, 2, 3)


def assert_same(read, written):
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_what_is_published_is_fetched_bit_for_bit(transport):
    written = targets()
    handle = transport.publish(Slot(1, 2), written, LAYOUT)
    with transport.fetch(handle) as read:
        assert_same(read, written)
    assert handle.layout == LAYOUT
    assert handle.num_bytes == sum(tensor.nbytes for tensor in written.values())


def test_a_handle_is_small_and_describes_what_it_claims(transport):
    handle = transport.publish(Slot(0, 2), targets(tokens=20_000), Layout(0, 1, 20_000))
    assert [(spec.name, spec.shape, spec.dtype) for spec in handle.tensors] == [
        ("ids", (20_000, 4), "int32"),
        ("logprobs", (20_000, 4), "bfloat16"),
        ("half", (20_000, 4), "float16"),
        ("rest_logprob", (20_000,), "float32"),
    ]
    if transport.name == "local":
        assert len(pickle.dumps(handle)) < 2_000


def test_a_slot_is_written_again_after_its_reader_is_done_also_with_another_shape(transport):
    for generation, tokens in ((2, 6), (4, 3), (6, 12)):
        written = targets(seed=generation, tokens=tokens)
        handle = transport.publish(Slot(0, generation), written, Layout(0, 1, tokens))
        with transport.fetch(handle) as read:
            assert_same(read, written)


@pytest.mark.parametrize("generation", [2, 1, 5])
def test_a_generation_that_does_not_grow_or_is_odd_is_refused(transport, generation):
    with transport.fetch(transport.publish(Slot(0, 4), targets(), LAYOUT)):
        pass
    with pytest.raises(TransportError, match="generation"):
        transport.publish(Slot(0, generation), targets(), LAYOUT)


def test_a_late_reader_never_sees_a_later_write(transport):
    first = targets(seed=1)
    stale = transport.publish(Slot(0, 2), first, LAYOUT)
    transport.release(Slot(0, 2))
    transport.publish(Slot(0, 4), targets(seed=2), LAYOUT)
    if transport.name == "object_store":  # what a handle claims is immutable there
        with transport.fetch(stale) as read:
            assert_same(read, first)
    else:
        with pytest.raises(TransportError, match="generation"), transport.fetch(stale):
            pass


def test_slots_are_independent_and_read_in_any_order(transport):
    written = [targets(seed=index) for index in range(3)]
    handles = [transport.publish(Slot(index, 2), tensors, LAYOUT) for index, tensors in enumerate(written)]
    for index in (2, 0, 1):
        with transport.fetch(handles[index]) as read:
            assert_same(read, written[index])


def test_the_source_may_change_after_publishing(transport):
    written = targets()
    kept = {name: tensor.clone() for name, tensor in written.items()}
    handle = transport.publish(Slot(0, 2), written, LAYOUT)
    for tensor in written.values():
        tensor.zero_()
    with transport.fetch(handle) as read:
        assert_same(read, kept)


def test_releasing_twice_or_what_was_never_written_does_nothing(transport):
    transport.publish(Slot(0, 2), targets(), LAYOUT)
    transport.release(Slot(0, 2))
    transport.release(Slot(0, 2))
    transport.release(Slot(2, 8))
    handle = transport.publish(Slot(0, 4), targets(), LAYOUT)
    with transport.fetch(handle) as read:
        assert_same(read, targets())


def test_a_non_contiguous_tensor_is_copied_right(transport):
    written = {"x": torch.arange(12.0).view(3, 4).t()}
    with transport.fetch(transport.publish(Slot(0, 2), written, Layout(0, 4, 1))) as read:
        assert_same(read, written)


def test_the_local_ring_refuses_to_write_over_what_is_still_read():
    transport = LocalTransport(1, num_readers=2)
    handle = transport.publish(Slot(0, 2), targets(), LAYOUT)
    with transport.fetch(handle):
        pass
    with pytest.raises(TransportError, match="1 still reading"):
        transport.publish(Slot(0, 4), targets(), LAYOUT)
    with transport.fetch(handle):
        pass
    transport.publish(Slot(0, 4), targets(), LAYOUT)


def test_the_local_ring_notices_an_overwrite_in_mid_read():
    transport = LocalTransport(1)
    handle = transport.publish(Slot(0, 2), targets(), LAYOUT)
    reading = transport.fetch(handle)
    reading.__enter__()
    transport.release(Slot(0, 2))
    transport.publish(Slot(0, 4), targets(), LAYOUT)
    with pytest.raises(TransportError, match="generation"):
        reading.__exit__(None, None, None)


def test_a_slot_outside_the_ring_is_refused():
    with pytest.raises(TransportError, match="ring has 2 slots"):
        LocalTransport(2).publish(Slot(2, 2), targets(), LAYOUT)


def test_object_store_handles_travel_between_actors_and_arrive_as_read_only_views(ray_cluster):
    ray = ray_cluster

    @ray.remote(num_cpus=0)
    class Writer:
        def publish(self):
            from distill_rl.transport.object_store import ObjectStoreTransport

            self.transport = ObjectStoreTransport(deadline_s=30)
            return (self.transport.publish(Slot(0, 2), targets(), LAYOUT),)

    @ray.remote(num_cpus=0)
    class Reader:
        def read(self, handles):
            from distill_rl.transport.object_store import ObjectStoreTransport

            with ObjectStoreTransport(deadline_s=30).fetch(handles[0]) as read:
                return {name: tensor.float().sum().item() for name, tensor in read.items()}

    writer, reader = Writer.remote(), Reader.remote()
    sums = ray.get(reader.read.remote(writer.publish.remote()), timeout=60)
    assert sums == {name: tensor.float().sum().item() for name, tensor in targets().items()}
    for actor in (writer, reader):
        ray.kill(actor)
