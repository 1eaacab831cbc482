"""Faults between processes on one GPU."""

import pytest
import torch

from distill_rl.transport.base import Ring, Slot
from tests.helpers.transports import Process, Stage

pytest.register_assert_rewrite("tests.helpers.transport_faults")

from tests.helpers.transport_faults import LAYOUT, Killed, Queued  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ray_cluster():
    """A session for this module only: a process can be in one session, and other tests have their own."""
    from distill_rl.config.schema import RayConfig
    from distill_rl.workers.cluster.session import ray, ray_session

    with ray_session(RayConfig(), num_cpus=8):
        yield ray


class TestCudaIpc(Killed, Queued):
    name, device = "cuda_ipc", "cuda"
    outlives_its_writer = False

    @pytest.fixture
    def stage_of(self):
        return lambda sides: Stage("cuda_ipc", sides, device="cuda")


@pytest.fixture
def sides():
    made = [Process(), Process(), Process()]
    yield made
    for side in made:
        side.kill()


def test_a_ring_for_new_readers_takes_the_memory_of_the_one_before(sides):
    """Torch would keep the memory of every ring whose reader was killed."""
    stage, ring = Stage("cuda_ipc", sides, device="cuda"), Ring(2, 64 << 20)
    taken, writer = [], None
    for turn, side in enumerate(sides[1:]):
        writer, reader = stage.writer(ring, earlier=writer), stage.reader(side=side)
        stage.connect(writer, reader)
        taken.append(writer.reserved_gpu_memory())
        content = {"x": torch.full((4,), turn)}
        assert reader.read(writer.publish(Slot(0, 2), content, LAYOUT))["x"].tolist() == [turn] * 4
        side.kill()
    assert taken[0] >= 128 << 20 > taken[1] - taken[0]
