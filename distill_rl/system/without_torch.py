"""Transformers without PyTorch, for the process of `distill-rl check`, which needs its configurations and tokenizers only.

PyTorch takes two seconds to import, more than all that `check` does, and Transformers imports it with its first
configuration. There is no setting against that.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

_GPU_NODES = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "kfd", "dxg")
"""Device files of GPUs that torch may use: NVIDIA, its Jetson boards, AMD, Windows' subsystem for Linux."""


def gpu_possible() -> bool:
    """Whether this machine may have a GPU that torch can use: there is a device file of one, or it is not Linux."""
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in _GPU_NODES)


def import_transformers_without_torch() -> None:
    """Imports Transformers so that it works without PyTorch, as where that is not installed, until the process ends.

    Only for a process that loads no model. Anything else in it may still import torch. Does nothing if torch or
    Transformers has been imported.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    variable = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # it would advise to install PyTorch
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        # It looks for torch once, and remembers the answer.
        import_module("transformers.utils").is_torch_available()
    finally:
        del sys.modules["torch"]
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
