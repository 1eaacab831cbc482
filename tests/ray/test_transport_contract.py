"""Every transport keeps one contract, which is written down in `tests/helpers/transport_contract.py`."""

import pytest

from distill_rl.transport.base import Ring, Slot
from distill_rl.transport.segment import sweep
from tests.helpers.transports import Actor, Here, Process, Stage

pytest.register_assert_rewrite("tests.helpers.transport_contract")

from tests.helpers.transport_contract import LAYOUT, ROOM, Acknowledged, Apart, Every, targets  # noqa: E402

pytestmark = pytest.mark.ray


class TestLocal(Every, Acknowledged):
    @pytest.fixture
    def stage(self):
        stage = Stage("local", [Here()])
        yield stage
        stage.close()


class TestObjectStore(Every, Apart):
    @pytest.fixture
    def stage(self, actors, ray_cluster):
        stage = Stage("object_store", living(actors, lambda: Actor(ray_cluster)))
        yield stage
        stage.close()

    def test_neither_side_gathers_references(self, stage):
        writer, reader = stage.pair(Ring(2, ROOM))
        counts = []
        for turn in range(20):
            reader.read(writer.publish(Slot(turn % 2, 2 * turn + 2), targets(), LAYOUT))
            counts.append((writer.references(), reader.references()))
        for of_side in zip(*counts):
            assert max(of_side[10:]) <= max(of_side[:10])


class TestSharedMemory(Every, Acknowledged, Apart):
    @pytest.fixture(params=["memfd", "file"])
    def stage(self, request, processes):
        stage = Stage("shared_memory", living(processes, Process), backing=request.param)
        yield stage
        stage.close()
        sweep()  # removes what killed writers left


@pytest.fixture(scope="module")
def actors():
    """Actors are kept from test to test; those that a test has killed are replaced."""
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
