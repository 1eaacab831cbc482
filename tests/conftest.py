"""For a run in several processes (`launch/test.sh` without arguments): file by file, to whichever process is free.

What looks at shared memory or at processes waits for the others of its own run to be gone and asks for no more: another
test may hold some at the same time.
"""

from typing import Any

import pytest

TOGETHER = {"tests/cli/test_evaluations.py": "tests/cli/test_train.py"}
"""Files that compare with a run of another one: they go to the same process, so that it is made once."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            # One Ray for all of tests/ray, which starts once.
            return "tests/ray" if file.startswith("tests/ray/") else TOGETHER.get(file, file)

    return Scheduling(config, log)
