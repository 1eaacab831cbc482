"""How long each phase of a step takes, without stopping the device in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from distill_rl.bench.gpu.cost_model import PHASES
from distill_rl.bench.gpu.engines import Engines
from distill_rl.bench.gpu.timing import Clock

BODY, HEAD, FORWARD, LOSS, BACKWARD, OPTIMIZER = PHASES


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
    sums = dict.fromkeys(PHASES, 0.0)
    for phase, seconds in clock.intervals():
        sums[phase] += seconds / steps
    return sums


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
