"""Whole runs of the benchmarks of many ranks and of long runs: two nodes, and tiny models beside ranks that compute nothing."""

import json

from tests.bench.scale import scale, soak
from tests.bench.scale.watch import ROLES


def test_ranks_on_two_nodes_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "PROCESSES", 2)
    monkeypatch.setattr(scale, "AMONG", 4)
    out = tmp_path / "scale.json"
    sizes = ["--ranks", "4", "--micro-batches", "1", "--steps", "20", "--nodes", "2"]
    assert scale.main([*sizes, "--out", str(out)]) in (0, 1)
    (case,) = json.loads(out.read_text())["cases"]
    assert (case["ranks"], case["micro_batches"], case["ranks_per_process"], case["nodes"]) == (4, 1, 2, 2)
    assert case["driver_cpu_ms"] > 0
    assert 0 < case["step_ms"] / 1000 < case["start_s"]
    assert case["replace_teacher_s"] > 0
    assert case["objects"] <= 1, "the driver has let go of all but a question to the monitor of the other node"


def test_both_runs_of_a_soak_are_watched(tmp_path):
    out = tmp_path / "soak.json"
    assert soak.main(["--steps", "200", "--real-steps", "200", "--every", "0.1", "--out", str(out)]) in (0, 1)
    found = json.loads(out.read_text())["runs"]
    for name, steps in (("stubs", 200), ("models", 200)):
        assert found[name]["steps"] == steps
        assert all(found[name][role]["mib"] > 5 for role in ROLES), found[name]
