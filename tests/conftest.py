"""For a run over several processes (`launch/test.sh` without arguments): what starts Ray stays together.

Those tests wait most of their time for processes to start, and look at what is left in shared memory and of processes, which
two of them at once would not understand. All others go to the other process.
"""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cli") or item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))
