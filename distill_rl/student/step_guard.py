"""Which steps are skipped: those whose loss or gradient norm is not finite and, on request, those that are a spike.

A value is a spike if it exceeds `spike_factor` times the median of the last `spike_window` steps that were taken.
The guard sees numbers that are equal on all ranks and is a pure function of them, so all ranks take or skip a step
together without communication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from distill_rl.config.schema import FaultsConfig
from distill_rl.errors import NumericsError

_REMEDY = (
    "lower optimizer.lr, set train.max_grad_norm, look for broken rows or teacher weights, or allow more by "
    "faults.skipped_steps"
)


class StepGuard:
    """Decides step by step whether the optimizer must leave the weights alone.

    Args:
        config: `faults.skipped_steps`, `spike_window` and `spike_factor`.
    """

    def __init__(self, config: FaultsConfig):
        self._config = config
        self._in_a_row = 0
        self._seen: list[tuple[float, float]] = []
        """(loss, gradient norm) of the newest `spike_window` steps that were taken."""

    def reason_to_skip(self, step: int, loss: float, norm: float, blamed: Sequence[str] = ()) -> str | None:
        """Returns why a step must be skipped, or None if it is to be taken.

        Call it once per step: it counts the steps skipped in a row, and remembers loss and norm of the steps taken.

        Args:
            step: its number, for the error.
            loss: of the global batch.
            norm: of the whole gradient, before clipping.
            blamed: teachers whose KD is not finite although the student's cross-entropy is, for the error.

        Raises:
            NumericsError: the step must be skipped, and `faults.skipped_steps` steps in a row have already been
                skipped.
        """
        reason = self._reason(loss, norm)
        if reason is None:
            self._in_a_row = 0
            if norm > 0 and self._config.spike_window:  # a batch without labels would pull the median to 0
                self._seen = [*self._seen, (loss, norm)][-self._config.spike_window :]
            return None
        if self._in_a_row >= self._config.skipped_steps:
            rule, _, value = reason.partition("; got ")
            before = f" after {self._in_a_row} steps skipped in a row" if self._in_a_row else ""
            teachers = ", ".join(blamed)
            source = f", from the KD with teacher {teachers} (the student's cross-entropy is finite)" if blamed else ""
            remedy = f"check the weights and the dtype of teacher {teachers}" if blamed else _REMEDY
            raise NumericsError(f"step {step}", rule, value + before + source, remedy)
        self._in_a_row += 1
        return reason

    def _reason(self, loss: float, norm: float) -> str | None:
        """Returns why a step with this loss and gradient norm must be skipped, or None; remembers nothing.

        A spike is looked for only once `spike_window` steps have been taken; never if that is 0.
        """
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                return f"its {name} must be finite; got {value}"
        if len(self._seen) < max(self._config.spike_window, 1):
            return None
        for index, (name, value) in enumerate((("loss", loss), ("gradient norm", norm))):
            usual = median(seen[index] for seen in self._seen)
            if value > self._config.spike_factor * usual:
                rule = f"its {name} must be at most {self._config.spike_factor:g} x {usual:.4g}, the median before it"
                return f"{rule}; got {value:.4g}"
        return None

    def state(self) -> dict[str, Any]:
        """Returns the number of steps skipped in a row and the remembered losses and norms, as a dict for JSON."""
        return {"in_a_row": self._in_a_row, "seen": [list(pair) for pair in self._seen]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state` returned; missing entries mean a fresh start."""
        self._in_a_row = int(state.get("in_a_row", 0))
        self._seen = [(float(loss), float(norm)) for loss, norm in state.get("seen", [])]
