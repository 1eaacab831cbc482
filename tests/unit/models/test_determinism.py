import os

import pytest
import torch

from distill_rl.models.determinism import be_deterministic


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("wanted", "device", "turned_on"), [(True, "cuda", True), (True, "cpu", False), (False, "cuda", False)]
)
def test_it_is_turned_on_for_gpus_where_it_is_wanted(wanted, device, turned_on):
    be_deterministic(wanted, torch.device(device))
    assert torch.are_deterministic_algorithms_enabled() is turned_on
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) is turned_on


def test_a_workspace_that_was_chosen_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    be_deterministic(True, torch.device("cuda"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
