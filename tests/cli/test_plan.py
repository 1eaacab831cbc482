"""`distill-rl plan` as a user calls it."""

from __future__ import annotations

import re

import pytest

from tests.helpers.command import distill_rl_in_process as distill_rl

pytestmark = pytest.mark.cli


def test_a_plan_names_settings_that_check_accepts(material, tmp_path):
    config = material.config(tmp_path)
    ended = distill_rl("plan", "-c", config, "--gpus", "8", "train.global_batch_size=64")
    assert ended.code == 0, ended.err
    batch = r"a batch is 64 documents: about [\d,]+ positions per step, \d+(\.\d)? % of them with a token, by a sample"
    assert re.match(rf"cluster    8 × H100 SXM, 8 per node; {batch}\n", ended.out)
    for word in ("limit", "faults", "first"):
        assert re.search(rf"^{word} +\S", ended.out, re.MULTILINE)
    settings = re.search(r"^take +(.*)$", ended.out, re.MULTILINE)[1].split()
    checked = distill_rl("check", "-c", config, "train.global_batch_size=64", *settings)
    assert checked.code == 0, checked.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--gpus", "12"], "--gpus: must be at least 1, and whole nodes if there are several; got 12 with 8 per node"),
        (["--gpus", "0"], "--gpus: must be at least 1"),
        (["--gpus", "8", "loss.kd_weight=0", "loss.ce_weight=1"], "teachers: must be one teacher with backend hf, for a plan; got none"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(material, tmp_path, arguments, line):
    ended = distill_rl("plan", "-c", material.config(tmp_path), *arguments)
    assert ended.code == 2
    assert len(ended.errors) == 1
    assert re.match(f"distill-rl: error: {line}", ended.errors[0]), ended.errors
