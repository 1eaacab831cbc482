"""Faults of every CPU transport. The promises are written down in `tests/helpers/transport_faults.py`."""

import pytest

from tests.helpers.transports import Stage

pytest.register_assert_rewrite("tests.helpers.transport_faults")

from tests.helpers.transport_faults import Killed, Queued  # noqa: E402

pytestmark = pytest.mark.ray


class TestObjectStore(Queued):
    name = "object_store"


class TestSharedMemory(Killed, Queued):
    name = "shared_memory"

    @pytest.fixture(params=["memfd", "file"])
    def stage_of(self, request):
        return lambda sides: Stage("shared_memory", sides, backing=request.param)
