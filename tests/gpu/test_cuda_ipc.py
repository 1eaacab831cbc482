"""The transport contract between processes on one GPU, and what holds for CUDA IPC alone."""

import pytest
import torch

from distill_rl.errors import TransportError
from distill_rl.transport.base import Layout, Ring, Slot
from distill_rl.transport.choose import choose
from tests.helpers.transports import Process, Stage

pytest.register_assert_rewrite("tests.helpers.transport_contract")

from tests.helpers.transport_contract import LAYOUT, ROOM, Acknowledged, Apart, Every, assert_same, targets  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def processes():
    """Kept from test to test; one that a test has killed is made anew."""
    sides = []
    yield sides
    for side in sides:
        side.kill()


@pytest.fixture
def stage(processes):
    processes[:] = [side if side.alive else Process() for side in processes] or [Process() for _ in range(3)]
    made = Stage("cuda_ipc", processes, device="cuda")
    yield made
    made.close()


class TestCudaIpc(Every, Acknowledged, Apart):
    pass


def test_views_lie_in_the_writers_memory_and_nothing_is_copied(stage):
    writer, reader = stage.pair(Ring(2, 64 << 20))
    handle = writer.publish(Slot(0, 2), {"x": torch.ones(16 << 20)}, Layout(0, 1, 16 << 20))
    assert reader.side.tell("device_memory_of_fetch", reader.number, handle) == 0


def test_a_write_waits_for_kernels_that_still_read(stage):
    """The reader's block ends on the CPU long before its kernels do; the next content must not reach them."""
    size = 4 << 20
    writer, reader = stage.pair(Ring(1, 4 * size))
    for generation in range(2, 42, 2):
        handle = writer.publish(Slot(0, generation), {"x": torch.full((size,), float(generation))}, LAYOUT)
        reader.side.tell("mean_later", reader.number, handle)
    assert reader.side.tell("means") == [float(generation) for generation in range(2, 42, 2)]


def test_a_ring_is_refused_inside_the_process_that_wrote_it(stage):
    writer = stage.writer(Ring(1, ROOM))
    reader = stage.reader(side=writer.side)
    with pytest.raises(TransportError, match="use transport local"):
        reader.open(writer.offer(0))


def test_many_small_rings_and_a_big_one_live_side_by_side(stage):
    reader = stage.reader()
    handles = []
    for number, room in enumerate((4096, 64 << 20, 4096, 4096)):
        writer = stage.writer(Ring(2, room), source=f"teacher-{number}/dp0-tp0")
        stage.connect(writer, reader)
        handles.append(writer.publish(Slot(1, 2), targets(seed=number), LAYOUT))
    for number, handle in enumerate(handles):
        assert_same(reader.read(handle), targets(seed=number))


def test_auto_takes_it_between_two_processes_on_one_gpu(stage):
    writer, reader = (side.tell("place", "cuda", "node") for side in stage.sides[:2])
    assert writer.device == reader.device
    assert choose("auto", writer, [reader]).name == "cuda_ipc"


def test_expandable_segments_are_refused_and_the_variable_is_named(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from distill_rl.transport.cuda_ipc import CudaIpcTransport

    with pytest.raises(TransportError, match="PYTORCH_CUDA_ALLOC_CONF turns expandable segments on"):
        CudaIpcTransport(Ring(1, ROOM))
