"""Transformers without PyTorch, for the process of `distill-rl check`, which needs its configurations and tokenizers only.

PyTorch takes two seconds to import, more than all that `check` does, and Transformers imports it with its first
configuration. There is no setting against that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    with _hidden("torch"), _quiet():
        # It looks for torch once, and remembers the answer.
        import_module("transformers.utils").is_torch_available()


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Makes a package that has not been imported look as if it were not installed, until the block ends."""
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Transformers from advising to install PyTorch, until the block ends."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
