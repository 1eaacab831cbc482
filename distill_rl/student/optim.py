"""AdamW over sharded parameters, the learning rate as a pure function of the step, global-norm clipping, and
which steps are skipped.

Every parameter is a DTensor on one mesh (`World.parameter_mesh`), or a plain tensor on a single rank, so all of this is plain torch
without special cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from distill_rl.config.derive import warmup_steps
from distill_rl.config.schema import FaultsConfig, OptimizerConfig, ScheduleConfig
from distill_rl.errors import NumericsError
from distill_rl.models.families import is_decayed

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_REMEDY = (
    "lower optimizer.lr, set train.max_grad_norm, look for broken rows or teacher weights, or allow more by "
    "faults.skipped_steps"
)


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, fused: bool = False) -> torch.optim.AdamW:
    """Returns an AdamW (arXiv 1711.05101) for all trainable parameters, with weight decay where it applies.

    Norms and biases are not decayed, whatever their shape (`families.is_decayed`). The state of every trainable parameter (`exp_avg` and `exp_avg_sq` like the
    parameter, `step` an fp32 scalar) exists from the start, so that memory is known before the first step and a
    checkpoint has the same content at any step. The learning rate is set before each step from a `Schedule`.

    Args:
        fused: use one kernel per step that reads and writes everything once and needs no temporaries, instead of
            torch's foreach implementation. `step` is on the parameter's device for the fused kernel and on the CPU for
            foreach; checkpoints of one load into the other.
    """
    import torch

    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed = [parameter for name, parameter in named.items() if is_decayed(name, parameter.ndim)]
    others = [parameter for name, parameter in named.items() if not is_decayed(name, parameter.ndim)]
    of_decay = ((decayed, config.weight_decay), (others, 0.0))
    groups = [{"params": parameters, "weight_decay": decay} for parameters, decay in of_decay if parameters]
    beta1, beta2 = config.betas
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, foreach=not fused, fused=fused
    )
    for parameter in named.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


class Schedule:
    """Learning rate of every optimizer step: linear warm-up, peak, then cosine, linear or constant.

    With horizon h (`schedule.steps`, or else the last step of the run), warm-up w (`derive.warmup_steps`: as
    configured, or a tenth of h where that is longer than h) and p = w + `schedule.hold_steps`, step s, counted from 1,
    has `lr·s/w` while s ≤ w, and afterwards `lr·(m + (1 − m)·shape(x))` with m = `schedule.min_lr_ratio`,
    x = max(0, s − 1 − p)/(h − p) and a shape that falls from 1 at x = 0 to 0 at x = 1. The first step after the warm-up
    has the peak rate, and no step up to h has a rate of zero. Steps after h stay at `lr·m` (`constant`: at `lr`).

    The rate depends on s and h alone. So if a run is extended by a larger `train.steps`:
    with `schedule.steps` set, the horizon stays, and the steps beyond it run at the minimum;
    with `schedule.steps: null`, the horizon moves to the new last step, and from the first step after the resume the
    rate is that of the longer schedule (a jump upwards, unless `kind: constant`).

    Args:
        peak: the rate at the end of the warm-up.
        total_steps: last step of the run; `loader.ENDLESS` while it is not known, with which the rate stays at the peak.
    """

    def __init__(self, config: ScheduleConfig, *, peak: float, total_steps: int):
        self.config = config
        self.peak = peak
        self.horizon = total_steps if config.steps is None else config.steps
        self.warmup = warmup_steps(config, self.horizon)

    def __call__(self, step: int) -> float:
        """Returns the learning rate of optimizer step `step`, counted from 1."""
        warmup, least = self.warmup, self.config.min_lr_ratio
        if step <= warmup:
            return self.peak * step / warmup
        if self.config.kind == "constant":
            return self.peak
        held = warmup + self.config.hold_steps
        x = min(1.0, max(0, step - 1 - held) / max(1, self.horizon - held))
        shape = 0.5 * (1.0 + math.cos(math.pi * x)) if self.config.kind == "cosine" else 1.0 - x
        return self.peak * (least + (1.0 - least) * shape)


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scales all gradients in place by one factor so that their global L2 norm is at most `max_norm`.

    With `max_norm` 0 they are left alone, and the norm is only computed. The norm is that of the whole gradient:
    sharded parts are summed over the mesh, replicated ones count once. Parameters without a gradient are skipped.
    Collective.

    Returns:
        The norm before clipping, a scalar equal on all ranks. NaN or Inf if any gradient holds one.
    """
    import torch
    from torch.distributed.tensor import DTensor

    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm


# A step is skipped if its loss or gradient norm is not finite and, on request, if it is a spike: more than `spike_factor` times
# the median of the last `spike_window` steps that were taken. The guard sees numbers that are equal on all ranks and is a pure
# function of them, so all ranks take or skip a step together without communication.


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
        """Returns why a step with this loss and gradient norm must be skipped, or None; remembers nothing."""
        # A spike is looked for only once `spike_window` steps have been taken; never if that is 0.
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                return f"its {name} must be finite; got {value}"
        if len(self._seen) < max(self._config.spike_window, 1):
            return None
        for index, (name, value) in enumerate((("loss", loss), ("gradient norm", norm))):
            usual = median(seen[index] for seen in self._seen)
            if value > self._config.spike_factor * usual > 0:  # losses that may be negative have no such multiple
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
