from __future__ import annotations

import pytest

from tests.bench import step


@pytest.mark.parametrize("way", [step.LOOPS_LOSS, step.EXACT])
def test_our_engines_have_the_losses_of_the_plain_loop(tmp_path, way):
    setup = step._random(tmp_path, "0.1M", length=24) | {"steps": 2, "micro_batch": 2}
    plain, ours = [*step._plain(step.PLAIN, setup)], [*step._ours(way, setup)]
    assert len(plain) == 3
    assert plain[2] < plain[0]
    assert ours == pytest.approx(plain, rel=step.TOLERANCE)


def test_other_losses_are_reported():
    rows = [
        {"model": "0.1M", "way": way, "losses": losses}
        for way, losses in ((step.PLAIN, [2.0, 1.0]), (step.EXACT, [2.0, 1.01]), ("top 64, bucket", [1.5, 0.5]))
    ]
    assert step.verdict({"rows": rows}) == [f"0.1M, step 1: the loss of {step.EXACT} is 1.01, in the plain loop 1.0"]
