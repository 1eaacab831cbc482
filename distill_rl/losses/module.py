"""The loss as a module, for trainers that want one object."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from distill_rl.losses.fused import fused_linear_kd_loss
from distill_rl.losses.kd import kd_loss
from distill_rl.losses.targets import Teacher
from distill_rl.losses.task import KDOutput


class KDLoss(nn.Module):
    """Holds the settings of `kd_loss`; the batch comes with the call. It has no parameters.

        criterion = KDLoss(divergence="jsd", beta=0.3, temperature=2.0, kd_ratio=0.5)
        criterion(logits, targets, labels=labels).loss.backward()
        criterion(hidden, targets, lm_head_weight=head.weight, labels=labels).loss.backward()   # logits never exist

    Args:
        settings: any keyword of `kd_loss` that is not a tensor of the batch.

    Raises:
        TypeError: a keyword that `kd_loss` does not have, on the first call.
    """

    def __init__(self, **settings: Any):
        super().__init__()
        self.settings = settings

    def forward(
        self,
        student: Tensor,
        teacher: Teacher | None,
        *,
        labels: Tensor | None = None,
        token_weights: Tensor | None = None,
        num_items_in_batch: int | float | Tensor | None = None,
        lm_head_weight: Tensor | None = None,
        bias: Tensor | None = None,
        softcap: float | None = None,
    ) -> KDOutput:
        """`student`: logits, or hidden states where `lm_head_weight` is given."""
        batch: dict[str, Any] = {
            "labels": labels,
            "token_weights": token_weights,
            "num_items_in_batch": num_items_in_batch,
        }
        if lm_head_weight is None:
            if bias is not None or softcap is not None:
                raise ValueError("bias, softcap: belong to lm_head_weight, which is None")
            return kd_loss(student, teacher, **batch, **self.settings)
        return fused_linear_kd_loss(
            student, lm_head_weight, teacher, bias=bias, softcap=softcap, **batch, **self.settings
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
