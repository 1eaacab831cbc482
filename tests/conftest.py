"""What all tests share. The default suite runs in two processes, and whole files go to the process that is free.

A test that looks at shared memory or at processes must tolerate those of another test that runs at the same time.
"""

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.guard import guard

try:
    from hypothesis import settings
except ModuleNotFoundError:
    pass  # on GPU machines: no test in tests/gpu uses it
else:
    # A test that fails because a machine is busy says nothing.
    settings.register_profile("distill_rl", deadline=None)
    settings.load_profile("distill_rl")

# For torch of this process and of all that it starts. A run with a single rank uses as many OpenMP threads as there are
# cores, and by default these spin while they wait: beside another test they would take its cores, and each other's.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that: nothing could be interrupted.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


TOGETHER = ("tests/ray/", "tests/unit/store/test_compact")
"""All files whose path begins so go to one process: the first share one Ray, the second a codec that takes long to compile"""


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(guard())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected lives until the end, so the garbage collector does not search it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((start for start in TOGETHER if file.startswith(start)), file)

    return Scheduling(config, log)
