"""Names of gauges, and that nothing is recorded without Ray's metrics agent. With an agent: tests/monitoring."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import ray

from distill_rl.workers.cluster import telemetry
from distill_rl.workers.cluster.telemetry import Gauges, GaugeSink, gauge_of, write_targets


@pytest.mark.parametrize(
    ("name", "metric", "of"),
    [
        ("train/kl_loss", "train_kl_loss", ""),
        ("transport/slot_occupancy/big", "transport_slot_occupancy", "big"),
        ("timing/step", "timing_seconds", "step"),
        ("timing/student/fetch", "timing_seconds", "student/fetch"),
        ("eval/math500", "eval_score", "math500"),
        ("align/method/dp/numba", "align_method", "dp/numba"),
        ("odd-name/ü x", "odd_name___x", ""),
        ("step", "step", ""),
    ],
)
def test_gauge_name_is_two_levels_and_the_rest_is_a_tag(name: str, metric: str, of: str) -> None:
    assert gauge_of(name, 1.5) == (metric, 1.5, of)


@pytest.mark.parametrize("agent", [False, True], ids=["no agent", "no Ray"])
def test_nothing_is_recorded_without_agent_or_ray(monkeypatch: pytest.MonkeyPatch, agent: bool) -> None:
    monkeypatch.setattr(telemetry, "has_agent", lambda: agent)
    monkeypatch.setattr(ray, "is_initialized", lambda: not agent)
    sink, gauges_of_run = GaugeSink("run"), Gauges("run")
    sink.write(1, {"train/loss": 1.0, "train/tokens": 5.0})
    gauges_of_run.set("x", 1.0)
    gauges_of_run.add("x", 1.0)
    sink.close()
    assert gauges_of_run._metrics == sink._gauges._metrics == {}


def test_targets_list_the_agents_of_all_living_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def node(address: str, alive: bool) -> dict[str, Any]:
        return {"NodeManagerAddress": address, "MetricsExportPort": 8080, "Alive": alive}

    monkeypatch.setattr(telemetry, "has_agent", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [node("10.0.0.2", True), node("10.0.0.1", True), node("10.0.0.3", False)])
    path = tmp_path / "logs" / "targets.json"
    write_targets(path)
    assert json.loads(path.read_text()) == [
        {"targets": ["10.0.0.1:8080", "10.0.0.2:8080"], "labels": {"job": "distill_rl"}}
    ]


def test_agent_is_detected_by_a_package_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in (None, ModuleSpec("aiohttp_cors", None)):
        monkeypatch.setattr(telemetry, "find_spec", lambda name, spec=spec: spec)
        assert telemetry.has_agent() is (spec is not None)
