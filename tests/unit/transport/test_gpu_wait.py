"""How a CUDA IPC reader waits, with real processes and a fake event that is reached late or never."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from distill_rl.errors import TransportError
from distill_rl.transport.cuda_ipc import has_ended, wait_for


@dataclass
class Event:
    """Reached at query number `reached`; None: never."""

    reached: int | None
    looks: int = 0
    at_look: dict[int, Callable[[], None]] = field(default_factory=dict)

    def query(self) -> bool:
        self.looks += 1
        self.at_look.get(self.looks, lambda: None)()
        return self.reached is not None and self.looks >= self.reached


@dataclass
class Writer:
    process: subprocess.Popen[bytes]
    descriptor: int

    def die(self) -> None:
        """By SIGKILL; dead on return, and not yet reaped, as a child of Ray's may be."""
        self.process.kill()
        select.select([self.descriptor], [], [], 30)


@pytest.fixture
def writer() -> Iterator[Writer]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = os.pidfd_open(process.pid)
    yield Writer(process, descriptor)
    os.close(descriptor)
    process.kill()
    process.communicate()


def test_reached_event_is_queried_once(writer: Writer) -> None:
    event = Event(reached=1)
    wait_for(event, writer.descriptor, deadline_s=0, what="slot 0 is read")
    assert event.looks == 1


def test_event_is_queried_until_reached(writer: Writer) -> None:
    event = Event(reached=9)
    wait_for(event, writer.descriptor, deadline_s=60, what="slot 0 is read")
    assert event.looks == 9


def test_dead_writer_ends_the_wait(writer: Writer) -> None:
    assert not has_ended(writer.descriptor)
    event = Event(reached=None, at_look={5: writer.die})
    with pytest.raises(TransportError, match=r"^slot 3: its writer must live while it is read; got a writer that died"):
        wait_for(event, writer.descriptor, deadline_s=60, what="slot 3 is read")
    assert event.looks == 5
    assert has_ended(writer.descriptor)


def test_hanging_gpu_ends_the_wait_at_the_deadline(writer: Writer) -> None:
    event = Event(reached=None)
    with pytest.raises(
        TransportError, match=r"slot 3 is read within 0\.02 s; .*raise ray\.step_timeout_s.*whether the GPU hangs"
    ):
        wait_for(event, writer.descriptor, deadline_s=0.02, what="slot 3 is read")
    assert event.looks >= 2
    assert writer.process.poll() is None
