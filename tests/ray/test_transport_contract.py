"""One contract, every transport. What is promised, and by whom: `tests/helpers/transport_contract.py`."""

import pytest

from distill_rl.transport.segment import sweep
from tests.helpers.transports import Actor, Here, Process, Stage

pytest.register_assert_rewrite("tests.helpers.transport_contract")

from tests.helpers.transport_contract import Acknowledged, Apart, Every  # noqa: E402

pytestmark = pytest.mark.ray


class TestLocal(Every, Acknowledged):
    @pytest.fixture
    def stage(self):
        made = Stage("local", [Here()])
        yield made
        made.close()


class TestObjectStore(Every, Apart):
    @pytest.fixture
    def stage(self, actors, ray_cluster):
        made = Stage("object_store", living(actors, lambda: Actor(ray_cluster)))
        yield made
        made.close()


class TestSharedMemory(Every, Acknowledged, Apart):
    @pytest.fixture(params=["memfd", "file"])
    def stage(self, request, processes):
        made = Stage("shared_memory", living(processes, Process), backing=request.param)
        yield made
        made.close()
        sweep()  # after a writer that was killed


@pytest.fixture(scope="module")
def actors():
    """Sides are kept from test to test; one that a test has killed is made anew."""
    yield from kept()


@pytest.fixture(scope="module")
def processes():
    yield from kept()


def kept():
    sides = []
    yield sides
    for side in sides:
        side.kill()


def living(sides, make, count=3):
    sides[:] = [side if side.alive else make() for side in sides] or [make() for _ in range(count)]
    return sides
