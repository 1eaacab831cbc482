import torch

from tests.gpu.check.checks import dp


def test_compiled_dynamic_programme_matches_numpy() -> None:
    figures = dp.check(torch.device("cpu"), tiny=True)
    assert figures["windows"] == 120
    assert figures["tokens_matched"] > 100
