"""How long each phase of a step takes, without stopping the device in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from distill_rl.bench.gpu.cost_model import PHASES
from distill_rl.bench.gpu.engines import Engines

BODY, HEAD, FORWARD, LOSS, BACKWARD, OPTIMIZER = PHASES


class Clock:
    """Marks in the order of work; what lies between two of them is charged to the name of the later.

    On a GPU a mark is an event in the current stream, and nothing waits before `seconds` does; on a CPU it is the time.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    @property
    def last(self) -> str:
        return self._marks[-1][0] if self._marks else ""

    def mark(self, name: str) -> None:
        if not self._cuda:
            self._marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((name, event))

    def seconds(self) -> dict[str, float]:
        """Sums by name. Waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        sums: dict[str, float] = {}
        for (_, start), (name, end) in zip(self._marks, self._marks[1:]):
            elapsed = start.elapsed_time(end) / 1000 if self._cuda else end - start
            sums[name] = sums.get(name, 0.0) + elapsed
        return sums


def phase_seconds(engines: Engines, device: torch.device, steps: int) -> dict[str, float]:
    """Seconds per step of each of `PHASES`, over `steps` steps.

    Copies of weights and gradients run in FSDP2's own streams and may overlap with the phase they are counted in.
    """
    clock = Clock(device)
    clock.mark("start")
    with _marked(engines, clock):
        for _ in range(steps):
            for _ in engines.teach():
                clock.mark(HEAD)
            engines.student.forward_backward(engines.batch, engines.targets)
            clock.mark(BACKWARD)
            engines.student.optim_step()
            clock.mark(OPTIMIZER)
    found = clock.seconds()
    return {name: found.get(name, 0.0) / steps for name in PHASES}


@contextmanager
def _marked(engines: Engines, clock: Clock) -> Iterator[None]:
    """Marks the ends of the phases from hooks on the modules: the engines run as they are.

    The loss ends twice in a micro-batch: forward, and when the gradient of the logits is complete.
    """
    student = engines.student.model

    def before_student(*_: object) -> None:
        if clock.last == LOSS:  # the micro-batch before has ended with its backward
            clock.mark(BACKWARD)

    def after_student(_: object, __: object, output: Any) -> None:
        clock.mark(FORWARD)
        output.logits.register_hook(lambda _: clock.mark(LOSS))

    handles = [
        engines.teacher.model.base_model.register_forward_hook(lambda *_: clock.mark(BODY)),
        student.register_forward_pre_hook(before_student, prepend=True),
        student.register_forward_hook(after_student),
        engines.student.objective.register_forward_hook(lambda *_: clock.mark(LOSS)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
