"""The command line goes on with a run of an earlier commit."""

from __future__ import annotations

import pytest

from tests.frozen.past import PASTS, copied
from tests.frozen.record import MEASURED
from tests.helpers.command import distill_rl, series

pytestmark = pytest.mark.cli


@pytest.mark.parametrize("name", PASTS)
def test_a_frozen_run_is_resumed_for_one_more_step(name, cluster, tmp_path):
    past = copied(name, tmp_path / name)
    run = past.folder / "runs" / "two-teachers"
    settings = ("-c", "runs/two-teachers/config.yaml", "--resume", "train.steps=5")
    ended = distill_rl("train", *settings, cwd=past.folder, cluster=cluster)
    assert ended.code == 0, ended.err
    wanted = past.recorded["runs"]["two-teachers"]["steps"][0]
    found = {metric: series(run, metric)[-1] for metric in MEASURED}
    assert found == {metric: (5, pytest.approx(wanted[metric], rel=1e-5, abs=1e-5)) for metric in MEASURED}
    assert {path.name for path in (run / "checkpoints").glob("step-*")} == {"step-4", "step-5"}
