"""For a run in several processes (`launch/test.sh` without arguments): what starts Ray stays together.

Those tests wait most of their time for processes to start, and look at what is left in shared memory and of processes, which
two of them at once would not understand. All others go to the other process, file by file.
"""

from typing import Any

import pytest

STARTS_RAY = ("tests/cli/", "tests/ray/", "tests/gpu/", "tests/vllm/", "tests/unit/bench/test_train_cuda.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "starts Ray" if nodeid.startswith(STARTS_RAY) else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_itemcollected(item: pytest.Item) -> None:
    """The list above must hold all that is marked so."""
    marked = item.get_closest_marker("cli") or item.get_closest_marker("ray")
    if marked and not item.nodeid.startswith(STARTS_RAY):
        raise pytest.UsageError(f"{item.nodeid}: starts Ray and is not among STARTS_RAY of tests/conftest.py")
