"""The benchmark of `distill-rl check` measures real processes and writes what it measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distill_rl.system.environment import ROOT
from tests.bench import check


def test_each_run_has_figures_and_the_median_is_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(check.RECIPE, training_rows=64, validation_rows=8, test_rows=8)
    monkeypatch.setattr(check, "RECIPE", few)
    out = tmp_path / "check.json"
    check.main(["--runs", "1", "--out", str(out)])  # 0 or 1: nothing is asserted about durations
    written = json.loads(out.read_text())
    assert written["benchmark"] == "check"
    (run,) = written["runs"]
    assert written["median"] == run
    assert run["cpu_s"] > 0


def test_a_check_that_fails_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"student\.model: no such folder"):
        check.check(ROOT / "configs" / "quickstart.yaml", tmp_path)


def test_only_a_median_at_or_above_the_target_is_a_miss() -> None:
    assert check.verdict({"median": {"cpu_s": check.TARGET_S - 0.01}}) == []
    assert len(check.verdict({"median": {"cpu_s": check.TARGET_S}})) == 1
