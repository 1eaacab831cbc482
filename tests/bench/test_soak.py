"""The benchmark of long runs: both of its runs are watched, and growth in their second half is told."""

import json

import pytest

from tests.bench.scale import soak
from tests.bench.scale.watch import ROLES, Watch


def test_both_runs_are_watched(tmp_path):
    out = tmp_path / "soak.json"
    assert soak.main(["--steps", "200", "--real-steps", "200", "--every", "0.1", "--out", str(out)]) in (0, 1)
    found = json.loads(out.read_text())["runs"]
    for name, steps in (("stubs", 200), ("models", 200)):
        assert found[name]["steps"] == steps
        assert all(found[name][role]["mib"] > 5 for role in ROLES), found[name]


def test_growth_is_that_of_the_steps_that_count():
    watch = Watch(times=[float(i) for i in range(11)], resident={"driver": [100.0] * 6 + [101.0, 102, 103, 104, 105]})
    watch.head_bytes = [0.0] * 11
    steps = {float(i): 10 * i for i in range(11)}
    assert watch.per_step(steps, first=50)["driver_resident_kib_per_step"] == pytest.approx(102.4)
    assert watch.per_step(steps)["driver_resident_kib_per_step"] < 80


def test_growth_is_a_missed_target():
    figures = {"runs": {"stubs": {role: {"mib": 100.0, "growth": 0.0} for role in ROLES}}}
    assert soak.verdict(figures) == []
    figures["runs"]["stubs"]["head"]["growth"] = 0.05
    (line,) = soak.verdict(figures)
    assert line.startswith("stubs: the memory of the head grows by 5.0% in the second half")
