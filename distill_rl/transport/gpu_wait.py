"""Waiting on the CPU for what a GPU does, while another process must stay alive."""

from __future__ import annotations

import select
import time
from typing import Protocol

from distill_rl.errors import TransportError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
"""Between two looks: doubled from the first to the longest. What is awaited is mostly done, or done in milliseconds."""


ALIVE = "its writer must live while it is read"


class Event(Protocol):
    """A mark in a GPU's stream, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the GPU has reached it."""
        ...


def has_ended(process: int) -> bool:
    """Whether the process of this descriptor (`os.pidfd_open`) has ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def wait_for(event: Event, writer: int, *, deadline_s: float, what: str) -> None:
    """Returns once the GPU has reached `event`. Unlike `event.synchronize()` it ends if nothing ever gets there.

    Args:
        writer: descriptor of the process whose memory is read (`os.pidfd_open`). Its GPU work ends with it, and so may
            an event that stands behind that work never be reached.
        deadline_s: how long to wait.
        what: what is done then, for messages (`slot 3 is read`).

    Raises:
        TransportError: the writer has ended, or the deadline has passed.
    """
    deadline, pause = time.monotonic() + deadline_s, _FIRST_PAUSE_S
    while not event.query():
        if has_ended(writer):
            raise TransportError(what.partition(" is ")[0], ALIVE, "a writer that died")
        if time.monotonic() > deadline:
            raise TransportError(
                "the GPU", f"must get to the point where {what} within {deadline_s:g} s", "no end of it",
                "raise ray.step_timeout_s, or look at the GPU with nvidia-smi and dmesg: it may hang",
            )  # fmt: skip
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
