"""The transport contract between processes on one GPU, and rules of CUDA IPC alone."""

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
    """Shared by all tests of this module; `stage` replaces those that a test has killed."""
    sides = []
    yield sides
    for side in sides:
        side.kill()


@pytest.fixture
def stage(processes):
    processes[:] = [side if side.alive else Process() for side in processes] or [Process() for _ in range(3)]
    stage = Stage("cuda_ipc", processes, device="cuda")
    yield stage
    stage.close()


PEER = pytest.param("cuda:1", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second CUDA device"))


@pytest.fixture(params=["cuda:0", PEER])
def pair(stage, request):
    """A writer on the first GPU and its only reader, on the same GPU or on a peer."""
    reader_stage = Stage("cuda_ipc", stage.sides, device=request.param)

    def connect(ring):
        writer, reader = stage.writer(ring), reader_stage.reader()
        stage.connect(writer, reader)
        return writer, reader

    yield connect
    reader_stage.close()


class TestCudaIpc(Every, Acknowledged, Apart):
    pass


def test_views_share_the_writers_memory(stage):
    writer, reader = stage.pair(Ring(2, 64 << 20))
    handle = writer.publish(Slot(0, 2), {"x": torch.ones(16 << 20)}, Layout(0, 1, 16 << 20))
    assert reader.side.tell("device_memory_of_fetch", reader.number, handle) == 0


def test_a_write_waits_for_running_readers(pair):
    """The reader's block ends on the CPU long before its kernels finish, which must not see the next content."""
    size = 4 << 20
    writer, reader = pair(Ring(1, 4 * size))
    for generation in range(2, 42, 2):
        handle = writer.publish(Slot(0, generation), {"x": torch.full((size,), float(generation))}, LAYOUT)
        reader.side.tell("mean_later", reader.number, handle)
    assert reader.side.tell("means") == [float(generation) for generation in range(2, 42, 2)]


def test_a_read_waits_for_a_pending_write(pair):
    """The handle arrives long before the content, and kernels that read it may run on any of the reader's streams."""
    size = 4 << 20
    writer, reader = pair(Ring(1, 4 * size))
    for generation in range(2, 12, 2):
        content = {"x": torch.full((size,), float(generation))}
        handle = writer.publish_later(Slot(0, generation), content, LAYOUT)
        assert reader.values_in_pieces(handle) == [float(generation)]


def test_a_ring_gets_its_own_allocation(stage):
    """After 6 MiB, the allocator's 20 MiB block has room for a small ring, but a ring inside that block is refused."""
    stage.sides[0].tell("hold_gpu_memory", 6 << 20)
    writer, reader = stage.pair(Ring(1, ROOM))
    stage.sides[0].tell("hold_gpu_memory", 1 << 20)
    handle = writer.publish(Slot(0, 2), targets(), LAYOUT)
    assert_same(reader.read(handle), targets())


def test_a_ring_cannot_be_opened_by_its_writer(stage):
    writer = stage.writer(Ring(1, ROOM))
    reader = stage.reader(side=writer.side)
    with pytest.raises(TransportError, match="use transport local"):
        reader.open(writer.offer(0))


def test_many_small_rings_beside_a_big_one(stage):
    reader = stage.reader()
    handles = []
    for i, room in enumerate((4096, 64 << 20, 4096, 4096)):
        writer = stage.writer(Ring(2, room), source=f"teacher-{i}/dp0-tp0")
        stage.connect(writer, reader)
        handles.append(writer.publish(Slot(1, 2), targets(seed=i), LAYOUT))
    for i, handle in enumerate(handles):
        assert_same(reader.read(handle), targets(seed=i))


def test_auto_selects_cuda_ipc_on_one_gpu(stage):
    writer, reader = (side.tell("place", "cuda", "node") for side in stage.sides[:2])
    assert writer.device == reader.device
    assert choose("auto", writer, [reader]).name == "cuda_ipc"


def test_expandable_segments_are_refused(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from distill_rl.transport.cuda_ipc import CudaIpcTransport

    with pytest.raises(TransportError, match="PYTORCH_CUDA_ALLOC_CONF turns expandable segments on"):
        CudaIpcTransport(Ring(1, ROOM), deadline_s=1)
