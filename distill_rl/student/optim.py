"""AdamW over sharded parameters, the learning rate as a pure function of the step, and global-norm clipping.

Every parameter is a DTensor on one mesh (`World.parameter_mesh`), so all of this is plain torch without special cases.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distill_rl.config.derive import warmup_steps
from distill_rl.config.schema import OptimizerConfig, ScheduleConfig
from distill_rl.models.families import is_decayed


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
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    trainable = list(named.values())
    decayed = {name for name, parameter in named.items() if is_decayed(name, parameter.ndim)}
    groups = [
        {"params": [named[name] for name in named if name in decayed], "weight_decay": config.weight_decay},
        {"params": [named[name] for name in named if name not in decayed], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(beta1, beta2),
        eps=config.eps,
        foreach=not fused,
        fused=fused,
    )
    for parameter in trainable:
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
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm
