"""`kd_loss` as a module."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distill_rl.losses.core.autograd import untraced
from distill_rl.losses.core.task import KDOutput
from distill_rl.losses.fused import fused_linear_kd_loss
from distill_rl.losses.kd import kd_loss
from distill_rl.losses.options import KDOptions
from distill_rl.losses.targets import DenseLogits, Teacher

_OF_A_BATCH = ("student_logits", "teacher", "labels", "token_weights", "num_items_in_batch", "num_labels")


class KDLoss(nn.Module):
    """Holds the settings of `kd_loss`; the batch comes with the call. It has no parameters.

        criterion = KDLoss(divergence="jsd", beta=0.3, temperature=2.0, kd_ratio=0.5)
        criterion(logits, targets, labels).loss.backward()
        criterion(hidden, targets, labels, lm_head_weight=head.weight).loss.backward()   # logits never exist

    Args:
        settings: any keyword of `kd_loss` that is not a tensor of the batch.

    Raises:
        TypeError: a keyword that `kd_loss` does not have, or that belongs to the batch.
        ValueError: a value that `kd_loss` refuses.
    """

    def __init__(self, **settings: Any):
        super().__init__()
        parameters = inspect.signature(kd_loss).parameters
        allowed = parameters.keys() - set(_OF_A_BATCH)
        if unknown := settings.keys() - allowed:
            raise TypeError(
                f"KDLoss has no setting {', '.join(sorted(unknown))}; there are {', '.join(sorted(allowed))}"
            )
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        KDOptions.of(defaults | settings)
        self.settings = settings

    @untraced
    def forward(
        self,
        student: Tensor,
        teacher: Teacher | Tensor | None,
        labels: Tensor | None = None,
        *,
        token_weights: Tensor | None = None,
        num_items_in_batch: int | float | Tensor | None = None,
        num_labels: int | None = None,
        lm_head_weight: Tensor | None = None,
        bias: Tensor | None = None,
        softcap: float | None = None,
        tp_group: ProcessGroup | None = None,
    ) -> KDOutput:
        """`kd_loss` of a batch with the module's settings, or `fused_linear_kd_loss` if `lm_head_weight` is given.

        Args:
            student: logits, or hidden states if `lm_head_weight` is given.
            teacher: targets; or a tensor of logits, as `DenseLogits` takes them.
            bias, softcap: of the student's output layer, only with `lm_head_weight`.
            tp_group: overrides that of the settings.

        Raises:
            ValueError: `bias` or `softcap` without `lm_head_weight`, or whatever the loss refuses.
        """
        settings = self.settings if tp_group is None else self.settings | {"tp_group": tp_group}
        target = DenseLogits(teacher) if isinstance(teacher, Tensor) else teacher
        batch: dict[str, Any] = {
            "labels": labels,
            "token_weights": token_weights,
            "num_items_in_batch": num_items_in_batch,
            "num_labels": num_labels,
        }
        if lm_head_weight is None:
            if bias is not None or softcap is not None:
                raise ValueError("bias, softcap: belong to lm_head_weight, which is None")
            return kd_loss(student, target, **batch, **settings)
        return fused_linear_kd_loss(student, lm_head_weight, target, bias=bias, softcap=softcap, **batch, **settings)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
