import torch

from distill_rl.gpu_check.checks import dp


def test_the_compiled_programme_gives_numpys_answers() -> None:
    found = dp.check(torch.device("cpu"), tiny=True)
    assert found["windows"] == 120
    assert found["tokens_matched"] > 100
