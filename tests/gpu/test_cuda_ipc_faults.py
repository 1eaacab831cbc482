"""Faults between processes on one GPU."""

import pytest

from tests.helpers.transports import Stage

pytest.register_assert_rewrite("tests.helpers.transport_faults")

from tests.helpers.transport_faults import Killed, Queued  # noqa: E402

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
