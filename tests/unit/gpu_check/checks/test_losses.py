"""The check of the losses, on a CPU; it must detect an error."""

import pytest
import torch

from tests.gpu.check.checks import losses

CPU = torch.device("cpu")


def test_every_loss_is_within_its_bound_on_a_cpu() -> None:
    errors = losses.check(CPU, tiny=True)
    assert set(errors) == {f"{kind}_gradient_error" for kind in losses.BOUNDS}
    assert all(error > 0 for error in errors.values())


def test_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.BOUNDS, "logits", 1e-9)
    with pytest.raises(AssertionError, match="forward_kl, dense, default backend: gradient off by"):
        losses.check(CPU, tiny=True)
