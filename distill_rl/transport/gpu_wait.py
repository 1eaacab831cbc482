"""Waiting on the CPU for a GPU, as long as another process lives."""

from __future__ import annotations

import select
import time
from typing import Protocol

from distill_rl.errors import TransportError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
"""Pauses between two queries double from the first to the longest. Most events are reached already, or in milliseconds."""

ALIVE = "its writer must live while it is read"


class Event(Protocol):
    """A mark in a GPU's stream: `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the GPU has reached it."""


def has_ended(process: int) -> bool:
    """Whether the process behind this file descriptor (`os.pidfd_open`) has ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def wait_for(event: Event, writer: int, *, deadline_s: float, what: str) -> None:
    """Returns once the GPU has reached `event`. Unlike `event.synchronize()`, it also ends if that never happens.

    Args:
        writer: file descriptor (`os.pidfd_open`) of the process whose memory is read. If it dies, its GPU work ends, and
            an event behind that work may never be reached.
        deadline_s: how long to wait.
        what: what the event marks, for messages (`slot 3 is read`).

    Raises:
        TransportError: the writer has ended, or the deadline has passed.
    """
    deadline, pause = time.monotonic() + deadline_s, _FIRST_PAUSE_S
    while not event.query():
        if has_ended(writer):
            raise TransportError(what.partition(" is ")[0], ALIVE, "a writer that died")
        if time.monotonic() > deadline:
            rule = f"must get to the point where {what} within {deadline_s:g} s"
            remedy = "raise ray.step_timeout_s, or check with nvidia-smi and dmesg whether the GPU hangs"
            raise TransportError("the GPU", rule, "no answer", remedy)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
