"""The benchmark of long runs: growth in the second half of a run is told."""

import pytest

from tests.bench.scale import soak
from tests.bench.scale.watch import ROLES, Watch


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
