"""A process that ends with its parent, however that ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Has the kernel send this process a signal when the thread that started it ends (Linux; nothing elsewhere).

    Args:
        parent: process id of the parent. If it has ended already, this process exits at once, with 1.
        number: the signal.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
