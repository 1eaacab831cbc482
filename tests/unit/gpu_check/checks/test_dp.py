import torch

from distill_rl.gpu_check.checks import dp


def test_compiled_dynamic_programme_matches_numpy() -> None:
    found = dp.check(torch.device("cpu"), tiny=True)
    assert found["windows"] == 120
    assert found["tokens_matched"] > 100
