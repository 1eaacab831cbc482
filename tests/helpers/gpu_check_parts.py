"""Parts of the GPU check for its tests: some succeed, the others fail in every way they can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import unittest
from typing import Any, NoReturn

import torch


def well(device: torch.device, tiny: bool) -> dict[str, Any]:
    print("printed by a part")
    return {"error": torch.tensor(1e-7), "count": 3, "rows": [{"name": "first", "ms": float("nan")}]}


def budgeted(device: torch.device, tiny: bool, budget_s: float) -> dict[str, float]:
    return {"budget": budget_s}


def wrong(device: torch.device, tiny: bool) -> dict[str, float]:
    raise AssertionError("the gradient is off\nby 3.0e-01")


def raises(device: torch.device, tiny: bool) -> dict[str, float]:
    raise KeyError("a setting")


def skips(device: torch.device, tiny: bool) -> dict[str, float]:
    raise unittest.SkipTest("needs two GPUs")


def crashes(device: torch.device, tiny: bool) -> NoReturn:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("unreachable")


def leaves(device: torch.device, tiny: bool) -> NoReturn:
    sys.exit(7)


def hangs(device: torch.device, tiny: bool) -> NoReturn:
    """Wait for a child in its own session, which a signal to the process group would not reach."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    print(f"child {child.pid}", flush=True)
    child.wait()
    raise AssertionError("unreachable")
