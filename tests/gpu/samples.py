"""Tests that stand for parts of the GPU check in its own tests: some succeed, the others fail in every way they can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.gpu.check import Part
from tests.gpu.conftest import Figures


def test_well(figures: Figures, budget_s: float) -> None:
    print("printed by a part")
    figures.within("error", 1e-7, 1e-6)
    figures |= {"budget": budget_s, "rows": [{"name": "first", "ms": float("nan")}]}


@pytest.mark.parametrize("error", [0.1, 0.3, 0.2])
def test_wrong(figures: Figures, error: float) -> None:
    figures.within("gradient", error, 0.25)


def test_raises() -> None:
    raise KeyError("a setting")


def test_skips() -> None:
    pytest.skip("needs two GPUs")


def test_crashes(figures: Figures) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_leaves() -> None:
    os._exit(7)


def test_hangs() -> None:
    """Waits for a child in its own session, which a signal to the process group would not reach."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    print(f"child {child.pid}", flush=True)
    child.wait()


def _part(name: str, limit_s: float = 120.0, **more) -> Part:
    return Part(name, f"what {name} shows", (f"tests/gpu/samples.py::test_{name}",), limit_s, **more)


PARTS = (
    _part("well"),
    _part("wrong"),
    _part("raises"),
    _part("skips"),
    _part("crashes"),
    _part("leaves"),
    _part("hangs", 20.0),
    _part("absent"),
    _part("broken", needs=("a_package_that_is_not_there",)),
)
